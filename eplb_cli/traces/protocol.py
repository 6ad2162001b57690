"""What a reader is, what it is given, and what it yields.

A reader recognises its recorder's files by content and yields blocks of raw numbers with what the recorder says about
them: which axis is the layer, whether columns are logical experts or physical slots, which phase a window belongs to.
It applies no rule of its own where all recorders share one; `eplb_cli.traces.pipeline` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.loads import ModelShape
from eplb_cli.placement import Placement
from eplb_cli.traces.counting import Ranges

if TYPE_CHECKING:
    from eplb_cli.traces.files import TraceFile

__all__ = [
    "ALL",
    "DECODE",
    "MOST_EXPERTS",
    "PREFILL",
    "Block",
    "CountBlock",
    "Counters",
    "LayerAxis",
    "Match",
    "RankDumps",
    "ReadOptions",
    "Reader",
    "Recording",
    "Space",
    "TokenBlock",
    "matches",
    "near_miss",
    "no_match",
]

MOST_EXPERTS = 1 << 16
"""More than any model has; a number beyond is damage."""
PREFIX_ROWS = 16
"""Tokens in front of a sequence by which a repeated prompt is noticed: a block of vLLM's prefix cache."""
ALL, PREFILL, DECODE = 0, 1, 2
"""Codes of a window's phase, indices into `eplb_cli.loads.PHASES`."""


class Space(StrEnum):
    """What the columns of a count matrix, or the values of a trace, number."""

    logical = "logical"
    physical = "physical"
    unknown = "unknown"


class RankDumps(StrEnum):
    """How the files of several ranks combine."""

    auto = "auto"
    sum = "sum"
    replicated = "replicated"


class Counters(StrEnum):
    """Whether a window's counts start from zero or go on from the window before."""

    auto = "auto"
    per_step = "per-step"
    cumulative = "cumulative"


@dataclass(frozen=True)
class LayerAxis:
    """What the layer axis of a block numbers.

    Args:
        length: rows along the axis.
        ids: absolute decoder layers, when the recorder names them.
        ordinal: rows are the MoE layers in order. With neither, they are the MoE layers or all hidden layers, whichever
            the model's own counts say.
    """

    length: int
    ids: tuple[int, ...] | None = None
    ordinal: bool = False

    @classmethod
    def absolute(cls, ids: Iterable[int]) -> LayerAxis:
        """Rows with the decoder layers' own numbers.

        Raises:
            TraceError: one of them is no whole number.
        """
        ids = tuple(ids)
        for layer in ids:
            if not float(layer).is_integer():
                raise TraceError(f"has a layer {layer}", rule="layers are whole numbers")
        return cls(len(ids), tuple(int(layer) for layer in ids))


@dataclass(frozen=True, eq=False)
class CountBlock:
    """Windows of counts as recorded.

    Args:
        counts: numbers [n, layers, columns]; integers, or floats that are integral.
        axis: what the layer axis numbers.
        file: whom to name in an error.
        window_ids: int [n], the recorder's step numbers; None for consecutive ones.
        tokens: int [n], tokens per window; None where the recorder does not tell.
        phase: the phase of all n windows, or one code each.
        space: what the columns number.
        physical_to_logical: int [layers, columns], the map in force, when columns are slots and the recording holds it.
    """

    counts: npt.NDArray[Any]
    axis: LayerAxis
    file: str
    window_ids: npt.NDArray[np.int64] | None = None
    tokens: npt.NDArray[np.int64] | None = None
    phase: int | npt.NDArray[np.uint8] = ALL
    space: Space = Space.unknown
    physical_to_logical: npt.NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class TokenBlock:
    """Consecutive tokens of a per-token trace.

    Args:
        ids: integers [tokens, layers, k]; -1 is padding.
        axis, file: as in CountBlock.
        first_row: the index in the file of the block's first token, for errors.
        phase: prefill, decode, or unknown.
        space: what the values number.
    """

    ids: npt.NDArray[np.integer]
    axis: LayerAxis
    file: str
    first_row: int = 0
    phase: int = ALL
    space: Space = Space.unknown


Block = CountBlock | TokenBlock


@dataclass(frozen=True)
class Match:
    """How well a file fits a reader.

    Args:
        confidence: 0 no; 1..49 a near miss; 50 and above the file is the reader's, the highest wins.
        reason: what was found, or what was missing.
        skip: when set, the file belongs to the recorder but is not to be counted, and this says why.
        companion: the file describes the recording and holds no counts.
    """

    confidence: int
    reason: str = ""
    skip: str | None = None
    companion: bool = False

    @property
    def recognised(self) -> bool:
        """True when the file is the reader's."""
        return self.confidence >= 50


