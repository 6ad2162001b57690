"""What each tensor of a checkpoint means to a relabelling: one expert's, rows by expert, the router's, or nothing.

Names decide; shapes only confirm, since sizes can coincide. What lies in a MoE block and is covered by no rule of the
family stops the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.checkpoint.family import Family
from eplb_cli.checkpoint.safetensors_file import TensorEntry
from eplb_cli.errors import CheckpointError

__all__ = ["ClassifiedTensors", "Kind", "Role", "classify", "role_of", "with_expert"]


class Kind(Enum):
    """How a tensor depends on the experts."""

    EXPERT = "one expert's tensor; its name holds the id"
    FUSED = "all experts' rows, axis 0"
    LOGICAL = "rows by logical expert, axis 0: router weights, biases, scales"
    IDS = "its values are logical expert ids"
    COPY = "does not depend on the experts"


@dataclass(frozen=True, slots=True)
class Role:
    """What one tensor is.

    Args:
        kind: see Kind.
        layer: decoder layer, for all but COPY.
        expert: the id in an EXPERT tensor's name.
        position: which component of an EXPERT tensor's name the id is.
        part: the tensor within its layer or expert, ids left out ("mlp.experts.*.gate_proj.weight").
        draft: the draft head that a COPY tensor belongs to, when it does.
    """

    kind: Kind
    layer: int = -1
    expert: int = -1
    position: int = -1
    part: str = ""
    draft: str | None = None


_COPY = Role(Kind.COPY)


@dataclass(frozen=True)
class ClassifiedTensors:
    """The roles of all tensors of a checkpoint, complete and consistent.

    Args:
        roles: by tensor name.
        fused_layers: MoE layers whose experts are fused tensors; the others are per expert.
        drafts: draft heads whose own experts stay as they are, in order of appearance.
    """

    roles: Mapping[str, Role]
    fused_layers: frozenset[int]
    drafts: tuple[str, ...]


def classify(config: ModelConfig, tensors: Mapping[str, TensorEntry], *, stored_experts: int) -> ClassifiedTensors:
    """Classify every tensor and check each MoE layer for completeness.

    Args:
        config: the model.
        tensors: entries by name.
        stored_experts: experts or slots that expert tensors must hold; the model's own count in an ordinary checkpoint.

    Raises:
        CheckpointError: a tensor of a MoE block is covered by no rule, experts or routers are missing, or config and
            tensors disagree on which layers are MoE.
    """
    roles = {name: role_of(config, entry) for name, entry in tensors.items()}
    by_layer: dict[int, list[str]] = {layer: [] for layer in config.shape.moe_layer_ids or ()}
    for name, role in roles.items():
        if role.kind is not Kind.COPY:
            by_layer[role.layer].append(name)
    if not any(by_layer.values()):
        family = config.family
        known = ", ".join(f"{layers}.<layer>.{experts}" for layers in family.layers for experts in family.experts)
        raise CheckpointError(
            f"no tensor lies where {family.name} keeps its experts; it holds {', '.join(list(tensors)[:3])}",
            file=config.file.parent,
            rule=f"known places: {known}",
        )
    fused_layers = set()
    for layer, names in by_layer.items():
        members = {name: roles[name] for name in names}
        if _check_layer(config, layer, members, tensors, stored_experts):
            fused_layers.add(layer)
    drafts = dict.fromkeys(role.draft for role in roles.values() if role.draft is not None)
    return ClassifiedTensors(roles, frozenset(fused_layers), tuple(drafts))


def with_expert(name: str, role: Role, expert: int) -> str:
    """Name of the same tensor of another expert."""
    parts = name.split(".")
    parts[role.position] = str(expert)
    return ".".join(parts)


def role_of(config: ModelConfig, entry: TensorEntry) -> Role:
    """The role of one tensor, by its name.

    Raises:
        CheckpointError: it looks like an expert's or a router's but is covered by no rule of the family.
    """
    family = config.family
    parts = entry.name.split(".")
    layer, rest = _layer_of(family, parts)
    if layer is None:
        draft = next((module for module in family.drafts if _starts(parts, module)), None)
        if draft is None and "experts" in parts:
            raise _uncovered(config, entry, None, "holds experts outside the decoder layers")
        return Role(Kind.COPY, draft=draft)
    if layer >= (config.shape.num_hidden_layers or 0):
        return Role(Kind.COPY, draft=".".join(parts[: len(parts) - len(rest)]))
    name = ".".join(rest)
    if layer not in (config.shape.moe_layer_ids or ()):
        if any(_starts(rest, module) for module in family.experts):
            raise _uncovered(config, entry, layer, "is an expert's, but config.json makes the layer dense")
        return _COPY
    for module in family.experts:
        if _starts(rest, module):
            return _expert_role(config, entry, layer, rest, module.count(".") + 1)
    if name in family.router or name in family.by_expert:
        return Role(Kind.LOGICAL, layer, part=name)
    if name in family.expert_ids:
        return Role(Kind.IDS, layer, part=name)
    if any(_starts(rest, module) for module in family.copied):
        return _COPY
    if any(_starts(rest, module.rpartition(".")[0]) for module in family.router):
        raise _uncovered(config, entry, layer, "belongs to the router, whose rows cannot be told apart in this form")
    if any(_starts(rest, f"{module}.{projection}") for module in family.blocks for projection in family.projections):
        raise _uncovered(config, entry, layer, "is a dense layer's, but config.json makes the layer a MoE layer")
    if any(_starts(rest, module) for module in family.blocks) or "experts" in rest or "router" in rest:
        raise _uncovered(config, entry, layer, "lies in a MoE block and is covered by no rule")
    return _COPY


def _expert_role(config: ModelConfig, entry: TensorEntry, layer: int, rest: list[str], depth: int) -> Role:
    """Role of a tensor below the experts' module, which has `depth` components of `rest`."""
    tail = rest[depth:]
    parts = entry.name.split(".")
    at = None
    if _is_id(tail[0]) and len(tail) > 1:
        at = len(parts) - len(tail)
    elif len(tail) > 1 and tail[0] in config.family.projections and _is_id(tail[1]):
        at = len(parts) - len(tail) + 1
    if at is not None:
        expert = int(parts[at])
        parts[at] = "*"
        # The same few names in every layer: one copy of each is enough.
        part = sys.intern(".".join(parts[len(parts) - len(rest) :]))
        return Role(Kind.EXPERT, layer, expert, at, part)
    if _fused_stem(config.family, tail[0]) is None:
        raise _uncovered(config, entry, layer, "is no expert's and no fused tensor's name")
    if _elements(entry) == 1:
        return _COPY
    return Role(Kind.FUSED, layer, part=".".join(rest))


