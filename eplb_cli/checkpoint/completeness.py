"""Completeness: every expert of a layer has the same parts, and every layer of one kind the same experts.

Loaders forgive what is missing here: they leave the memory of an absent weight or scale as it was and answer wrongly.
So a missing part, or one of another number type or shape than its siblings', stops the run. A missing scale of the
activations is only worth a warning, since engines take one scale for all experts of a layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path

from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.errors import CheckpointError, ranges
from eplb_cli.tensors import TensorEntry

__all__ = ["MoeLayer", "require_complete"]

_WEIGHTS = {"weight", "weight_packed", "packed", "qweight", "blocks", "weight_blocks"}
"""Names of a matrix itself; other methods have names of their own, of which nothing is demanded."""
_PLAIN = {"BF16", "F16", "F32", "F64"}
"""Number types that need no scale."""
_SCALE = re.compile(r"scale|absmax|scb|quant_state", re.IGNORECASE)
_BESIDE_A_WEIGHT = re.compile(r"scale|absmax|scb|quant|zero|zp|g_idx|shape|bias|perm", re.IGNORECASE)
_ACTIVATION = re.compile(r"(^|[._])(input|activation|act)s?_")
_DOWN = {"down_proj", "w2"}
"""The projection back to the hidden size; the others are read as one matrix, so their shapes are equal."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a part is stored."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Parts = Mapping[str, tuple[str, _Form]]
"""What is stored of one matrix: by suffix, the part's whole name and its form."""


@dataclass
class MoeLayer:
    """The tensors of one MoE layer.

    Args:
        layer: decoder layer.
        module: full name of the module that holds its experts.
        experts: by expert, by part without the module and the id ("gate_proj.weight"); fused tensors, and scalars for
            all experts, are those of one expert `None`.
        others: router, its biases and the like, by part.
        routes_by_table: whether it looks expert ids up, as the first layers of some models do.
    """

    layer: int
    module: str = ""
    experts: dict[int | None, dict[str, TensorEntry]] = field(default_factory=dict)
    others: dict[str, TensorEntry] = field(default_factory=dict)
    routes_by_table: bool = False

    @property
    def fused(self) -> bool:
        """Whether its experts are fused tensors."""
        return self.experts.keys() == {None}


@dataclass(frozen=True)
class _Usual:
    """What the experts of a layer have in common: the form of every part, those of activations apart."""

    layer: MoeLayer
    parts: Mapping[str, _Form]
    activations: Mapping[str, _Form]


def require_complete(config: ModelConfig, layers: Sequence[MoeLayer], stored_experts: int) -> tuple[str, ...]:
    """Check the parts of all experts of all MoE layers.

    Args:
        config: the model.
        layers: their tensors, in any order.
        stored_experts: experts that a layer must hold when it is not fused.

    Returns:
        Warnings: activation scales that are missing, and scales that do not agree with the config.

    Raises:
        CheckpointError: an expert or a part is missing, or is stored in another way than its siblings.
    """
    lacking: dict[tuple[str, str], list[int]] = {}
    usual = []
    for layer in layers:
        if not layer.fused:
            _require_ids(config, layer, stored_experts)
        usual.append(_require_siblings(config, layer, lacking))
    for one in usual:
        _require_forms(config, one)
    _require_agreement(config, usual, lacking)
    warnings = [
        f"{ranges(sorted(found))}, {who}: no {parts}; engines use the other experts'"
        for (who, parts), found in lacking.items()
    ]
    return (*warnings, *_precision_warnings(config, usual))


def _require_ids(config: ModelConfig, layer: MoeLayer, stored_experts: int) -> None:
    folder = config.file.parent
    for expert in range(stored_experts):
        if expert not in layer.experts:
            raise CheckpointError(
                "the expert has no tensors", file=folder, layer=layer.layer, expert=expert,
                rule=f"experts 0..{stored_experts - 1} must all be there",
            )  # fmt: skip
    beyond = max(expert for expert in layer.experts if expert is not None)
    if beyond >= stored_experts:
        raise CheckpointError(
            "the files hold such an expert", file=folder, layer=layer.layer, expert=beyond,
            rule=f"by config.json ids are 0..{stored_experts - 1}",
        )  # fmt: skip