def matches(reason: str = "", confidence: int = 90, *, skip: str | None = None, companion: bool = False) -> Match:
    """The file is the reader's."""
    return Match(confidence, reason, skip, companion)


def near_miss(reason: str, confidence: int = 20) -> Match:
    """The file resembles the reader's, but something is missing."""
    return Match(confidence, reason)


def no_match(reason: str = "") -> Match:
    """The file is something else."""
    return Match(0, reason)


@dataclass(frozen=True)
class ReadOptions:
    """What the user says about the traces.

    Args:
        model: expert count, top-k and layers; None when the trace must tell.
        window_tokens: tokens per window of a per-token trace; None lets the size follow the trace.
        phase: index into PHASES; ALL keeps everything.
        skip_steps: windows left out at the start of each recording.
        ignored_ids: placeholder ids to drop, by first and last.
        physical_to_logical: the plan in force while physical ids were recorded.
        rank_dumps, counters: how files and windows combine.
        prompt_rows: tokens of the prompt at the start of each sequence, when the recorder does not tell.
        allow_zero_experts: accept loads that look like one rank's.
    """

    model: ModelShape | None = None
    window_tokens: int | None = None
    phase: int = ALL
    skip_steps: int = 0
    ignored_ids: Ranges = ()
    physical_to_logical: Placement | None = None
    rank_dumps: RankDumps = RankDumps.auto
    counters: Counters = Counters.auto
    prompt_rows: int | None = None
    allow_zero_experts: bool = False

    @property
    def num_experts(self) -> int | None:
        """E, when known beforehand."""
        return None if self.model is None else self.model.num_experts

    @property
    def top_k(self) -> int | None:
        """Experts per token, when known beforehand."""
        return None if self.model is None else self.model.top_k

    def need_num_experts(self, file: str) -> int:
        """E.

        Raises:
            UsageError: nobody told.
        """
        if self.num_experts is None:
            raise UsageError(
                "the trace does not say how many experts the model has",
                file=file,
                hint="Pass --model MODEL, or --num-experts E.",
            )
        return self.num_experts


@dataclass
class Recording:
    """The files of one recorder in one folder, and what the reader has to say about them.

    Args:
        files: in natural order of their names.
        options: what the user said.
        folder: where they lie.
        companions: files of the recorder that describe the recording, in its folder or above.
        expected_tokens: tokens of the files as their headers tell, 0 when they do not; set by the reader.
        replicas: files left out because they repeat another's bytes.
        top_k, architecture: what the recorder says, set by the reader.
        cumulative: the recorder's counters go on from window to window, set by the reader.
        dropped: reason -> amount left out, kept by the reader.
        warnings: remarks that belong into the profile.
        notes: remarks on this run alone (how files were combined); they do not change what the profile means.
    """

    files: Sequence[TraceFile]
    options: ReadOptions
    folder: Path
    companions: list[TraceFile] = field(default_factory=list)
    expected_tokens: int = 0
    replicas: int = 0
    top_k: int | None = None
    architecture: str | None = None
    cumulative: bool = False
    dropped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prefixes: set[bytes] = field(default_factory=set)
    repeated_prefixes: int = 0

    def watch_prefix(self, rows: npt.NDArray[np.integer]) -> None:
        """Notice a sequence whose first tokens are routed as an earlier one's: most likely the same prompt again."""
        if len(rows) < PREFIX_ROWS:
            return
        digest = hashlib.blake2b(np.ascontiguousarray(rows[:PREFIX_ROWS]).tobytes(), digest_size=16).digest()
        if digest in self.prefixes:
            self.repeated_prefixes += 1
        self.prefixes.add(digest)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def drop(self, reason: str, amount: int) -> None:
        """Count what was left out."""
        if amount:
            self.dropped[reason] = self.dropped.get(reason, 0) + amount


class Reader(Protocol):
    """One recorder's format."""

    @property
    def name(self) -> str:
        """What `--trace-format` calls it."""

    @property
    def looks_for(self) -> str:
        """What makes a file this recorder's, in a clause."""

    @property
    def replicas_possible(self) -> bool:
        """Whether files of equal content can only be copies of one dump, of which one is kept."""

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """How well the file fits."""

    def read(self, recording: Recording) -> Iterator[Block]:
        """Yield the recording's blocks, windows in the order of time."""
