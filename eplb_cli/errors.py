"""The error tree. An exception carries facts in fields; its text is composed only when somebody prints it.

EplbError
├── UsageError        the request contradicts itself or the model; exit code 2
├── TraceError        a recorder's file cannot be read, or its numbers cannot be true
├── LoadsError        a profile file, or loads in memory, break a rule
├── PlacementError    a plan breaks a rule, or does not fit the model
├── CheckpointError   a checkpoint is incomplete, damaged, or of an unknown kind
├── OutputError       the output exists, cannot be written, or ran out of space
└── ServeError        vLLM cannot be started as asked, or came up without the plan
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "CheckpointError",
    "EplbError",
    "LoadsError",
    "OutputError",
    "PlacementError",
    "ServeError",
    "TraceError",
    "UsageError",
    "ranges",
    "spans",
]


def spans(ids: Iterable[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5, ascending."""
    runs: list[list[int]] = []
    for number in map(int, ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranges(ids: Iterable[int], word: str = "layer") -> str:
    """`layers 0-3, 5` for 0, 1, 2, 3, 5, ascending; `layer 5` for one; `no layer` for none."""
    listed = spans(ids)
    if not listed:
        return f"no {word}"
    several = "," in listed or "-" in listed[1:]  # a first "-" is a sign
    return f"{word}s {listed}" if several else f"{word} {listed}"


class EplbError(Exception):
    """A known failure.

    Args:
        problem: what was found, with the offending value, as a clause without a full stop
            (``"load is nan"``).
        file, tensor, layer, expert, rank, row: where it was found; whichever apply. ``layer`` is the decoder
            layer's absolute index.
        rule: what would be right (``"loads must be finite and >= 0"``).
        hint: the next step, as a sentence or a command to paste.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path | None = None,
        tensor: str | None = None,
        layer: int | None = None,
        expert: int | None = None,
        rank: int | None = None,
        row: int | None = None,
        rule: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.layer = layer
        self.expert = expert
        self.rank = rank
        self.row = row
        self.rule = rule
        self.hint = hint

    @property
    def where(self) -> str:
        """The place, from the widest to the narrowest: file, tensor, layer, rank, row, expert."""
        parts = [] if self.file is None else [self.file]
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor}")
        for name in ("layer", "rank", "row", "expert"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name} {value}")
        return ", ".join(parts)

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}; {self.rule}" if self.rule else text


class UsageError(EplbError):
    """The request contradicts itself, or asks for what the model or topology cannot have."""

    exit_code = 2


class TraceError(EplbError):
    """A recorder's file cannot be read, or its numbers cannot be true."""


class LoadsError(EplbError):
    """A profile file, or loads in memory, break a rule."""


class PlacementError(EplbError):
    """A plan breaks a rule, or does not fit the model."""


class CheckpointError(EplbError):
    """A checkpoint is incomplete, damaged, or of an unknown kind."""


class OutputError(EplbError):
    """The output exists already, cannot be written, or the device is full."""


class ServeError(EplbError):
    """vLLM cannot be started as asked, or came up without the plan."""
