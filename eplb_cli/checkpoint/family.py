"""Model families as data: what config.json and the tensor names of each look like.

A family is one TOML file of `eplb_cli.models`. Names are dotted and always matched by whole components, so that `w1`
never matches `w10`, nor `experts.1` a tensor of `experts.12`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from eplb_cli.checkpoint.fields import Fields
from eplb_cli.errors import CheckpointError
from eplb_cli.untrusted import shown

__all__ = ["MOE_LAYER_RULES", "Family", "families", "family_of"]

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: the TOML file's name without its suffix.
        architectures: names in config.json's `architectures`.
        num_experts: config keys of the expert count; those present must agree.
        top_k: config keys of the experts chosen per token; the first one present counts.
        moe_layers: which of MOE_LAYER_RULES tells the MoE layers from the config.
        expert_width: config key of an expert's intermediate size.
        layers: modules that hold the decoder layers (`model.layers`); the layer's number follows.
        blocks: modules of a MoE layer in which every tensor must be covered by a rule below.
        experts: modules that hold the routed experts, as `<id>.<rest>`, `<projection>.<id>.<rest>` or fused tensors.
        projections: names of an expert's matrices.
        fused: stems of the fused tensors; axis 0 is the expert.
        router: tensors whose axis 0 is the logical expert; a MoE layer has exactly one of them.
        by_expert: other tensors whose axis 0 is the logical expert.
        expert_ids: tensors whose values are logical expert ids.
        copied: tensors or modules inside the blocks that do not depend on the expert.
        drafts: modules of draft heads; they may have experts of their own, which a plan does not cover.
    """

    name: str
    architectures: tuple[str, ...]
    num_experts: tuple[str, ...]
    top_k: tuple[str, ...]
    moe_layers: str
    expert_width: str
    layers: tuple[str, ...]
    blocks: tuple[str, ...]
    experts: tuple[str, ...]
    projections: tuple[str, ...]
    fused: tuple[str, ...]
    router: tuple[str, ...]
    by_expert: tuple[str, ...] = ()
    expert_ids: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()


@cache
def families() -> Mapping[str, Family]:
    """All families by name, in alphabetical order."""
    files = (entry for entry in resources.files("eplb_cli.models").iterdir() if entry.name.endswith(".toml"))
    found = {}
    for entry in sorted(files, key=lambda entry: entry.name):
        document = tomllib.loads(entry.read_text(encoding="utf-8"))
        name = entry.name.removesuffix(".toml")
        values = {**document.pop("config"), **document.pop("tensors"), **document}
        unknown = values.keys() - {field.name for field in fields(Family)}
        if unknown:
            raise CheckpointError(f"unknown keys {sorted(unknown)}", file=entry.name, rule="a family's keys are fixed")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        found[name] = Family(name=name, **arguments)
    return found


def family_of(config: Fields) -> Family:
    """The family of a config.json's content.

    Raises:
        CheckpointError: the architecture is missing, dense, or of no known family.
    """
    architectures = config.texts("architectures")
    if not architectures:
        raise CheckpointError(
            f"has no `architectures` (model_type is {shown(config.values.get('model_type'))})",
            rule="the model family is found by the name in `architectures`",
        )
    architecture = architectures[0]
    for family in families().values():
        if architecture in family.architectures:
            return family
    sections = [config, config.section("text_config") or config]
    if any(key in section for section in sections for key in _EXPERT_COUNT_KEYS) or re.search(
        "moe|mixtral", architecture, re.IGNORECASE
    ):
        raise CheckpointError(f"{architecture}: not a supported family ({', '.join(families())})")
    raise CheckpointError(f"{architecture}: no MoE layers in config.json")


def _sparse_step(config: Fields, layers: int) -> list[int]:
    """Layer l is MoE when (l + 1) % decoder_sparse_step == 0 and mlp_only_layers does not list it."""
    step = _step(config, "decoder_sparse_step")
    dense = set(config.integers("mlp_only_layers") or ())
    return [layer for layer in range(layers) if step > 0 and (layer + 1) % step == 0 and layer not in dense]


def _interleave(config: Fields, layers: int) -> list[int]:
    """Layer l is MoE when (l + 1) % interleave_moe_layer_step == 0; a list `moe_layers` must say the same."""
    step = _step(config, "interleave_moe_layer_step")
    ids = [layer for layer in range(layers) if step > 0 and (layer + 1) % step == 0]
    listed = config.integers("moe_layers")
    if listed is not None and sorted(listed) != ids:
        raise CheckpointError(
            f"moe_layers is {shown(listed)}, but interleave_moe_layer_step {step} makes it {shown(ids)}",
            rule="engines follow one or the other, so both must agree",
        )
    return ids


def _first_k_dense(config: Fields, layers: int) -> list[int]:
    """Layer l is MoE when l >= first_k_dense_replace and l % moe_layer_freq == 0, or where the list form says 1."""
    first = config.integer_or("first_k_dense_replace", 0, least=0)
    if config.is_list("moe_layer_freq"):
        frequency = config.integers("moe_layer_freq", most=1) or []
        if len(frequency) < layers:
            raise CheckpointError(
                f"moe_layer_freq lists {len(frequency)} layers", rule=f"it must list 0 or 1 for {layers} layers"
            )
        return [layer for layer in range(first, layers) if frequency[layer]]
    step = _step(config, "moe_layer_freq")
    return [layer for layer in range(first, layers) if step > 0 and layer % step == 0]


def _enabled(config: Fields, layers: int) -> list[int]:
    """Every layer is MoE when enable_moe_block is true."""
    return list(range(layers)) if config.flag("enable_moe_block") else []


def _every(config: Fields, layers: int) -> list[int]:
    return list(range(layers))


MOE_LAYER_RULES = {
    "sparse_step": _sparse_step,
    "interleave": _interleave,
    "first_k_dense": _first_k_dense,
    "enabled": _enabled,
    "every": _every,
}
"""Name in a family's file -> (config, number of decoder layers) -> MoE layers; vLLM's own rules."""


def _step(config: Fields, key: str) -> int:
    """Every how many layers; 1 where it is not said, 0 for never."""
    return config.integer_or(key, 1, least=0)
