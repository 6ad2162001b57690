"""ModelConfig: what config.json says of experts, layers and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint.family import MOE_LAYER_RULES, Family, family_of
from eplb_cli.checkpoint.fields import MOST_EXPERTS, MOST_LAYERS, Fields
from eplb_cli.checkpoint.quantisation import Quantisation
from eplb_cli.errors import CheckpointError
from eplb_cli.loads import ModelShape
from eplb_cli.untrusted import read_json, shown

__all__ = ["LAYOUTS", "PLACEMENT_KEY", "ModelConfig", "load_json"]

PLACEMENT_KEY = "eplb_placement"
"""The key of a converted checkpoint's config.json that says what was done to it."""
LAYOUTS = ("stock", "physical")
"""How a converted checkpoint may store its experts."""

_DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8}
_MOST_BYTES = 32 << 20
"""Largest config that is read; one that names every expert of a large model has 3 MB."""


@dataclass(frozen=True)
class ModelConfig:
    """A config.json of a supported family.

    Args:
        file: where it was read from.
        document: its whole content.
        section: the key of the nested object that holds the model's sizes ("text_config"), or None when flat.
        family: the model family.
        shape: sizes and MoE layers, all fields set but top_k perhaps; of a converted checkpoint those of the model.
        count_keys: the keys of the section that hold the expert count, in the physical layout that of the slots.
        num_expert_groups: groups of group-limited routing (`n_group`); 1 when any expert may be chosen.
        quantisation: how the weights are stored, None when nothing is said of it.
    """

    file: Path
    document: Mapping[str, Any]
    section: str | None
    family: Family
    shape: ModelShape
    count_keys: tuple[str, ...]
    num_expert_groups: int
    quantisation: Quantisation | None

    @classmethod
    def load(cls, file: Path) -> ModelConfig:
        """Read a config.json, and what lies beside it about quantisation where it says nothing itself.

        Raises:
            CheckpointError: the file is missing or not a config, or the model is dense or of no known family.
        """
        document = load_json(file)
        try:
            return cls._parse(file, document)
        except CheckpointError as error:
            error.file = error.file or str(file)
            raise

    @classmethod
    def _parse(cls, file: Path, document: Mapping[str, Any]) -> ModelConfig:
        top = Fields(document)
        family = family_of(top)
        text_config = top.section("text_config")
        nested = text_config is not None and any(key in text_config for key in family.num_experts)
        values = text_config if nested and text_config is not None else top
        count_keys = tuple(key for key in family.num_experts if key in values)
        architecture = document["architectures"][0]
        if not count_keys:
            raise CheckpointError(
                f"{architecture} without {' or '.join(f'`{key}`' for key in family.num_experts)}",
                rule="the config must say how many experts a layer has",
            )
        counts = {key: values.integer(key, most=MOST_EXPERTS) for key in count_keys}
        if len(set(counts.values())) != 1:
            raise CheckpointError(
                ", ".join(f"{key} is {count}" for key, count in counts.items()), rule="the expert counts must agree"
            )
        num_experts = counts[count_keys[0]]
        placement = top.section(PLACEMENT_KEY)
        if placement is not None:
            layout = placement.text("layout")
            if layout not in LAYOUTS:
                raise CheckpointError(
                    f"`{PLACEMENT_KEY}` names the layout {shown(layout)}", rule=f"known: {', '.join(LAYOUTS)}"
                )
            if layout == "physical":
                # There the count is that of the slots, to keep engines away; the record has the model's own.
                num_experts = placement.integer("num_logical_experts", most=MOST_EXPERTS)
        num_layers = values.integer("num_hidden_layers", most=MOST_LAYERS)
        ids = MOE_LAYER_RULES[family.moe_layers](values, num_layers)
        kinds = values.texts("mlp_layer_types")
        if kinds is not None:
            listed = [layer for layer, kind in enumerate(kinds[:num_layers]) if kind != "dense"]
            if listed != ids:
                raise CheckpointError(
                    f"mlp_layer_types makes the MoE layers {shown(listed)}, the other keys {shown(ids)}",
                    rule="both must agree",
                )
        if not ids:
            raise CheckpointError(f"{architecture}: no MoE layers in config.json")
        top_k = next((values.integer(key, most=MOST_EXPERTS) for key in family.top_k if key in values), None)
        groups = values.integer_or("n_group", 1, least=0, most=MOST_EXPERTS) or 1
        if num_experts % groups:
            raise CheckpointError(
                f"{num_experts} experts in {groups} groups (n_group)", rule="groups are of equal size"
            )
        return cls(
            file=file,
            document=document,
            section="text_config" if nested else None,
            family=family,
            shape=ModelShape(architecture, num_experts, top_k, num_layers, tuple(ids)),
            count_keys=count_keys,
            num_expert_groups=groups,
            quantisation=Quantisation.find(file, [top, values]),
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The object that holds the model's sizes: the document itself or its nested section."""
        return self.document if self.section is None else self.document[self.section]

    @property
    def placement(self) -> Mapping[str, Any] | None:
        """What it says of an earlier conversion; None for a model as it was published."""
        return self.document.get(PLACEMENT_KEY)

    def estimated_expert_bytes(self) -> int:
        """Bytes of one expert by the config alone: three matrices of hidden size x expert width.

        Assumes the weight width that the quantisation names, or `dtype`, bfloat16 when unsaid; scales and biases are
        left out.

        Raises:
            CheckpointError: a size is missing.
        """
        values, top = Fields(self.values), Fields(self.document)
        try:
            elements = 3 * values.integer("hidden_size") * values.integer(self.family.expert_width)
            if self.quantisation is None:
                dtype = next((text for holder in (values, top) if (text := dtype_of(holder))), "bfloat16")
                bits = _DTYPE_BITS.get(dtype, 16)
            elif self.quantisation.method == "fp8" and "4" in (values.text("expert_dtype") or ""):
                bits = 4  # DeepSeek-V4 names fp8 for the model and a narrower type for its experts
            else:
                bits = self.quantisation.weight_bits()
        except CheckpointError as error:
            error.file = str(self.file)
            raise
        return elements * bits // 8


def dtype_of(config: Fields) -> str | None:
    """The number type that a config names, under the new key or the old one."""
    return config.text("dtype") or config.text("torch_dtype")


def load_json(file: Path, *, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object. NaN and infinities are let through: some published configs hold them.

    Raises:
        CheckpointError: the file is missing, unreadable, or not an object.
    """
    document = read_json(file, CheckpointError, most_bytes=most_bytes, finite=False)
    if not isinstance(document, dict):
        raise CheckpointError("is not a JSON object", file=file)
    return document