def _require_siblings(
    config: ModelConfig, layer: MoeLayer, lacking: dict[tuple[str, str], list[int]]
) -> _Usual:  # fmt: skip
    """Check that all experts of a layer have the same parts; note those that lack an activation scale."""
    counts: dict[str, Counter[_Form]] = {}
    for parts in layer.experts.values():
        for part, entry in parts.items():
            counts.setdefault(part, Counter())[_Form(entry.dtype, entry.shape)] += 1
    usual = {part: forms.most_common(1)[0][0] for part, forms in counts.items()}
    rare = {part for part, forms in counts.items() if 2 * forms.total() < len(layer.experts)}
    for expert, parts in layer.experts.items():
        for part, form in usual.items():
            found = parts.get(part)
            if found is None:
                if part not in rare and not _is_activation(part):
                    raise _lacks(config, layer, expert, part)
                continue
            stored = _Form(found.dtype, found.shape)
            problem = (
                f"{part} is {stored}, the other experts' is {form}" if stored != form
                else "the layer's other experts have no such part" if part in rare and not _is_activation(part)
                else None
            )  # fmt: skip
            if problem is not None:
                raise CheckpointError(
                    problem, file=config.file.parent, tensor=found.name, layer=layer.layer, expert=expert,
                    rule=_SIBLINGS,
                )  # fmt: skip
    activations = {part: form for part, form in usual.items() if _is_activation(part)}
    without: dict[tuple[str, ...], list[int]] = {}
    for expert, parts in layer.experts.items():
        missing = tuple(sorted(part for part in activations if part not in parts))
        if missing and expert is not None:
            without.setdefault(missing, []).append(expert)
    for missing, experts in without.items():
        who = ranges(sorted(experts), "expert")
        lacking.setdefault((who, ", ".join(missing)), []).append(layer.layer)
    return _Usual(layer, {part: form for part, form in usual.items() if part not in activations}, activations)


_SIBLINGS = "all experts of a layer have the same parts, of equal number type and shape"


def _require_forms(config: ModelConfig, usual: _Usual) -> None:
    """Check what an expert consists of: one weight a matrix, a scale where its numbers need one, matrices alike."""
    folder, layer = config.file.parent, usual.layer
    matrices: dict[str, dict[str, tuple[str, _Form]]] = {}
    for part, form in usual.parts.items():
        matrix, suffix = _split(part, config.family.projections, config.family.fused)
        parts = matrices.setdefault(matrix, {})
        twice = next((parts[other][0] for other in parts if {suffix, other} <= _WEIGHTS), None)
        if twice is not None:
            raise CheckpointError(
                f"experts have one weight in two forms: {twice} and {part}", file=folder, layer=layer.layer,
                rule="a weight is stored once; engines would read one or the other",
            )  # fmt: skip
        parts[suffix] = (part, form)
    matrices.pop("", None)
    _require_all_matrices(config, layer, set(matrices))
    for matrix, parts in matrices.items():
        if all(_BESIDE_A_WEIGHT.search(suffix) for suffix in parts):
            raise _lacks(config, layer, None, f"{matrix}.weight")
        part, weight = next((parts[suffix] for suffix in parts if suffix in _WEIGHTS), ("", None))
        if weight is None or weight.dtype in _PLAIN or any(_SCALE.search(suffix) for suffix in parts):
            continue
        # Without a quantisation config they may be numbers that were only rounded to 8 bits.
        if config.quantisation is not None or not weight.dtype.startswith("F8"):
            raise CheckpointError(
                f"no expert has a scale for {part}, which is {weight.dtype}", file=folder, layer=layer.layer,
                rule="quantised weights have scales",
            )  # fmt: skip
    for one, other in combinations(matrices, 2):
        problem = _unlike(config, layer, (one, matrices[one]), (other, matrices[other]))
        if problem is not None and _declared(config, layer, one) == _declared(config, layer, other):
            raise problem
    _require_blocks(config, layer, matrices)


