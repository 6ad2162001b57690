"""Checkpoints: safetensors index and headers, model families, rewriting, verification."""

from __future__ import annotations

from eplb_cli.checkpoint.kv_cache import KvCache
from eplb_cli.checkpoint.model import ExpertBytes, Model
from eplb_cli.loads import ModelShape

__all__ = ["ExpertBytes", "KvCache", "Model", "read_expert_bytes", "read_model_shape"]


def read_model_shape(model: str) -> ModelShape:
    return Model.open(model).shape


def read_expert_bytes(model: str) -> dict[int, int]:
    return dict(Model.open(model).expert_bytes.by_layer)
