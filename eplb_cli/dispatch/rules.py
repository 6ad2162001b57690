"""Who chooses the copy: the names of the rules."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["RULES", "Rule"]

Rule = Literal["even", "hash", "balanced"]
"""`even`: equal parts, what plans assume. `hash`: vLLM's. `balanced`: this package's."""
RULES: tuple[Rule, ...] = get_args(Rule)
