"""Checkpoints: safetensors index and headers, model families, rewriting, verification."""

from __future__ import annotations

from pathlib import Path

from eplb_cli.checkpoint.classify import Kind, role_of
from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.checkpoint.hub import locate_config
from eplb_cli.checkpoint.source import Checkpoint
from eplb_cli.errors import CheckpointError
from eplb_cli.loads import ModelShape

__all__ = ["read_expert_bytes", "read_model_shape"]


def read_model_shape(model: str) -> ModelShape:
    """Sizes and MoE layers of MODEL, a folder, a config.json or a repository id, from its config alone.

    Raises:
        CheckpointError: there is no such model, it is dense, or of no supported family.
    """
    return ModelConfig.load(locate_config(model)).shape


def read_expert_bytes(model: str) -> dict[int, int]:
    """Bytes of one expert in each MoE layer, the most where experts differ: exact from the tensors' headers where the
    weights are there, else by `ModelConfig.estimated_expert_bytes`.

    Raises:
        CheckpointError: as `read_model_shape`, or the weights are there but damaged.
    """
    config_file = locate_config(model)
    config = ModelConfig.load(config_file)
    folder = config_file.parent
    if Path(model).is_file() or not any(folder.glob("*.safetensors")):
        return dict.fromkeys(config.shape.moe_layer_ids or (), config.estimated_expert_bytes())
    checkpoint = Checkpoint.open(folder)
    sums: dict[int, dict[int, int]] = {layer: {} for layer in config.shape.moe_layer_ids or ()}
    for entry in checkpoint.tensors.values():
        role = role_of(config, entry)
        if role.kind is Kind.EXPERT:
            sums[role.layer][role.expert] = sums[role.layer].get(role.expert, 0) + entry.nbytes
        elif role.kind is Kind.FUSED:
            sums[role.layer][0] = sums[role.layer].get(0, 0) + entry.nbytes // entry.shape[0]
    for layer, by_expert in sums.items():
        if not by_expert:
            raise CheckpointError("the files hold no experts of the layer", file=folder, layer=layer)
    return {layer: max(by_expert.values()) for layer, by_expert in sums.items()}
