"""Checkpoints: safetensors index and headers, model families, rewriting, verification."""

from __future__ import annotations

from eplb_cli.checkpoint.kv_cache import KvCache
from eplb_cli.checkpoint.model import ExpertBytes, Model

__all__ = ["ExpertBytes", "KvCache", "Model"]
