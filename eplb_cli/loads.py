"""ExpertLoads: how many tokens each logical expert served, per window of traffic and layer, and its file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import EplbError, LoadsError, ranges
from eplb_cli.files import atomic_write
from eplb_cli.tensors import read_tensors, write_tensors
from eplb_cli.untrusted import open_file, parse_json, shown

__all__ = ["PHASES", "ExpertLoads", "ModelShape", "Source", "concatenate", "mix", "refuse_constant_routing"]

FORMAT = "eplb-profile"
VERSION = 1
METADATA_KEY = "eplb_profile"
MOST = 2**62
"""Sums stay below it, so that no figure made from counts overflows 64 bits."""
MOST_BYTES = 64 << 30
"""Largest profile file that is read."""
MOST_EXPERTS_IN_LAYERS = 2**24
"""Largest L x E: what is summed over windows must fit into memory, however few windows there are."""
PHASES = ("all", "prefill", "decode")
"""Names of the codes in `ExpertLoads.window_phase`; "all" is traffic whose phase is mixed or unknown."""

_HEADER_KEYS = {"format", "version", "model", "top_k", "phase", "sources", "dropped", "warnings"}


@dataclass(frozen=True)
class ModelShape:
    """What the planner and the readers need to know of a model.

    Args:
        architecture: the name in config.json's `architectures`, or None when only sizes are known.
        num_experts: logical experts per MoE layer, E.
        top_k: experts chosen per token.
        num_hidden_layers: all decoder layers, dense ones included.
        moe_layer_ids: absolute indices of the MoE layers, ascending.
    """

    architecture: str | None
    num_experts: int
    top_k: int | None = None
    num_hidden_layers: int | None = None
    moe_layer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Source:
    """A file that loads were read from: its name, the SHA-256 of its content, and the reader that understood it."""

    name: str
    sha256: str
    reader: str


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """Tokens routed to each logical expert.

    Args:
        counts: int64 [W, L, E], assignments per window, MoE layer and logical expert.
        tokens: int64 [W], tokens per window; 0 where the recorder did not tell.
        layer_ids: int32 [L], absolute decoder layer of each row, ascending.
        window_ids: int64 [W], the recorder's own step or pass number of each window.
        window_phase: uint8 [W], index into PHASES.
        model: architecture, when known.
        top_k: experts chosen per token, when known.
        sources, dropped (reason -> assignments or rows left out), warnings: what was read and what was not.

    Raises:
        LoadsError: shapes disagree, a count is negative, counts add up to 2^62 or more, or `top_k` exceeds E.
    """

    counts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    layer_ids: npt.NDArray[np.int32]
    window_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    window_phase: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    model: str | None = None
    top_k: int | None = None
    sources: tuple[Source, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.ndim != 3 or counts.dtype != np.int64:
            raise LoadsError(
                f"counts are {counts.dtype} {list(counts.shape)}", rule="they must be int64 [windows, layers, experts]"
            )
        windows, layers, experts = counts.shape
        if layers * experts > MOST_EXPERTS_IN_LAYERS:
            raise LoadsError(
                f"counts are of {layers:,} layers x {experts:,} experts", rule=f"at most {MOST_EXPERTS_IN_LAYERS:,}"
            )
        if self.top_k is not None and not 1 <= self.top_k <= max(experts, 1):
            raise LoadsError(f"top_k is {self.top_k}", rule=f"it is 1 to {experts}, the number of experts")
        if self.window_ids.size == 0:
            object.__setattr__(self, "window_ids", np.arange(windows, dtype=np.int64))
        if self.window_phase.size == 0:
            object.__setattr__(self, "window_phase", np.zeros(windows, np.uint8))
        for name, array, dtype, length in (
            ("tokens", self.tokens, np.int64, windows),
            ("layer_ids", self.layer_ids, np.int32, layers),
            ("window_ids", self.window_ids, np.int64, windows),
            ("window_phase", self.window_phase, np.uint8, windows),
        ):
            if array.shape != (length,) or array.dtype != dtype:
                raise LoadsError(
                    f"{name} is {array.dtype} {list(array.shape)}",
                    rule=f"with counts {list(counts.shape)} it must be {np.dtype(dtype).name} [{length}]",
                )
        if layers and (self.layer_ids[0] < 0 or not (np.diff(self.layer_ids) > 0).all()):
            raise LoadsError(
                f"layer_ids {shown(self.layer_ids.tolist())} are not ascending from 0 on",
                rule="each layer appears once",
            )
        if counts.size and counts.min() < 0:
            window, layer, expert = (int(i) for i in np.argwhere(counts < 0)[0])
            raise LoadsError(
                f"load is {counts[window, layer, expert]} in window {window}",
                layer=int(self.layer_ids[layer]),
                expert=expert,
                rule="loads must be finite and >= 0",
            )
        if self.tokens.size and self.tokens.min() < 0:
            window = int(self.tokens.argmin())
            raise LoadsError(f"window {window} has {self.tokens[window]} tokens", rule="tokens must be >= 0")
        for name, array in (("counts", self.counts), ("tokens", self.tokens)):
            if (total := float(array.sum(dtype=np.float64))) >= MOST:
                raise LoadsError(f"{name} add up to {total:.3g}", rule="sums must stay below 2^62")
        if self.window_phase.size and int(self.window_phase.max()) >= len(PHASES):
            raise LoadsError(
                f"window_phase holds {int(self.window_phase.max())}", rule=f"codes are 0..{len(PHASES) - 1}"
            )

    @property
    def num_windows(self) -> int:
        """W."""
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.counts.shape[2])

    @property
    def phase(self) -> str:
        """The phase of the whole: that of the windows when they agree, else "all"."""
        codes = np.unique(self.window_phase)
        return PHASES[int(codes[0])] if codes.size == 1 else PHASES[0]

    def for_layers(self, layer_ids: npt.ArrayLike) -> Self:
        """The loads of exactly these decoder layers; those of other layers are left out.

        Args:
            layer_ids: [K] absolute layers, ascending.

        Raises:
            LoadsError: layers are missing, or `layer_ids` are not ascending.
        """
        wanted = np.asarray(layer_ids, np.int32)
        absent = wanted[~np.isin(wanted, self.layer_ids)]
        if absent.size:
            raise LoadsError(
                f"the loads lack {ranges(absent)}",
                rule=f"they have {ranges(self.layer_ids)}; layers match by absolute id",
            )
        return replace(self, counts=self.counts[:, np.searchsorted(self.layer_ids, wanted)], layer_ids=wanted)

    def select_windows(self, keep: npt.NDArray[Any] | slice) -> Self:
        """The same loads with some of the windows (a mask, indices or a slice over W)."""
        return replace(
            self,
            counts=self.counts[keep],
            tokens=self.tokens[keep],
            window_ids=self.window_ids[keep],
            window_phase=self.window_phase[keep],
        )

    def save(self, path: str | PathLike[str], *, replace: bool = True) -> None:
        """Write the profile as safetensors, whole or not at all.

        Raises:
            OutputError: the file cannot be written, or it exists and `replace` is false.
        """
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "top_k": self.top_k,
            "phase": self.phase,
            "sources": [{"name": s.name, "sha256": s.sha256, "reader": s.reader} for s in self.sources],
            "dropped": dict(self.dropped),
            "warnings": list(self.warnings),
        }
        tensors: dict[str, npt.NDArray[Any]] = {
            "counts": self.counts,
            "tokens": self.tokens,
            "layer_ids": self.layer_ids,
            "window_ids": self.window_ids,
            "window_phase": self.window_phase,
        }
        with atomic_write(Path(path), replace=replace) as stream:
            write_tensors(stream, tensors, {METADATA_KEY: json.dumps(header, sort_keys=True)})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a profile.

        Raises:
            LoadsError: there is no such file, it is not a profile, its version is newer, or it breaks a rule.
        """
        path = Path(path)
        if path.is_dir():
            raise LoadsError("is a folder, not an eplb profile", file=path, hint=_make_one(path))
        with open_file(path, LoadsError, most_bytes=MOST_BYTES) as stream:
            try:
                arrays, metadata = read_tensors(stream, LoadsError)
            except LoadsError as error:
                raise LoadsError(f"is not an eplb profile ({error})", file=path, hint=_make_one(path)) from None
        if METADATA_KEY not in metadata:
            raise LoadsError("is not an eplb profile (its metadata do not say so)", file=path, hint=_make_one(path))
        try:
            phase, header = _header(metadata)
            loads = cls(**_profile_arrays(arrays), **header)
            if phase not in (None, loads.phase):
                raise LoadsError(f"is of phase {phase}", rule=f"its windows are of phase {loads.phase}")
            return loads
        except LoadsError as error:
            error.file = str(path)
            raise


