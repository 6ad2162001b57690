"""What a token of context costs a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eplb_cli.checkpoint.config import dtype_of
from eplb_cli.checkpoint.fields import MOST_LAYERS, Fields

__all__ = ["KvCache", "kv_cache_per_token"]


@dataclass(frozen=True)
class KvCache:
    """What one token of context costs a rank.

    Args:
        bytes_per_token: bytes in all layers whose cache grows with every token.
        layers: how many layers those are.
        tensor_parallel_size: ranks that share a token's attention heads.
        left_out: what is not counted, as a clause, or None.
    """

    bytes_per_token: int
    layers: int
    tensor_parallel_size: int = 1
    left_out: str | None = None

    def tokens(self, nbytes: float) -> int:
        """Whole tokens of context that fit into `nbytes`."""
        return int(nbytes // self.bytes_per_token)


def kv_cache_per_token(config: Mapping[str, Any], tensor_parallel_size: int = 1) -> KvCache | None:
    """KV-cache bytes that one token takes on one rank, from the content of config.json.

    Attention with grouped heads: layers x (key + value size) x ceil(kv_heads / tensor_parallel_size) x dtype.
    Multi-head latent attention: layers x (kv_lora_rank + qk_rope_head_dim) x dtype, the same on every rank.
    The cache has the model's dtype, as vLLM's default `--kv-cache-dtype auto`.

    Returns:
        None when a size is missing, or when the cache is compressed along the sequence.

    Raises:
        CheckpointError: a size has a wrong type, or one that no model has.
    """
    top = Fields(config)
    nested = top.section("text_config")
    values = nested if nested is not None and "num_hidden_layers" in nested else top
    layers = values.integer_or("num_hidden_layers", None, most=MOST_LAYERS)
    width = {"float32": 4, "float16": 2, "bfloat16": 2, None: 2}.get(dtype_of(values) or dtype_of(top))
    if layers is None or width is None or "compress_ratios" in values:
        return None
    rank, rope = (values.integer_or(key, None) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    if rank is not None and rope is not None:
        left_out = "the sparse attention's index is not counted" if "index_head_dim" in values else None
        return KvCache(layers * (rank + rope) * width, layers, tensor_parallel_size, left_out)
    grows = _layers_with_full_attention(values, layers)
    heads = values.integer_or("num_global_key_value_heads", None) or values.integer_or("num_key_value_heads", None)
    size = values.integer_or("global_head_dim", None) or values.integer_or("head_dim", None)
    if size is None and "hidden_size" in values and "num_attention_heads" in values:
        size = values.integer("hidden_size") // values.integer("num_attention_heads") or None
    if heads is None or size is None or not grows:
        return None
    value_size = values.integer_or("v_head_dim", size)
    left_out = f"{layers - grows} layers of bounded cache are not counted" if grows < layers else None
    nbytes = grows * (size + value_size) * math.ceil(heads / tensor_parallel_size) * width
    return KvCache(nbytes, grows, tensor_parallel_size, left_out)


def _layers_with_full_attention(values: Fields, layers: int) -> int:
    """Layers whose cache grows with every token; sliding, chunked and linear attention keep a bounded one."""
    kinds, pattern = values.texts("layer_types"), values.integers("hybrid_layer_pattern")
    if kinds is not None:
        return sum(kind == "full_attention" for kind in kinds[:layers])
    if pattern is not None:
        return sum(flag == 0 for flag in pattern[:layers])
    return layers
