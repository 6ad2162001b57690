"""What a converted checkpoint says of itself, computed anew from the source and the plan and compared in full.

config.json with its record, the plan inside, the provenance, the index and the shards' own notes: each is derived here
once more, by other code than the writer's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb_cli.checkpoint.classify import ClassifiedTensors
from eplb_cli.checkpoint.config import PLACEMENT_KEY
from eplb_cli.checkpoint.source import INDEX_FILE, PROVENANCE_FILE, Checkpoint
from eplb_cli.checkpoint.verify_names import ExpertNames
from eplb_cli.errors import CheckpointError, EplbError, PlacementError
from eplb_cli.placement import MOST_PLAN_BYTES, PLAN_FILE, Placement
from eplb_cli.untrusted import read_file, read_json

__all__ = [
    "Demand",
    "config_problems",
    "index_problems",
    "plan_problems",
    "provenance_problems",
    "read_config",
    "shard_problems",
]

_MOST_CONFIG_BYTES = 256 << 20
_MOST_LIST_BYTES = 4 << 30
"""Indices and provenances name every tensor, those of the largest models a million."""


@dataclass(frozen=True)
class Demand:
    """What was asked for.

    Args:
        source, classified: the checkpoint that was converted, and the roles of its tensors.
        plan: with a row for every MoE layer.
        lacking: MoE layers that the plan lacked; None where the plan is the output's own, which has them all.
        physical: the layout.
    """

    source: Checkpoint
    classified: ClassifiedTensors
    plan: Placement
    lacking: tuple[int, ...] | None
    physical: bool

    @classmethod
    def of(
        cls, source: Checkpoint, classified: ClassifiedTensors, plan: Placement, *, physical: bool, given: bool
    ) -> Demand:
        """Complete a plan: a MoE layer that it lacks keeps the engine's start layout.

        Raises:
            PlacementError: the plan is another model's, or cannot be stored in the layout.
        """
        experts, layers = source.config.shape.num_experts, source.config.shape.moe_layer_ids or ()
        if plan.num_experts != experts:
            raise PlacementError(f"the plan has {plan.num_experts} experts, the model {experts}")
        rows = dict(zip(plan.layer_ids.tolist(), plan.physical_to_logical.tolist(), strict=True))
        unknown = sorted(set(rows) - set(layers))
        if unknown:
            raise PlacementError(f"the plan has the layers {unknown}, which are no MoE layers of the model")
        start = [slot % experts for slot in range(plan.num_slots)]
        lacking = tuple(layer for layer in layers if layer not in rows)
        complete = replace(
            plan,
            physical_to_logical=np.array([rows.get(layer, start) for layer in layers], np.int32),
            layer_ids=np.array(layers, np.int32),
        )
        demand = cls(source, classified, complete, lacking if given else None, physical)
        demand._require_storable()
        return demand

    @property
    def rows(self) -> dict[int, list[int]]:
        """Expert of each slot, by MoE layer."""
        return dict(zip(self.plan.layer_ids.tolist(), self.plan.physical_to_logical.tolist(), strict=True))

    @property
    def names(self) -> ExpertNames:
        """How names of experts read in the output."""
        last = self.plan.num_slots if self.physical else self.plan.num_experts
        return ExpertNames({layer: row[:last] for layer, row in self.rows.items()}, self.source.config.family.drafts)

    @property
    def record(self) -> dict[str, Any]:
        """What config.json must say of the conversion."""
        plan = self.plan
        copies_stored = self.physical or self.classified.fused_layers
        return {
            "version": 1,
            "layout": "physical" if self.physical else "stock",
            "num_logical_experts": plan.num_experts,
            "num_physical_experts": plan.num_slots,
            "num_stored_experts": plan.num_slots if copies_stored else plan.num_experts,
            "ep_size": plan.ep_size,
            "plan": PLAN_FILE,
            "plan_sha256": plan.map_sha256,
        }

    def _require_storable(self) -> None:
        experts, groups = self.plan.num_experts, self.source.config.num_expert_groups
        if self.physical:
            if self.plan.num_slots == experts:
                raise PlacementError("the layout is physical, and the plan has no redundant experts")
            return
        size = experts // groups
        for layer, row in self.rows.items():
            if sorted(row[:experts]) != list(range(experts)) or any(
                row[slot] != row[slot % experts] for slot in range(experts, len(row))
            ):
                raise PlacementError("the layout is stock, and the row is not of the stock form", layer=layer)
            if any(len({row[first + i] // size for i in range(size)}) > 1 for first in range(0, experts, size)):
                raise PlacementError(f"the row tears the {groups} groups of routing apart", layer=layer)


def read_config(folder: Path) -> Any:
    """The document in the output's config.json.

    Raises:
        CheckpointError: there is none, or it is no strict JSON.
    """
    return read_json(folder / "config.json", CheckpointError, most_bytes=_MOST_CONFIG_BYTES, finite=False)


def config_problems(demand: Demand, folder: Path, document: Any) -> Iterator[str]:
    """config.json is the source's but for the record, the expert count, and the names of experts."""
    config = demand.source.config
    wanted = {**config.document, PLACEMENT_KEY: demand.record}
    if demand.physical:
        count = dict.fromkeys(config.count_keys, demand.plan.num_slots)
        wanted |= count if config.section is None else {config.section: {**config.values, **count}}
    for difference in demand.names.differences(wanted, document):
        yield f"{folder / 'config.json'}: {difference}"