def _check_layer(
    config: ModelConfig,
    layer: int,
    members: Mapping[str, Role],
    tensors: Mapping[str, TensorEntry],
    stored_experts: int,
) -> bool:
    """Check one MoE layer; True when its experts are fused."""
    folder, family, num_experts = config.file.parent, config.family, config.shape.num_experts
    if not any(role.kind in (Kind.EXPERT, Kind.FUSED) for role in members.values()):
        raise CheckpointError(
            "config.json makes the layer MoE, but the files hold no experts of it", file=folder, layer=layer
        )
    for name, role in members.items():
        if role.kind in (Kind.FUSED, Kind.LOGICAL):
            expected = stored_experts if role.kind is Kind.FUSED else num_experts
            shape = tensors[name].shape
            if not shape or shape[0] != expected:
                raise CheckpointError(
                    f"has the shape {list(shape)}",
                    file=folder,
                    tensor=name,
                    layer=layer,
                    rule=f"axis 0 must be the {expected} experts",
                )
            if tensors[name].nbytes % expected:
                raise CheckpointError("its rows are not whole bytes", file=folder, tensor=name, layer=layer)
    routers = [name for name, role in members.items() if role.kind is Kind.LOGICAL and role.part in family.router]
    if len(routers) != 1:
        raise CheckpointError(
            f"{len(routers)} routers ({', '.join(routers)})" if routers else "no router",
            file=folder,
            layer=layer,
            rule=f"a MoE layer has one of {', '.join(family.router)}",
        )
    per_expert = {name: role for name, role in members.items() if role.kind is Kind.EXPERT}
    fused = [name for name, role in members.items() if role.kind is Kind.FUSED]
    if fused and per_expert:
        raise CheckpointError(
            f"holds both fused and per-expert tensors: {fused[0]}, {next(iter(per_expert))}",
            file=folder,
            layer=layer,
            rule="a layer's experts are stored one way",
        )
    if fused:
        stems = {_fused_stem(family, part) for name in fused for part in members[name].part.split(".")}
        absent = [stem for stem in family.fused if stem not in stems]
        if absent:
            raise CheckpointError(f"the fused tensor {absent[0]} is missing", file=folder, layer=layer)
        return True
    _check_ids(folder, layer, per_expert.values(), stored_experts, family)
    return False


