"""A plan to an engine's file and back: the rules that all engines share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import EplbError, PlacementError, UsageError, ranges
from eplb_cli.exports.protocol import Decoded, Engine, Numbering, Table
from eplb_cli.exports.sidecar import read_sidecar, sidecar_path
from eplb_cli.loads import ModelShape
from eplb_cli.placement import MOST_PLAN_BYTES, Placement, Provenance
from eplb_cli.untrusted import read_file

__all__ = [
    "Exported",
    "Facts",
    "Imported",
    "export_placement",
    "import_file",
    "import_placement",
    "same_placement",
]


@dataclass(frozen=True)
class Facts:
    """What the user says of an engine's file, where the format does not.

    Args:
        model: experts, hidden layers and MoE layers.
        layer_ids: decoder layers of the plan, ascending.
        num_experts, ep_size, num_nodes: E, G and nodes.
    """

    model: ModelShape | None = None
    layer_ids: tuple[int, ...] | None = None
    num_experts: int | None = None
    ep_size: int | None = None
    num_nodes: int | None = None


@dataclass(frozen=True)
class Exported:
    """A file's content, its rows and its MoE layers, and what was done to the plan."""

    content: bytes
    rows: int
    layer_ids: tuple[int, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Imported:
    """A plan, and what was assumed."""

    placement: Placement
    warnings: tuple[str, ...]


def export_placement(placement: Placement, engine: Engine, model: ModelShape | None = None) -> Exported:
    """Write a plan in an engine's format, and prove that it reads back as the same plan.

    With the model, MoE layers that the plan lacks get the engine's own start layout, with a warning.

    Raises:
        PlacementError: the plan does not fit the model, or breaks a rule of the engine.
        UsageError: the engine wants a row for every hidden layer and the model is not given.
    """
    warnings: list[str] = []
    _refuse_twins(placement, engine)
    twins = placement.twins()
    if twins:
        warnings.append(f"{len(twins)} times a rank holds two copies of an expert; the second one balances nothing")
    complete = _complete(placement, model, warnings)
    table = _table(complete, engine, model)
    content = engine.encode(table)
    decoded = engine.decode(content)
    same = np.array_equal(
        _canonical(decoded.rows, table.ep_size, engine), _canonical(table.rows, table.ep_size, engine)
    )
    if not same or decoded.layer_ids not in (None, table.layer_ids):
        raise PlacementError(f"the {engine.name} file does not read back as the plan", hint="This is a defect of eplb.")
    return Exported(content, len(table.rows), tuple(complete.layer_ids.tolist()), tuple(warnings))


def _refuse_twins(placement: Placement, engine: Engine) -> None:
    twins = placement.twins() if engine.refuses_twins else []
    if twins:
        layer, rank, expert = twins[0]
        raise PlacementError(
            f"the rank holds the expert twice ({len(twins)} such places)",
            layer=layer,
            rank=rank,
            expert=expert,
            rule=f"{engine.name} refuses twins or serves wrong weights with them",
            hint="Plan with --strategy auto: it never puts two copies of an expert on a rank.",
        )


def _complete(placement: Placement, model: ModelShape | None, warnings: list[str]) -> Placement:
    """The plan with a row for every MoE layer of the model."""
    if model is None:
        return placement
    if model.num_experts != placement.num_experts:
        raise PlacementError(
            f"the plan is for {placement.num_experts} experts", rule=f"the model has {model.num_experts}"
        )
    if model.moe_layer_ids is None:
        return placement
    planned = placement.layer_ids.tolist()
    extra = sorted(set(planned) - set(model.moe_layer_ids))
    if extra:
        raise PlacementError(
            f"the plan has layers {extra}", rule=f"the model's MoE layers are {list(model.moe_layer_ids)}"
        )
    absent = sorted(set(model.moe_layer_ids) - set(planned))
    if not absent:
        return placement
    warnings.append(f"layers {absent} are not in the plan and get the engine's own start layout")
    return placement.for_layers(model.moe_layer_ids, missing="initial")


def _table(placement: Placement, engine: Engine, model: ModelShape | None) -> Table:
    if engine.numbering is Numbering.hidden:
        if model is None or model.num_hidden_layers is None:
            raise UsageError(
                f"{engine.name} wants a row for every hidden layer, dense ones too",
                rule="a plan holds MoE layers only",
                hint="Pass --model MODEL.",
            )
        beyond = placement.layer_ids[placement.layer_ids >= model.num_hidden_layers]
        if beyond.size:
            raise PlacementError(
                f"the plan has {ranges(beyond)}", rule=f"the model has {model.num_hidden_layers} hidden layers"
            )
        # A dense layer's row is never used, but must cover every expert.
        placement = placement.for_layers(range(model.num_hidden_layers), missing="initial")
    return Table(
        placement.physical_to_logical, tuple(placement.layer_ids.tolist()), placement.num_experts, placement.ep_size
    )


def import_placement(content: bytes, engine: Engine, facts: Facts) -> Imported:
    """Read an engine's file into a plan.

    Raises:
        PlacementError: the file is not the engine's, or is no valid placement.
        UsageError: the format does not carry something, and nobody told.
    """
    warnings: list[str] = []
    decoded = engine.decode(content)
    ep_size = _agreed("ranks", "--ep-size", facts.ep_size, decoded.ep_size)
    if ep_size is None:
        raise UsageError(
            f"a {engine.name} file does not say over how many ranks its slots are spread", hint="Pass --ep-size G."
        )
    model_experts = None if facts.model is None else facts.model.num_experts
    experts = _agreed("experts", "the model or --num-experts", facts.num_experts or model_experts, decoded.num_experts)
    if facts.num_experts is not None and model_experts is not None and facts.num_experts != model_experts:
        raise UsageError(f"--num-experts {facts.num_experts}", rule=f"the model has {model_experts} experts")
    if experts is None:
        # Every expert has a slot in every layer, so the highest id tells; a missing expert below it is found later.
        experts = int(decoded.rows.max()) + 1
    rows, layers = _layers(decoded, engine, facts, warnings)
    if facts.num_experts is None and facts.model is None and decoded.num_experts is None:
        warnings.append(f"{experts} experts were taken from the highest id; pass --model or --num-experts to check")
    order = np.argsort(layers, kind="stable")
    placement = Placement(
        rows[order].astype(np.int32),
        np.array(layers, np.int32)[order],
        experts,
        ep_size,
        facts.num_nodes or 1,
        Provenance(
            architecture=None if facts.model is None else facts.model.architecture,
            top_k=None if facts.model is None else facts.model.top_k,
            strategy=f"imported from {engine.name}",
        ),
    )
    _refuse_twins(placement, engine)
    return Imported(placement, tuple(warnings))


def import_file(path: Path, engine: Engine, facts: Facts) -> Imported:
    """Read an engine's file, with the plan of its sidecar when there is one and the file is unchanged.

    Raises:
        PlacementError: there is no such file, the sidecar says something else, or as `import_placement`.
        UsageError: as `import_placement`.
    """
    try:
        return _import_file(path, engine, facts)
    except EplbError as error:
        error.file = error.file or str(path)
        raise


def _import_file(path: Path, engine: Engine, facts: Facts) -> Imported:
    content = read_file(path, PlacementError, most_bytes=MOST_PLAN_BYTES)
    told = read_sidecar(path, content, engine.name)
    if told is None:
        imported = import_placement(content, engine, facts)
        if not sidecar_path(path).is_file():
            return imported
        return replace(
            imported, warnings=(*imported.warnings, f"{path} changed since its export; its sidecar is not used")
        )
    plan, layers = told
    completed = Facts(
        facts.model,
        facts.layer_ids or layers,
        facts.num_experts or plan.num_experts,
        facts.ep_size or plan.ep_size,
        facts.num_nodes or plan.num_nodes,
    )
    found = import_placement(content, engine, completed).placement
    # An export may have added layers that the model has and the plan lacks.
    covered = bool(np.isin(plan.layer_ids, found.layer_ids).all())
    if (
        not covered
        or not same_placement(found.for_layers(plan.layer_ids), plan, engine)
        or found.num_nodes != plan.num_nodes
    ):
        raise PlacementError(
            "does not say what its sidecar and the given options say",
            file=path,
            hint=f"Remove {sidecar_path(path)} to read the file alone.",
        )
    return Imported(plan, ())


def _agreed(what: str, who: str, told: int | None, found: int | None) -> int | None:
    if told is not None and found is not None and told != found:
        raise PlacementError(f"the file is for {found} {what}", rule=f"{who} says {told}")
    return told if told is not None else found


def _layers(
    decoded: Decoded, engine: Engine, facts: Facts, warnings: list[str]
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """The rows of the MoE layers, and their decoder layers."""
    moe = None if facts.model is None else facts.model.moe_layer_ids
    wanted = facts.layer_ids if facts.layer_ids is not None else moe
    rows = decoded.rows
    if facts.layer_ids is not None and moe is not None and not set(facts.layer_ids) <= set(moe):
        raise UsageError(
            f"--layer-ids names {sorted(set(facts.layer_ids) - set(moe))}", rule=f"the MoE layers are {list(moe)}"
        )
    if decoded.layer_ids is not None:
        if wanted is not None and not set(decoded.layer_ids) <= set(wanted):
            raise PlacementError(
                f"holds layers {sorted(set(decoded.layer_ids) - set(wanted))}", rule=f"expected are {list(wanted)}"
            )
        return rows, decoded.layer_ids
    if decoded.repeats:
        if wanted is None:
            raise UsageError(
                "the file holds one row for all layers", hint="Pass --model MODEL or --layer-ids to say which they are."
            )
        return np.repeat(rows, len(wanted), axis=0), wanted
    if wanted is None:
        warnings.append(
            f"the {'hidden' if engine.numbering is Numbering.hidden else 'MoE'} layers were taken as decoder layers "
            f"0..{len(rows) - 1}; pass --model or --layer-ids if some layers are dense"
        )
        return rows, tuple(range(len(rows)))
    if engine.numbering is Numbering.ordinal:
        if len(rows) != len(wanted):
            raise PlacementError(f"holds {len(rows)} layers", rule=f"{len(wanted)} MoE layers are expected")
        return rows, wanted
    hidden = None if facts.model is None else facts.model.num_hidden_layers
    if (hidden is not None and len(rows) != hidden) or max(wanted) >= len(rows):
        raise PlacementError(
            f"holds {len(rows)} layers", rule=f"{hidden if hidden is not None else max(wanted) + 1} are expected"
        )
    return rows[list(wanted)], wanted


def _canonical(rows: npt.NDArray[np.integer], ep_size: int, engine: Engine) -> npt.NDArray[np.integer]:
    if engine.keeps_slot_order:
        return rows
    return np.sort(rows.reshape(len(rows), ep_size, -1), axis=2)


def same_placement(one: Placement, other: Placement, engine: Engine) -> bool:
    """Whether two plans are the same as far as the engine's format can tell."""
    return (
        (one.num_experts, one.ep_size) == (other.num_experts, other.ep_size)
        and np.array_equal(one.layer_ids, other.layer_ids)
        and one.num_slots == other.num_slots
        and np.array_equal(
            _canonical(one.physical_to_logical, one.ep_size, engine),
            _canonical(other.physical_to_logical, other.ep_size, engine),
        )
    )
