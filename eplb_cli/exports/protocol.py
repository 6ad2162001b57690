"""What an engine's placement file is to us: which rows it holds, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule
from eplb_cli.placement import Placement

__all__ = ["Decoded", "Engine", "Numbering", "Table"]


class Numbering(StrEnum):
    """What the rows of a file are."""

    absolute = "absolute"
    """MoE layers under their decoder layers' numbers."""
    ordinal = "ordinal"
    """MoE layers in order, from 0."""
    hidden = "hidden"
    """All decoder layers in order, dense ones too."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows to write.

    Args:
        rows: int32 [n, P], the expert of each slot; slot p is on rank p // (P / ep_size).
        layer_ids: decoder layer of each row.
        num_experts: E. ep_size: G.
    """

    rows: npt.NDArray[np.int32]
    layer_ids: tuple[int, ...]
    num_experts: int
    ep_size: int


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a file says.

    Args:
        rows: int64 [n, P]; a single row for all layers when `repeats` is set.
        layer_ids, num_experts, ep_size: None when the format does not carry them.
        repeats: the one row stands for every layer.
    """

    rows: npt.NDArray[np.int64]
    layer_ids: tuple[int, ...] | None = None
    num_experts: int | None = None
    ep_size: int | None = None
    repeats: bool = False


class Engine(Protocol):
    """One engine's placement file."""

    @property
    def name(self) -> str:
        """What `--to` and `--from` call it."""

    @property
    def numbering(self) -> Numbering:
        """What its rows are."""

    @property
    def suffix(self) -> str | None:
        """The file name's ending that the engine insists on."""

    @property
    def refuses_twins(self) -> bool:
        """Whether two copies of an expert on one rank are refused by the engine, or silently served wrong."""

    @property
    def keeps_slot_order(self) -> bool:
        """Whether the file tells the order of a rank's slots."""

    @property
    def dispatch(self) -> Rule | None:
        """The rule by which it chooses among an expert's copies (docs/dispatch.md); None where that is not known."""

    def encode(self, table: Table) -> bytes:
        """The file's content; the same bytes for the same table."""

    def decode(self, content: bytes) -> Decoded:
        """Parse a file's content.

        Raises:
            PlacementError: it is not the engine's format, or breaks one of its rules.
        """

    def launch(self, placement: Placement, file: str) -> str:
        """How the engine is told to use the file."""