def _check_ids(folder: object, layer: int, roles: Iterable[Role], stored_experts: int, family: Family) -> None:
    projections: dict[int, set[str]] = {}
    for role in roles:
        found = projections.setdefault(role.expert, set())
        found.update(part for part in role.part.split(".") if part in family.projections)
    expected = set().union(*projections.values())
    for expert in range(stored_experts):
        lacking = expected - projections.get(expert, set()) if expert in projections else {"all"}
        if lacking:
            what = "has no tensors" if expert not in projections else f"lacks {', '.join(sorted(lacking))}"
            raise CheckpointError(
                f"the expert {what}",
                file=str(folder),
                layer=layer,
                expert=expert,
                rule=f"experts 0..{stored_experts - 1} must all be there",
            )
    beyond = max(projections)
    if beyond >= stored_experts:
        raise CheckpointError(
            "the files hold such an expert",
            file=str(folder),
            layer=layer,
            expert=beyond,
            rule=f"by config.json ids are 0..{stored_experts - 1}",
        )


def _layer_of(family: Family, parts: Sequence[str]) -> tuple[int | None, list[str]]:
    """(layer, components after it), or (None, all components) outside the decoder layers."""
    for module in family.layers:
        depth = module.count(".") + 1
        if _starts(parts, module) and len(parts) > depth + 1 and _is_id(parts[depth]):
            return int(parts[depth]), list(parts[depth + 1 :])
    return None, list(parts)


def _starts(parts: Sequence[str], module: str) -> bool:
    wanted = module.split(".")
    return list(parts[: len(wanted)]) == wanted


def _is_id(text: str) -> bool:
    return text.isdecimal() and text.isascii() and str(int(text)) == text


def _fused_stem(family: Family, component: str) -> str | None:
    """The fused tensor that a component names, alone or with a suffix such as `_scale` or `_blocks`."""
    return next((stem for stem in family.fused if component == stem or component.startswith(f"{stem}_")), None)


def _elements(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count


def _uncovered(config: ModelConfig, entry: TensorEntry, layer: int | None, problem: str) -> CheckpointError:
    family = config.family
    known = [f"{module}.<id>.*" for module in family.experts]
    known += [f"{module}.{stem}" for module in family.experts for stem in family.fused]
    known += [*family.router, *family.by_expert, *family.expert_ids, *(f"{module}.*" for module in family.copied)]
    return CheckpointError(
        f"{entry.dtype} {list(entry.shape)} {problem}",
        file=config.file.parent,
        tensor=entry.name,
        layer=layer,
        rule=f"{family.name} knows {', '.join(known)}",
        hint="Moving experts without it could change the model. If the form is legitimate, its family file lacks it.",
    )
