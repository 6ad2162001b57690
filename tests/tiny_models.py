"""Tiny random models of the real families, made by transformers, each with a local byte-level tokenizer.

The fixtures build each model once a session; the folders are read-only for tests. Weights are fp32, so that a
comparison of logits is not blurred by rounding, and wide enough (std 0.2) that routing is far from ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

__all__ = ["llama4_multimodal", "llama4_text", "logits", "qwen3_moe", "tokenizer"]


def tokenizer(path: Path) -> int:
    """Save a byte-level tokenizer without merges into `path`; returns the vocabulary's size, a multiple of 8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    wrapped.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    wrapped.save_pretrained(path)
    return -len(words) // 8 * -8


def qwen3_moe(
    path: Path,
    *,
    fused: bool = False,
    layers: int = 6,
    mlp_only_layers: tuple[int, ...] = (0, 5),
    decoder_sparse_step: int = 1,
    experts: int = 16,
    top_k: int = 4,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """A Qwen3-MoE whose first and last layers are dense; per expert on disk, or fused as transformers 5 can write."""
    pytest.importorskip("transformers")
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer(path),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=decoder_sparse_step,
        mlp_only_layers=list(mlp_only_layers),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
        router_aux_loss_coef=0.0,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    model.save_pretrained(path, save_original_format=not fused, max_shard_size=max_shard_size)
    return path


def _llama4_sizes(vocab_size: int, layers: int, step: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 32,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": step,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "attention_chunk_size": 256,
        "attn_temperature_tuning": False,
        "use_qk_norm": True,
    }


def _randomise_experts(model: Any) -> None:
    """Fill what Llama 4's own initialisation leaves empty."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_up_proj" in name or "down_proj" in name or "router" in name:
                parameter.normal_(0, 0.2)


def llama4_text(
    path: Path, *, fused: bool = True, layers: int = 5, interleave_moe_layer_step: int = 2, seed: int = 1
) -> Path:
    """A text-only Llama 4, MoE in layers 1 and 3 of 5; fused as released in bf16, or per expert as quantised ones."""
    pytest.importorskip("transformers")
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    config = Llama4TextConfig(**_llama4_sizes(tokenizer(path), layers, interleave_moe_layer_step))
    model = Llama4ForCausalLM(config).to(torch.float32)
    _randomise_experts(model)
    model.save_pretrained(path)
    if not fused:
        _unfuse(path)
    return path


def llama4_multimodal(path: Path, *, layers: int = 5, interleave_moe_layer_step: int = 2, seed: int = 2) -> Path:
    """A Llama 4 with a vision tower: sizes nested in text_config, tensors below `language_model.`."""
    pytest.importorskip("transformers")
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    torch.manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "pixel_shuffle_ratio": 0.5,
    }
    text = _llama4_sizes(tokenizer(path), layers, interleave_moe_layer_step)
    config = Llama4Config(
        text_config=text, vision_config=vision, boi_token_index=3, eoi_token_index=4, image_token_index=5
    )
    model = Llama4ForConditionalGeneration(config).to(torch.float32)
    _randomise_experts(model)
    model.save_pretrained(path)
    return path


def _unfuse(path: Path) -> None:
    """Rewrite a saved Llama 4's fused tensors [E, in, out] as one entry per expert and matrix [out, in]."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            tensors[name] = tensor
            continue
        parts = {"down_proj": tensor}
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=-1)
            parts = {"gate_proj": gate, "up_proj": up}
        for projection, part in parts.items():
            for expert, matrix in enumerate(part):
                tensors[f"{stem}.{expert}.{projection}.weight"] = matrix.T.contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def logits(path: Path, *, prompts: int = 4, length: int = 24) -> Any:
    """fp32 logits [prompts, length, vocabulary] of a saved model on fixed random tokens."""
    import torch
    from transformers import AutoModelForCausalLM, Llama4ForConditionalGeneration

    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    kind = Llama4ForConditionalGeneration if architecture == "Llama4ForConditionalGeneration" else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.randint(8, 250, (prompts, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(tokens).logits


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_moe(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def tiny_qwen3_moe_fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_moe(tmp_path_factory.mktemp("qwen3_moe_fused"), fused=True)


@pytest.fixture(scope="session")
def tiny_llama4_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama4_text(tmp_path_factory.mktemp("llama4_text"))


@pytest.fixture(scope="session")
def tiny_llama4_per_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama4_text(tmp_path_factory.mktemp("llama4_per_expert"), fused=False)


@pytest.fixture(scope="session")
def tiny_llama4_multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama4_multimodal(tmp_path_factory.mktemp("llama4_multimodal"))