def _make_one(path: Path) -> str:
    return f"Make one with: {shlex.join(['eplb', 'profile', str(path), '-o', 'loads.safetensors'])}"


def _profile_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a profile; those of windows may be absent, but not empty where there are windows."""
    missing = {"counts", "tokens", "layer_ids"} - arrays.keys()
    unknown = arrays.keys() - {"counts", "tokens", "layer_ids", "window_ids", "window_phase"}
    if missing or unknown:
        raise LoadsError(
            f"lacks the tensors {sorted(missing)}" if missing else f"holds unknown tensors {shown(sorted(unknown))}"
        )
    for name in arrays.keys() & {"window_ids", "window_phase"}:
        if arrays[name].shape != arrays["counts"].shape[:1]:
            raise LoadsError(
                f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}",
                rule=f"counts are {list(arrays['counts'].shape)}, so it needs one entry for each window",
            )
    return arrays


def _header(metadata: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """The phase and the arguments of ExpertLoads that a profile's metadata hold."""
    header = parse_json(metadata[METADATA_KEY], LoadsError)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise LoadsError(f"is not an eplb profile: its header does not say {FORMAT}")
    version = header.get("version")
    if type(version) is not int or version != VERSION:
        raise LoadsError(f"has profile version {shown(version)}", rule=f"this eplb reads version {VERSION}")
    unknown = header.keys() - _HEADER_KEYS
    if unknown:
        raise LoadsError(f"has unknown header keys {shown(sorted(unknown))}", rule=f"known: {sorted(_HEADER_KEYS)}")

    def typed(key: str, fits: Callable[[Any], bool], rule: str, default: Any) -> Any:
        value = header.get(key, default)
        if not fits(value):
            raise LoadsError(f"has a damaged header: `{key}` is {shown(value)}", rule=f"it must be {rule}")
        return value

    def is_source(value: Any) -> bool:
        names = {"name", "sha256", "reader"}
        return isinstance(value, dict) and value.keys() == names and all(isinstance(v, str) for v in value.values())

    phase = typed("phase", lambda value: value is None or value in PHASES, f"one of {', '.join(PHASES)}", None)
    return phase, {
        "model": typed("model", lambda value: value is None or isinstance(value, str), "text or null", None),
        "top_k": typed("top_k", lambda value: value is None or type(value) is int, "a whole number or null", None),
        "sources": tuple(
            Source(**source)
            for source in typed(
                "sources",
                lambda value: isinstance(value, list) and all(map(is_source, value)),
                "a list of {name, sha256, reader}, all text",
                [],
            )
        ),
        "dropped": typed(
            "dropped",
            lambda value: isinstance(value, dict) and all(type(v) is int and 0 <= v < MOST for v in value.values()),
            "numbers >= 0 by reason",
            {},
        ),
        "warnings": tuple(
            typed(
                "warnings",
                lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value),
                "a list of texts",
                [],
            )
        ),
    }