def plan_problems(demand: Demand, folder: Path) -> Iterator[str]:
    """The plan inside is the one asked for, with how it came about."""
    file = folder / PLAN_FILE
    try:
        found = read_json(file, PlacementError, most_bytes=MOST_PLAN_BYTES)
        inner = Placement.load(file)
    except EplbError as error:
        yield str(error)
        return
    if inner.map_sha256 != demand.plan.map_sha256:
        for layer, row in demand.rows.items():
            if dict(zip(inner.layer_ids.tolist(), inner.physical_to_logical.tolist(), strict=True)).get(layer) != row:
                yield f"{file}, layer {layer}: is not the plan asked for"
                return
    for difference in ExpertNames().differences(json.loads(demand.plan.to_json()), found):
        yield f"{file}: is not the plan asked for: {difference}"


def provenance_problems(demand: Demand, folder: Path, origins: Mapping[str, str]) -> Iterator[str]:
    """The provenance says what the source and the plan say.

    Args:
        demand: what was asked for.
        folder: the output.
        origins: source tensor by output tensor.
    """
    file = folder / PROVENANCE_FILE
    try:
        found = read_json(file, CheckpointError, most_bytes=_MOST_LIST_BYTES)
    except CheckpointError as error:
        yield str(error)
        return
    if not isinstance(found, dict) or not isinstance(found.get("source"), dict):
        yield f"{file}: is no provenance"
        return
    if found.get("plan_file_sha256") != hashlib.sha256(demand.plan.to_json()).hexdigest():
        yield f"{folder / PLAN_FILE}: is not the plan that {PROVENANCE_FILE} names in plan_file_sha256"
    source = demand.source
    config = read_file(source.folder / "config.json", CheckpointError, most_bytes=_MOST_CONFIG_BYTES)
    wanted = {
        "format": "eplb-provenance",
        "version": 1,
        # By whom and from where it was made cannot be computed; only what kind of value it is.
        "tool_version": _free(found.get("tool_version"), "a version"),
        "layout": demand.record["layout"],
        "source": {
            "folder": _free(found["source"].get("folder"), "a name"),
            "revision": _revision(source, found["source"].get("revision")),
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "earlier_placement": source.placement,
            "shards": {
                name: {"size": header.file_size, "header_sha256": header.sha256}
                for name, header in source.shards.items()
            },
        },
        "plan_sha256": demand.plan.map_sha256,
        "plan_file_sha256": found.get("plan_file_sha256"),
        "identity_layers": _identity_layers(demand, found.get("identity_layers")),
        "unchanged_drafts": list(demand.classified.drafts),
        "side_files": list(source.side_files),
        "left_out": list(source.left_out),
        "tensors": {name: None if origin == name else origin for name, origin in origins.items()},
    }
    for difference in ExpertNames().differences(wanted, found):
        yield f"{file}: {difference}"


