"""Build the demo's model: a small Qwen3-MoE, trained for a minute on the texts that this machine has.

Training is what makes its routing worth looking at: an untrained router sends text to experts at random, a trained one
has favourites that change with the kind of text. The weights are a toy; the routing is measured, not made up.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from texts import KINDS, kind_of_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIALS = {"<pad>": 0, "<bos>": 1, "<eos>": 2}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that no vocabulary has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = SPECIALS | {symbol: len(SPECIALS) + index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=512
    )


def configuration(vocabulary_size: int) -> Qwen3MoeConfig:
    """Six layers, the last one dense; 32 experts, 4 chosen per token."""
    return Qwen3MoeConfig(
        vocab_size=vocabulary_size + -vocabulary_size % 8,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[5],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=SPECIALS["<bos>"],
        eos_token_id=SPECIALS["<eos>"],
        pad_token_id=SPECIALS["<pad>"],
        router_aux_loss_coef=0.05,
    )


def train(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> float:
    """Next-byte prediction on mixed texts; returns the last loss in nats per byte."""
    corpora = [torch.tensor(tokenizer(kind_of_text(kind, "train"), verbose=False)["input_ids"]) for kind in KINDS]
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        rows = []
        for corpus in corpora:
            start = int(torch.randint(len(corpus) - 129, (1,), generator=generator))
            rows.append(corpus[start : start + 128])
        batch = torch.stack(rows)
        loss = model(input_ids=batch, labels=batch, output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the matrices are too small for more
    started = time.monotonic()
    tokenizer = byte_tokenizer()
    model = Qwen3MoeForCausalLM(configuration(len(tokenizer)))
    loss = train(model, tokenizer, arguments.steps)
    model.save_pretrained(arguments.output, max_shard_size="1MB")
    tokenizer.save_pretrained(arguments.output)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Qwen3-MoE, {parameters / 1e6:.1f} M parameters, 5 MoE layers x 32 experts, "
        f"{arguments.steps} steps in {time.monotonic() - started:.0f} s, loss {loss:.2f} nats a byte"
    )


if __name__ == "__main__":
    main()