def _require_all_matrices(config: ModelConfig, layer: MoeLayer, found: set[str]) -> None:
    """Check that none of an expert's matrices is missing; families list their names in threes."""
    fused, names = config.family.fused, config.family.projections
    namings = [fused] if layer.fused else [fused, *(names[first : first + 3] for first in range(0, len(names), 3))]
    likely = max(namings, key=lambda naming: len(found & set(naming)))
    missing = [matrix for matrix in likely if matrix not in found]
    if missing and found:
        raise _lacks(config, layer, None, missing[0])


def _unlike(
    config: ModelConfig, layer: MoeLayer, one: tuple[str, Parts], other: tuple[str, Parts]
) -> CheckpointError | None:  # fmt: skip
    """How two matrices of an expert differ in what is stored of them; None when they are alike."""
    for (here, parts), (there, twins) in ((one, other), (other, one)):
        for suffix, (part, _) in parts.items():
            if suffix not in twins and "bias" not in suffix:
                return _lacks(config, layer, None, there + part[len(here) :])
    for suffix in one[1].keys() & other[1].keys():
        (part, form), (twin, wanted) = one[1][suffix], other[1][suffix]
        if form.dtype != wanted.dtype or (form.shape != wanted.shape and not {one[0], other[0]} & _DOWN):
            return CheckpointError(
                f"{part} is {form}, but {twin} is {wanted}", file=config.file.parent, layer=layer.layer,
                rule="an expert's matrices are stored alike, unless the quantisation config tells them apart",
            )  # fmt: skip
    return None