def index_problems(source: Checkpoint, output: Checkpoint) -> Iterator[str]:
    """The index has the source's notes, and the true total."""
    if output.index_name is None:
        if list(output.shards) != list(source.shards):
            yield f"{output.folder / INDEX_FILE}: is missing"
        return
    file = output.folder / output.index_name
    if output.index_name != (source.index_name or INDEX_FILE):
        yield f"{file}: must not be there; the source's index is {source.index_name or INDEX_FILE}"
    before, after = (sum(entry.nbytes for entry in side.tensors.values()) for side in (source, output))
    # A count of parameters is untrue once there are copies.
    notes = {key: value for key, value in source.index_metadata.items() if before == after or key != "total_parameters"}
    try:
        found = read_json(file, CheckpointError, most_bytes=_MOST_LIST_BYTES, finite=False)
    except CheckpointError as error:
        yield str(error)
        return
    wanted = {"metadata": {**notes, "total_size": after}, "weight_map": dict(output.shard_of)}
    for difference in ExpertNames().differences(wanted, found):
        yield f"{file}: {difference}"


def shard_problems(demand: Demand, output: Checkpoint, origins: Mapping[str, str]) -> Iterator[str]:
    """Each shard has the notes of a source shard that its tensors come from; each rank's experts lie in its files.

    Args:
        demand: what was asked for.
        output: the converted checkpoint.
        origins: source tensor by output tensor.
    """
    source, plan = demand.source, demand.plan
    for name, header in output.shards.items():
        shards = {source.shard_of[origins[tensor]] for tensor in header.tensors if tensor in origins} or {name}
        notes = [source.shards[shard].metadata for shard in sorted(shards) if shard in source.shards]
        # Loaders want the format named.
        allowed = [*notes, {"format": "pt"}] if {} in notes or not notes else notes
        if not any(header.metadata == known for known in allowed):
            difference = next(ExpertNames().differences(dict(allowed[0]), dict(header.metadata)))
            yield f"{output.folder / name}: __metadata__.{difference}"
    if demand.physical:
        width, names = max(2, len(str(plan.ep_size - 1))), demand.names
        for name, shard in output.shard_of.items():
            expert = names.parse(name)
            rank = (
                "shared-"
                if expert is None
                else f"ep{expert.id // plan.slots_per_rank:0{width}d}-of-{plan.ep_size:0{width}d}-"
            )
            if not shard.startswith(f"model-{rank}"):
                yield f"{output.folder / shard}: holds {name}, which belongs to model-{rank}*"


def _free(value: Any, kind: str) -> Any:
    return value if isinstance(value, str) and value and value.isprintable() else kind


def _revision(source: Checkpoint, found: Any) -> Any:
    """The source's own revision where it and the provenance have one; either may have been fetched another way."""
    if found is None or source.revision is None:
        return None if found is None else _free(found, "a revision")
    return source.revision


def _identity_layers(demand: Demand, found: Any) -> Any:
    """The layers that the plan lacked; what the output says of itself can at least be so."""
    if demand.lacking is not None:
        return list(demand.lacking)
    start = [slot % demand.plan.num_experts for slot in range(demand.plan.num_slots)]
    possible = [layer for layer, row in demand.rows.items() if row == start]
    return [layer for layer in possible if isinstance(found, list) and layer in found]
