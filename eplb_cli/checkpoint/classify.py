"""What each tensor of a checkpoint means to a relabelling: one expert's, rows by expert, the router's, or nothing.

Names decide; shapes only confirm, since sizes can coincide. What lies in a MoE block and is covered by no rule of the
family stops the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from eplb_cli.checkpoint.completeness import MoeLayer, require_complete
from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.checkpoint.family import Family
from eplb_cli.errors import CheckpointError
from eplb_cli.tensors import TensorEntry

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
        layer: decoder layer, for all but a COPY that belongs to no experts.
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
        warnings: what is missing but may be, or does not agree with the config.
    """

    roles: Mapping[str, Role]
    fused_layers: frozenset[int]
    drafts: tuple[str, ...]
    warnings: tuple[str, ...]


def classify(config: ModelConfig, tensors: Mapping[str, TensorEntry], *, stored_experts: int) -> ClassifiedTensors:
    """Classify every tensor and check the MoE layers for completeness.

    Args:
        config: the model.
        tensors: entries by name.
        stored_experts: experts or slots that expert tensors must hold; the model's own count in an ordinary checkpoint.

    Raises:
        CheckpointError: a tensor of a MoE block is covered by no rule, experts, parts of them or routers are missing or
            unlike their siblings, or config and tensors disagree on which layers are MoE.
    """
    roles = {name: role_of(config, entry) for name, entry in tensors.items()}
    by_layer: dict[int, list[str]] = {layer: [] for layer in config.shape.moe_layer_ids or ()}
    for name, role in roles.items():
        if role.layer >= 0:
            by_layer[role.layer].append(name)
    if not any(by_layer.values()):
        family = config.family
        known = ", ".join(f"{layers}.<layer>.{experts}" for layers in family.layers for experts in family.experts)
        raise CheckpointError(
            f"no tensor lies where {family.name} keeps its experts; it holds {', '.join(list(tensors)[:3])}",
            file=config.file.parent,
            rule=f"known places: {known}",
        )
    for layer, names in by_layer.items():
        _check_layer(config, layer, {name: roles[name] for name in names}, tensors, stored_experts)
    layers = [_layer(config, layer, names, roles, tensors) for layer, names in by_layer.items()]
    warnings = require_complete(config, layers, stored_experts)
    drafts = dict.fromkeys(role.draft for role in roles.values() if role.draft is not None)
    return ClassifiedTensors(roles, frozenset(layer.layer for layer in layers if layer.fused), tuple(drafts), warnings)


def _layer(
    config: ModelConfig,
    number: int,
    names: Iterable[str],
    roles: Mapping[str, Role],
    tensors: Mapping[str, TensorEntry],
) -> MoeLayer:
    """A MoE layer's tensors by expert and part."""
    layer = MoeLayer(number)
    for name in names:
        role = roles[name]
        if role.kind in (Kind.LOGICAL, Kind.IDS):
            layer.others[role.part] = tensors[name]
            layer.routes_by_table |= role.kind is Kind.IDS
            continue
        module, part = _module_and_part(role.part, config.family.experts)
        expert = role.expert if role.kind is Kind.EXPERT else None
        layer.experts.setdefault(expert, {})[part] = tensors[name]
        if not layer.module:
            layer.module = name[: name.index(f".{module}.") + len(module) + 1]
    if not layer.fused:
        # Numbers for all experts beside experts of their own.
        layer.others |= layer.experts.pop(None, {})
    return layer


@cache
def _module_and_part(part: str, modules: tuple[str, ...]) -> tuple[str, str]:
    """("mlp.experts", "gate_proj.weight") of "mlp.experts.*.gate_proj.weight"."""
    module = next(module for module in modules if part.startswith(f"{module}."))
    return module, ".".join(word for word in part[len(module) + 1 :].split(".") if word != "*")


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
    # One number for all experts stays as it is.
    kind = Kind.COPY if math.prod(entry.shape) == 1 else Kind.FUSED
    return Role(kind, layer, part=sys.intern(".".join(rest)))


def _check_layer(
    config: ModelConfig,
    layer: int,
    members: Mapping[str, Role],
    tensors: Mapping[str, TensorEntry],
    stored_experts: int,
) -> None:
    """Check that a MoE layer has experts, stored one way, rows for all of them, and one router."""
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