def _require_blocks(config: ModelConfig, layer: MoeLayer, matrices: Mapping[str, Parts]) -> None:
    """Check block scales against the block that the config declares."""
    block = None if config.quantisation is None else config.quantisation.weight_block
    for parts in matrices.values():
        if block is None or layer.fused or not {"weight", "weight_scale_inv"} <= parts.keys():
            continue
        (_, weight), (name, scale) = parts["weight"], parts["weight_scale_inv"]
        expected = tuple(-(-size // length) for size, length in zip(weight.shape, block, strict=False))
        if scale.shape != expected:
            raise CheckpointError(
                f"{name} is {scale} for a weight of {list(weight.shape)}", file=config.file.parent, layer=layer.layer,
                rule=f"blocks of {list(block)} (weight_block_size) make it {list(expected)}",
            )  # fmt: skip


def _require_agreement(
    config: ModelConfig, usual: Sequence[_Usual], lacking: dict[tuple[str, str], list[int]]
) -> None:  # fmt: skip
    """Check that layers of one kind agree; those that the quantisation config tells apart are of different kinds."""
    kinds: dict[object, list[_Usual]] = {}
    for one in usual:
        kinds.setdefault((one.layer.fused, one.layer.routes_by_table), []).append(one)
    for alike in kinds.values():
        _compare_layers(config, alike, {one.layer.layer: _forms(one.layer.others) for one in alike}, "the layer")
        if len({_signature({**one.parts, **one.activations}) for one in alike}) == 1:
            continue
        told_apart: dict[object, list[_Usual]] = {}
        for one in alike:
            told_apart.setdefault(_declared_parts(config, one), []).append(one)
        for group in told_apart.values():
            _compare_layers(config, group, {one.layer.layer: one.parts for one in group}, "every expert")
            known = {part for one in group for part in one.activations}
            for one in group:
                absent = sorted(known - one.activations.keys())
                if absent:
                    lacking.setdefault(("all experts", ", ".join(absent)), []).append(one.layer.layer)


def _signature(parts: Mapping[str, _Form]) -> frozenset[tuple[str, _Form]]:
    return frozenset(parts.items())


def _compare_layers(
    config: ModelConfig, group: Sequence[_Usual], parts_of: Mapping[int, Mapping[str, _Form]], who: str
) -> None:  # fmt: skip
    """Check that all layers have the parts that most have."""
    votes = Counter(_signature(parts) for parts in parts_of.values())
    right = max(parts_of, key=lambda layer: (votes[_signature(parts_of[layer])], len(parts_of[layer])))
    for one in group:
        here, wanted = parts_of[one.layer.layer], parts_of[right]
        for part in sorted(here.keys() | wanted.keys()):
            if here.get(part) == wanted.get(part):
                continue
            problem = (
                f"{who} lacks {part}" if part not in here
                else f"{who} has {part}, which layer {right} has not" if part not in wanted
                else f"{part} is {here[part]}, in layer {right} it is {wanted[part]}"
            )  # fmt: skip
            raise CheckpointError(
                problem, file=config.file.parent, layer=one.layer.layer,
                rule="MoE layers are alike, unless the quantisation config tells them apart",
            )  # fmt: skip


def _precision_warnings(config: ModelConfig, usual: Sequence[_Usual]) -> list[str]:
    """Where weights and config tell different things, and either could be right."""
    scaled = next((part for one in usual for part in one.parts if _SCALE.search(part)), None)
    if config.quantisation is None:
        return [] if scaled is None else [
            f"config.json names no quantisation, but experts have scales ({scaled}); engines go by config.json"
        ]  # fmt: skip
    plain = [
        one.layer.layer
        for one in usual
        if not one.layer.fused and all(form.dtype in _PLAIN for form in one.parts.values())
    ]
    if not plain or any(_declared_parts(config, one) for one in usual):
        return []
    method = config.quantisation.method or "quantised weights"
    return [
        f"config.json names {method}, but the experts of {ranges(sorted(plain))} are plain numbers, and no list "
        "says so"
    ]  # fmt: skip


def _declared(config: ModelConfig, layer: MoeLayer, matrix: str) -> frozenset[str]:
    """What the quantisation config says of one matrix of a layer's experts."""
    if config.quantisation is None:
        return frozenset()
    names = [f"{layer.module}.{matrix}"]
    if not layer.fused:
        # By layer, not by expert: engines read all experts of a layer in one precision.
        names = [f"{layer.module}.0.{matrix}", f"{layer.module}.{matrix}.0"]
    return frozenset().union(*(config.quantisation.rules_for(name) for name in names))


def _declared_parts(config: ModelConfig, one: _Usual) -> frozenset[tuple[str, str]]:
    matrices = {_split(part, config.family.projections, config.family.fused)[0] for part in one.parts}
    return frozenset((matrix, rule) for matrix in matrices for rule in _declared(config, one.layer, matrix))


def _forms(entries: Mapping[str, TensorEntry]) -> dict[str, _Form]:
    return {part: _Form(entry.dtype, entry.shape) for part, entry in entries.items()}


def _lacks(config: ModelConfig, layer: MoeLayer, expert: int | None, part: str) -> CheckpointError:
    if layer.fused:
        problem = f"the fused tensor {part} is missing"
    else:
        problem = f"{'every' if expert is None else 'the'} expert lacks {part}"
    return CheckpointError(problem, file=Path(config.file.parent), layer=layer.layer, expert=expert, rule=_SIBLINGS)


@lru_cache(4096)
def _is_activation(part: str) -> bool:
    return _ACTIVATION.search(part) is not None


@lru_cache(4096)
def _split(part: str, projections: tuple[str, ...], fused: tuple[str, ...]) -> tuple[str, str]:
    """(matrix, what is stored of it): ("gate_proj", "weight_scale"), fused ("down_proj", "blocks"); else ("", part)."""
    head, _, tail = part.partition(".")
    if head in projections and tail:
        return head, tail
    stem = next((stem for stem in fused if head == stem or head.startswith(f"{stem}_")), None)
    return ("", part) if stem is None else (stem, _suffix_of(part, stem))


def _suffix_of(part: str, matrix: str) -> str:
    return part[len(matrix) :].lstrip("._") or "weight"