NEVER_FILLED = (
    "routers do not do that in all layers: the recorded ids were never filled in. vLLM's monolithic MoE kernels return "
    "routed_experts of zeros only, on some GPUs"
)
RECORD_ANEW = (
    "Record with `eplb record`, which reads the router itself, or with an EPLB-enabled engine, where vLLM does not use "
    "those kernels."
)


def refuse_constant_routing(loads: ExpertLoads, error: type[EplbError] = LoadsError) -> list[str]:
    """Refuse loads in which every layer sends everything to one expert; layers without load do not count.

    A single layer may do so: Llama 4 Maverick's layer 45 sends 99.9 % of its tokens to one expert. In all layers at
    once it is a recording that was never filled: an array of zeros reads as expert 0, in every layer. One assignment
    a layer is too little to tell.

    Args:
        loads: one recording, or several joined.
        error: what to raise.

    Returns:
        A remark on the layers that do so, if there are any.

    Raises:
        EplbError: of the given kind.
    """
    total = loads.counts.sum(0)
    held = total.any(1)
    constant = held & (np.count_nonzero(total, 1) == 1)
    if loads.num_experts < 2 or not constant.any():
        return []
    several = int(held.sum()) > 1 or (loads.top_k or 1) > 1
    if several and (constant == held).all() and int(total.sum()) > int(held.sum()):
        layer = int(np.flatnonzero(held)[0])
        raise error(
            f"{ranges(loads.layer_ids[held])} {'send' if held.sum() > 1 else 'sends'} everything to a single expert",
            layer=int(loads.layer_ids[layer]),
            expert=int(total[layer].argmax()),
            rule=NEVER_FILLED,
            hint=RECORD_ANEW,
        )
    return [f"{ranges(loads.layer_ids[constant])}: all load is on one expert, which no placement can spread"]


