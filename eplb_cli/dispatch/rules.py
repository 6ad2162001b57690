"""Who chooses the copy: the names of the rules."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ENGINE_RULES", "EVEN_RULES", "RULES", "STATIC_RULES", "Rule", "StaticRule"]

Rule = Literal["even", "hash", "balanced", "sglang", "vllm-ascend", "tensorrt-llm"]
"""`even`: equal parts, what plans assume. `hash`: vLLM's. `balanced`: this package's. The others: those engines'."""
RULES: tuple[Rule, ...] = get_args(Rule)

StaticRule = Literal["sglang", "vllm-ascend"]
"""Rules by which every source rank sends all its tokens of an expert to one copy, whatever the step."""
STATIC_RULES: tuple[StaticRule, ...] = get_args(StaticRule)
ENGINE_RULES: tuple[Rule, ...] = (*STATIC_RULES, "tensorrt-llm")
"""Rules of engines other than vLLM."""
EVEN_RULES: tuple[Rule, ...] = ("even", "hash", "tensorrt-llm")
"""Rules by which the copies of an expert serve equal parts of a large step."""
