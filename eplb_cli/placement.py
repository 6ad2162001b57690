"""Placement: which logical expert each physical slot holds, with its invariants and its file.

`physical_to_logical` [L, P] is the plan. Everything else is derived from it here and nowhere else.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.rules import RULES
from eplb_cli.errors import PlacementError, ranges
from eplb_cli.files import atomic_write
from eplb_cli.metrics import initial_map, replica_counts, require_table
from eplb_cli.untrusted import parse_json, read_file, shown

__all__ = ["MOST_PLAN_BYTES", "PLAN_FILE", "Placement", "Provenance"]

FORMAT = "eplb-plan"
VERSION = 1
MOST_PLAN_BYTES = 64 << 20
"""Largest plan file that is read: 1,000 layers of 10,000 slots have 60 MB, and some twenty times that as objects."""
PLAN_FILE = "eplb_plan.json"
"""Name of the plan inside a converted checkpoint."""


@dataclass(frozen=True)
class Provenance:
    """How a placement came about; none of it changes what the placement means.

    Args:
        architecture: the model's name in config.json, when known.
        top_k: experts chosen per token, when known.
        strategy, objective: how the planner chose, and what it minimised.
        seed: the seed that reproduces it.
        profile_sha256: digest of the loads it was planned from.
        balancedness: figures by name ("before", "after", "held_out", "bound", and "even" where the rule is another);
            None where unknown.
        dispatch: the rule for choosing copies that it was planned for (`eplb_cli.dispatch`); None for an even split.
    """

    architecture: str | None = None
    top_k: int | None = None
    strategy: str | None = None
    objective: str | None = None
    seed: int | None = None
    profile_sha256: str | None = None
    balancedness: Mapping[str, float | None] = field(default_factory=dict)
    dispatch: str | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """A static placement of expert copies on EP ranks.

    Args:
        physical_to_logical: int32 [L, P]; slot p of a row is on rank p // (P / ep_size).
        layer_ids: int32 [L], absolute decoder layer of each row, ascending.
        num_experts: logical experts E.
        ep_size: EP ranks G.
        num_nodes: nodes the ranks are spread over, in equal consecutive blocks.
        provenance: where it came from.

    Raises:
        PlacementError: an id is out of range, an expert is missing from a layer, P does not divide over the ranks,
            layers are not ascending, or sizes are beyond any model's (`metrics.MOST_CELLS`).
    """

    physical_to_logical: npt.NDArray[np.int32]
    layer_ids: npt.NDArray[np.int32]
    num_experts: int
    ep_size: int
    num_nodes: int = 1
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        rows, experts, ranks = self.physical_to_logical, self.num_experts, self.ep_size
        if rows.ndim != 2 or rows.dtype != np.int32:
            raise PlacementError(
                f"physical_to_logical is {rows.dtype} {list(rows.shape)}", rule="it must be int32 [L, P]"
            )
        layers, slots = rows.shape
        require_table(layers, experts, ranks, PlacementError)
        if experts > slots:
            raise PlacementError(f"{experts} experts in {slots} slots", rule="each needs at least one")
        if experts < 1 or ranks < 1 or self.num_nodes < 1:
            raise PlacementError(f"experts={experts}, ep_size={ranks}, nodes={self.num_nodes}", rule="all must be >= 1")
        if slots % ranks:
            raise PlacementError(f"{slots} slots do not divide over {ranks} ranks", rule="each rank holds P / G slots")
        if ranks % self.num_nodes:
            raise PlacementError(f"{ranks} ranks do not split over {self.num_nodes} nodes")
        if self.layer_ids.shape != (layers,) or self.layer_ids.dtype != np.int32:
            raise PlacementError(
                f"layer_ids is {self.layer_ids.dtype} {list(self.layer_ids.shape)}", rule=f"it must be int32 [{layers}]"
            )
        if layers and (self.layer_ids[0] < 0 or not (np.diff(self.layer_ids) > 0).all()):
            raise PlacementError(
                f"layer ids {shown(self.layer_ids.tolist())} are not ascending", rule="each layer appears once"
            )
        outside = np.argwhere((rows < 0) | (rows >= experts))
        if outside.size:
            layer, slot = (int(i) for i in outside[0])
            raise PlacementError(
                f"slot {slot} holds expert {rows[layer, slot]}",
                layer=int(self.layer_ids[layer]),
                rank=slot // (slots // ranks),
                rule=f"experts are 0..{experts - 1}",
            )
        copies = replica_counts(rows, experts)
        require_table(layers, experts, int(copies.max(initial=0)), PlacementError)
        absent = np.argwhere(copies == 0)
        if absent.size:
            layer, expert = (int(i) for i in absent[0])
            raise PlacementError(
                "the expert has no slot",
                layer=int(self.layer_ids[layer]),
                expert=expert,
                rule="each needs at least one",
            )

    @classmethod
    def initial(cls, num_experts: int, num_redundant_experts: int, ep_size: int, layer_ids: npt.ArrayLike) -> Self:
        """vLLM's own start layout for the given layers."""
        ids = np.asarray(layer_ids, np.int32)
        row = initial_map(num_experts, num_redundant_experts)
        return cls(np.tile(row, (len(ids), 1)), ids, num_experts, ep_size)

    def for_layers(self, layer_ids: npt.ArrayLike, missing: Self | Literal["initial"] | None = None) -> Self:
        """The plan's rows of exactly these decoder layers; rows of other layers are left out.

        Args:
            layer_ids: [K] absolute layers, ascending.
            missing: where the row of a layer comes from that this plan lacks: another placement of the same experts,
                slots and ranks, or vLLM's own start layout ("initial").

        Raises:
            PlacementError: layers are missing and nothing takes their place, or `layer_ids` are not ascending.
        """
        wanted = np.asarray(layer_ids, np.int32)
        own = np.isin(wanted, self.layer_ids)
        rows = np.empty((len(wanted), self.num_slots), np.int32)
        rows[own] = self.physical_to_logical[np.searchsorted(self.layer_ids, wanted[own])]
        absent = wanted[~own]
        if absent.size and missing is None:
            raise PlacementError(
                f"the plan lacks {ranges(absent)}", rule=f"it has {ranges(self.layer_ids)}; layers match by absolute id"
            )
        if absent.size and missing is not None:
            rows[~own] = (
                initial_map(self.num_experts, self.num_redundant_experts)
                if missing == "initial"
                else missing.for_layers(absent).physical_to_logical
            )
        return replace(self, physical_to_logical=rows, layer_ids=wanted)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_slots(self) -> int:
        """P."""
        return int(self.physical_to_logical.shape[1])

    @property
    def num_redundant_experts(self) -> int:
        """R = P - E."""
        return self.num_slots - self.num_experts

    @property
    def slots_per_rank(self) -> int:
        """S = P / G."""
        return self.num_slots // self.ep_size

    @property
    def map_sha256(self) -> str:
        """Digest of what the plan means: layers and rows, not how it came about."""
        digest = hashlib.sha256(f"{self.num_experts},{self.ep_size}".encode())
        digest.update(np.ascontiguousarray(self.layer_ids, "<i4").tobytes())
        digest.update(np.ascontiguousarray(self.physical_to_logical, "<i4").tobytes())
        return digest.hexdigest()

    def rows(self) -> dict[int, list[int]]:
        """Expert of each slot, by decoder layer."""
        return dict(zip(self.layer_ids.tolist(), self.physical_to_logical.tolist(), strict=True))

    def replica_counts(self) -> npt.NDArray[np.int64]:
        """Copies of each expert, int64 [L, E]."""
        return replica_counts(self.physical_to_logical, self.num_experts)

    def logical_to_physical(self) -> npt.NDArray[np.int32]:
        """Slots of each expert in ascending order, int32 [L, E, most copies], padded with -1."""
        counts = self.replica_counts()
        table = np.full((self.num_layers, self.num_experts, int(counts.max(initial=0))), -1, np.int32)
        order = np.argsort(self.physical_to_logical, axis=1, kind="stable")
        experts = np.take_along_axis(self.physical_to_logical, order, 1)
        first = np.cumsum(counts, 1) - counts
        layer = np.arange(self.num_layers)[:, None]
        table[layer, experts, np.arange(self.num_slots)[None] - first[layer, experts]] = order
        return table

    def twins(self) -> list[tuple[int, int, int]]:
        """(layer id, rank, expert) of every expert that a rank holds more than once."""
        by_rank = np.sort(self.physical_to_logical.reshape(self.num_layers, self.ep_size, self.slots_per_rank), -1)
        found = np.argwhere(by_rank[..., 1:] == by_rank[..., :-1])
        seen = {(int(self.layer_ids[i]), int(g), int(by_rank[i, g, s])) for i, g, s in found}
        return sorted(seen)

    def require_distinct_copies(self, file: Path | None = None) -> None:
        """Refuse a rank that holds an expert twice: the second copy takes a slot and balances nothing.

        Excepted are plans that reproduce the reference (strategy "deepseek") and vLLM's own start layout, which with
        many redundant experts on few ranks does so itself.

        Raises:
            PlacementError: with the first such layer, rank and expert, and the `file` that the plan is from.
        """
        twins = self.twins()
        if twins and self.provenance.strategy != "deepseek" and not self.is_stock_form():
            layer, rank, expert = twins[0]
            raise PlacementError(
                f"the rank holds the expert more than once ({len(twins)} such places in the plan)",
                file=file,
                layer=layer,
                rank=rank,
                expert=expert,
                rule="copies of an expert are on different ranks",
            )

    def is_stock_form(self) -> bool:
        """True when an unmodified vLLM can start from it after relabelling: slot E + i repeats slot i mod E."""
        rows, experts = self.physical_to_logical, self.num_experts
        return bool((rows[:, experts:] == rows[:, np.arange(self.num_redundant_experts) % experts]).all()) and bool(
            (np.sort(rows[:, :experts], 1) == np.arange(experts)).all()
        )

    def to_json(self) -> bytes:
        """The plan file's content: sorted keys, one line a layer, the same bytes for the same plan."""
        provenance = self.provenance
        header: dict[str, Any] = {
            "balancedness": dict(sorted(provenance.balancedness.items())),
            "format": FORMAT,
            "model": {
                "architecture": provenance.architecture,
                "experts": self.num_experts,
                "top_k": provenance.top_k,
            },
            "num_redundant_experts": self.num_redundant_experts,
            "objective": provenance.objective,
            **({} if provenance.dispatch is None else {"dispatch": provenance.dispatch}),
            "profile_sha256": provenance.profile_sha256,
            "seed": provenance.seed,
            "strategy": provenance.strategy,
            "topology": {"ep_size": self.ep_size, "nodes": self.num_nodes},
            "version": VERSION,
        }
        layers = ",\n".join(
            "  "
            + json.dumps(
                {"layer_id": int(layer), "moe_index": index, "physical_to_logical": row.tolist()}, sort_keys=True
            )
            for index, (layer, row) in enumerate(zip(self.layer_ids, self.physical_to_logical, strict=True))
        )
        fields = {key: json.dumps(value, sort_keys=True, allow_nan=False) for key, value in header.items()}
        fields["layers"] = f"[\n{layers}\n ]"
        body = ",\n".join(f' "{key}": {fields[key]}' for key in sorted(fields))
        return f"{{\n{body}\n}}\n".encode()

    def save(self, path: str | PathLike[str], *, replace: bool = True) -> None:
        """Write the plan file, whole or not at all.

        Raises:
            OutputError: the file cannot be written, or it exists and `replace` is false.
        """
        with atomic_write(Path(path), replace=replace) as stream:
            stream.write(self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a plan file, or the plan inside a converted checkpoint's folder.

        Raises:
            PlacementError: there is no such file, it is not a plan, its version is newer, it has an unknown key, or it
                breaks a rule.
        """
        path = Path(path)
        file = path / PLAN_FILE if path.is_dir() else path
        if file != path and not file.exists():
            raise PlacementError(f"the folder holds no {PLAN_FILE}", file=path)
        content = read_file(file, PlacementError, most_bytes=MOST_PLAN_BYTES)
        try:
            return cls.from_json(content)
        except PlacementError as error:
            error.file = str(file)
            raise

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse a plan file's content.

        Raises:
            PlacementError: as `load`, without a file name.
        """
        document = parse_json(content, PlacementError)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PlacementError(
                f'is not a plan: it does not say "format": "{FORMAT}"',
                hint="A plan is the JSON file that `eplb plan` writes; other engines' files come in by `eplb import`.",
            )
        version = document.get("version")
        if version != VERSION or type(version) is not int:
            found = "no plan version" if version is None else f"plan version {shown(version)}"
            raise PlacementError(f"has {found}", rule=f"this eplb reads version {VERSION}")
        _check_keys(document, _KEYS, "the plan")
        model = _section(document, "model", _MODEL_KEYS)
        topology = _section(document, "topology", _TOPOLOGY_KEYS)
        layers = document.get("layers")
        if not isinstance(layers, list) or not layers:
            raise PlacementError("has no list `layers`" if layers != [] else "has no layer")
        for entry in layers:
            if not isinstance(entry, dict):
                raise PlacementError("has a layer that is not an object")
            _check_keys(entry, _LAYER_KEYS, "a layer")
        layers = sorted(layers, key=lambda entry: _integer(entry, "layer_id"))
        width = _integer(model, "experts") + _integer(document, "num_redundant_experts")
        for entry in layers:
            row = entry.get("physical_to_logical")
            if not isinstance(row, list) or any(type(expert) is not int for expert in row):
                raise PlacementError("physical_to_logical is not a list of integers", layer=entry["layer_id"])
            if len(row) != width:
                raise PlacementError(
                    f"{len(row)} slots",
                    layer=entry["layer_id"],
                    rule=f"every layer has experts + num_redundant_experts = {width}",
                )
            widest = max(row, key=abs, default=0)
            if abs(widest) >= 2**31:
                raise PlacementError(f"holds expert {widest}", layer=entry["layer_id"], rule="experts fit in 32 bits")
        for index, entry in enumerate(layers):
            if type(moe_index := entry.get("moe_index", index)) is not int or moe_index != index:
                raise PlacementError(
                    f"moe_index is {shown(entry['moe_index'])}", layer=entry["layer_id"], rule=f"it must be {index}"
                )
        figures = _optional(document, "balancedness", dict) or {}
        _check_keys(figures, _FIGURE_KEYS, "`balancedness`")
        return cls(
            np.array([entry["physical_to_logical"] for entry in layers], np.int32).reshape(len(layers), width),
            np.array([entry["layer_id"] for entry in layers], np.int32),
            _integer(model, "experts"),
            _integer(topology, "ep_size"),
            _integer(topology, "nodes", default=1),
            Provenance(
                architecture=_optional(model, "architecture", str),
                top_k=_optional(model, "top_k", int),
                strategy=_optional(document, "strategy", str),
                objective=_optional(document, "objective", str),
                dispatch=_rule(document),
                seed=_optional(document, "seed", int),
                profile_sha256=_optional(document, "profile_sha256", str),
                balancedness={key: _optional(figures, key, float, int) for key in figures},
            ),
        )


_KEYS = {
    "balancedness",
    "dispatch",
    "format",
    "layers",
    "model",
    "num_redundant_experts",
    "objective",
    "profile_sha256",
    "seed",
    "strategy",
    "topology",
    "version",
}
_MODEL_KEYS = {"architecture", "experts", "top_k"}
_TOPOLOGY_KEYS = {"ep_size", "nodes"}
_LAYER_KEYS = {"layer_id", "moe_index", "physical_to_logical"}
_FIGURE_KEYS = {"after", "before", "bound", "even", "held_out"}


def _check_keys(mapping: Mapping[str, Any], known: set[str], what: str) -> None:
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise PlacementError(
                f"{what} has the unknown key {shown(key)}",
                rule=f"did you mean {near[0]!r}?" if near else f"known: {sorted(known)}",
            )


def _section(document: Mapping[str, Any], key: str, known: set[str]) -> dict[str, Any]:
    section = document.get(key)
    if not isinstance(section, dict):
        raise PlacementError(f"has no section `{key}`")
    _check_keys(section, known, f"`{key}`")
    return section


def _integer(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = mapping.get(key, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise PlacementError(f"`{key}` is {shown(value)}", rule="it must be an integer >= 0 that fits in 32 bits")
    return value


def _rule(document: Mapping[str, Any]) -> str | None:
    rule: str | None = _optional(document, "dispatch", str)
    if rule is not None and rule not in RULES:
        raise PlacementError(f"`dispatch` is {shown(rule)}", rule=f"it must be one of {', '.join(RULES)}")
    return rule


def _optional(mapping: Mapping[str, Any], key: str, *kinds: type) -> Any:
    value = mapping.get(key)
    if value is not None and type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise PlacementError(f"`{key}` is {shown(value)}", rule=f"it must be {expected}, or null")
    return value