def concatenate(parts: Sequence[ExpertLoads]) -> ExpertLoads:
    """Join loads of the same model along the windows, in the order given.

    Raises:
        LoadsError: there are no parts, or they differ in experts or layers.
    """
    if not parts:
        raise LoadsError("there are no loads to join")
    first = parts[0]
    for part in parts[1:]:
        if part.num_experts != first.num_experts or not np.array_equal(part.layer_ids, first.layer_ids):
            raise LoadsError(
                f"loads of {part.num_layers} layers x {part.num_experts} experts do not join with "
                f"{first.num_layers} x {first.num_experts}",
                rule="all must come from one model, with the same MoE layers",
            )
    top_ks = {part.top_k for part in parts} - {None}
    models = {part.model for part in parts} - {None}
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, amount in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + amount
    return ExpertLoads(
        counts=np.concatenate([part.counts for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        layer_ids=first.layer_ids,
        window_ids=np.concatenate([part.window_ids for part in parts]),
        window_phase=np.concatenate([part.window_phase for part in parts]),
        model=models.pop() if len(models) == 1 else None,
        top_k=top_ks.pop() if len(top_ks) == 1 else None,
        sources=tuple(source for part in parts for source in part.sources),
        dropped=dropped,
        warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
    )


def mix(loads: Sequence[ExpertLoads], weights: Sequence[float]) -> ExpertLoads:
    """Join loads along the windows so that each makes up its weight's share of all assignments.

    Part i is scaled by (weight_i / assignments_i) over the least such ratio: every factor is >= 1, so that no window
    loses precision, and counts are rounded to whole numbers. Tokens scale alike. Equal traffic twice with weights
    0.7 and 0.3 is the same traffic; weights need not add up to 1.

    Raises:
        LoadsError: weights and loads differ in number, a weight is not finite and > 0, a part has no assignments, a
            scaled count leaves 64 bits, or the parts do not join (see `concatenate`).
    """
    if len(loads) != len(weights):
        raise LoadsError(f"{len(weights)} weights for {len(loads)} profiles", rule="one weight a profile")
    for weight in weights:
        if not (np.isfinite(weight) and weight > 0):
            raise LoadsError(f"a weight is {weight}", rule="weights are finite and > 0")
    totals = [int(part.counts.sum()) for part in loads]
    if 0 in totals:
        raise LoadsError(f"profile {totals.index(0)} of the mix holds no assignments", rule="a share of it is nothing")
    ratios = [weight / total for weight, total in zip(weights, totals, strict=True)]
    least = min(ratios, default=1.0)
    return concatenate([_scaled(part, ratio / least) for part, ratio in zip(loads, ratios, strict=True)])


def _scaled(part: ExpertLoads, factor: float) -> ExpertLoads:
    if factor == 1.0:
        return part
    if int(part.counts.max(initial=0)) * factor >= MOST or int(part.tokens.max(initial=0)) * factor >= MOST:
        raise LoadsError(f"a mix scales counts by {factor:.3g}, beyond 64 bits", rule="choose weights closer together")
    return replace(
        part,
        counts=np.rint(part.counts * factor).astype(np.int64),
        tokens=np.rint(part.tokens * factor).astype(np.int64),
    )
