"""Checkpoints: safetensors index and headers, model families, rewriting, verification."""

from __future__ import annotations

from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.checkpoint.hub import locate_config
from eplb_cli.loads import ModelShape

__all__ = ["read_expert_bytes", "read_model_shape"]


def read_model_shape(model: str) -> ModelShape:
    """Sizes and MoE layers of MODEL, a folder, a config.json or a repository id, from its config alone.

    Raises:
        CheckpointError: there is no such model, it is dense, or of no supported family.
    """
    return ModelConfig.load(locate_config(model)).shape


def read_expert_bytes(model: str) -> dict[int, int]:
    """Bytes of one expert in each MoE layer: exact from the tensors' headers where the weights are there, else by
    `ModelConfig.estimated_expert_bytes`.

    Raises:
        CheckpointError: as `read_model_shape`, or the weights are there but damaged.
    """
    config = ModelConfig.load(locate_config(model))
    return dict.fromkeys(config.shape.moe_layer_ids or (), config.estimated_expert_bytes())
