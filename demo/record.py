"""Run texts through a model and save which experts its routers chose, one row a token.

The file is what any engine's per-token recording comes down to: `topk_ids` [tokens, MoE layers, k] and `layer_ids`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from texts import KINDS, kind_of_text
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQUENCE = 256


def routed_experts(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """uint8 [tokens, MoE layers, k]: the router's choices for a batch of sequences [sequences, length]."""
    with torch.no_grad():
        logits = model(input_ids=tokens, output_router_logits=True).router_logits
    k = model.config.num_experts_per_tok
    picks = [layer.reshape(tokens.numel(), -1).topk(k, dim=-1).indices for layer in logits]
    return torch.stack(picks, dim=1).to(torch.uint8).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--split", choices=("record", "replay"), default="record", help="which part of the texts")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the matrices are too small for more
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    sequences = []
    for kind in KINDS:
        ids = torch.tensor(tokenizer(kind_of_text(kind, arguments.split), verbose=False)["input_ids"])
        sequences.append(ids[: len(ids) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE))
    # Kinds alternate in runs, as the mix of a service does over a day.
    runs = [run for group in zip(*(part.split(16) for part in sequences), strict=False) for run in group]
    ids = np.concatenate([routed_experts(model, run) for run in runs])
    moe_layers = [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    np.savez_compressed(arguments.output, topk_ids=ids, layer_ids=np.array(moe_layers, np.int32))
    print(f"{ids.shape[0]:,} tokens x {ids.shape[1]} MoE layers x top-{ids.shape[2]}, from text of {len(KINDS)} kinds")


if __name__ == "__main__":
    main()
