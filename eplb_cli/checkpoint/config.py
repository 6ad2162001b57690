"""ModelConfig: what config.json says of experts and layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint.family import MOE_LAYER_RULES, Family, family_of
from eplb_cli.errors import CheckpointError
from eplb_cli.loads import ModelShape

__all__ = ["PLACEMENT_KEY", "ModelConfig", "load_json"]

PLACEMENT_KEY = "eplb_placement"
"""The key of a converted checkpoint's config.json that says what was done to it."""

_DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8}
_QUANTISED_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}


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
    """

    file: Path
    document: Mapping[str, Any]
    section: str | None
    family: Family
    shape: ModelShape
    count_keys: tuple[str, ...]
    num_expert_groups: int

    @classmethod
    def load(cls, file: Path) -> ModelConfig:
        """Read a config.json.

        Raises:
            CheckpointError: the file is missing or not a config, or the model is dense or of no known family.
        """
        document = load_json(file)
        try:
            return cls._parse(file, document)
        except CheckpointError as error:
            error.file = str(file)
            raise

    @classmethod
    def _parse(cls, file: Path, document: Mapping[str, Any]) -> ModelConfig:
        family = family_of(document)
        text_config = document.get("text_config")
        nested = isinstance(text_config, dict) and any(key in text_config for key in family.num_experts)
        values: Mapping[str, Any] = text_config if nested and isinstance(text_config, dict) else document
        count_keys = tuple(key for key in family.num_experts if values.get(key) is not None)
        architecture = document["architectures"][0]
        if not count_keys:
            raise CheckpointError(
                f"{architecture} without {' or '.join(f'`{key}`' for key in family.num_experts)}",
                rule="the config must say how many experts a layer has",
            )
        counts = {values[key] for key in count_keys}
        if len(counts) != 1:
            raise CheckpointError(
                ", ".join(f"{key} is {values[key]}" for key in count_keys), rule="the expert counts must agree"
            )
        num_experts = _positive(values, count_keys[0])
        placement = document.get(PLACEMENT_KEY)
        if isinstance(placement, dict) and placement.get("layout") == "physical":
            # There the count is that of the slots, to keep engines away; the record has the model's own.
            num_experts = _positive(placement, "num_logical_experts")
        num_layers = _positive(values, "num_hidden_layers")
        ids = MOE_LAYER_RULES[family.moe_layers](values, num_layers)
        layer_types = values.get("mlp_layer_types")
        if isinstance(layer_types, list):
            listed = [layer for layer, kind in enumerate(layer_types[:num_layers]) if kind != "dense"]
            if listed != ids:
                raise CheckpointError(
                    f"mlp_layer_types makes the MoE layers {listed}, the other keys {ids}", rule="both must agree"
                )
        if not ids:
            raise CheckpointError(f"{architecture}: no MoE layers in config.json")
        top_k = next((values[key] for key in family.top_k if type(values.get(key)) is int), None)
        groups = _positive(values, "n_group") if values.get("n_group") else 1
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
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The object that holds the model's sizes: the document itself or its nested section."""
        return self.document if self.section is None else self.document[self.section]

    def estimated_expert_bytes(self) -> int:
        """Bytes of one expert by the config alone: three matrices of hidden size x expert width.

        Assumes the weight width that the quantisation method names (8 bits for fp8, 4 for packed formats unless the
        config says otherwise), or `dtype`, bfloat16 when unsaid; scales and biases are left out.

        Raises:
            CheckpointError: a size is missing.
        """
        try:
            elements = 3 * _positive(self.values, "hidden_size") * _positive(self.values, self.family.expert_width)
        except CheckpointError as error:
            error.file = str(self.file)
            raise
        return elements * self._weight_bits() // 8

    def _weight_bits(self) -> int:
        quantisation = self.document.get("quantization_config") or self.values.get("quantization_config")
        if isinstance(quantisation, dict):
            method = str(quantisation.get("quant_method"))
            if method in _QUANTISED_BITS:
                # DeepSeek-V4 names fp8 for the model and a narrower type for its experts.
                return 4 if "4" in str(self.values.get("expert_dtype", "")) else _QUANTISED_BITS[method]
            if type(quantisation.get("bits")) is int:
                return int(quantisation["bits"])
            groups = quantisation.get("config_groups")
            weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
            bits = [w["num_bits"] for w in weights if isinstance(w, dict) and type(w.get("num_bits")) is int]
            if bits:
                return int(min(bits))
            return 8 if "8" in str(quantisation.get("quant_algo")) else 4
        for holder in (self.values, self.document):
            for key in ("dtype", "torch_dtype"):
                if holder.get(key) in _DTYPE_BITS:
                    return _DTYPE_BITS[holder[key]]
        return 16


def load_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, or not an object.
    """
    try:
        # The index of a large model has tens of megabytes; decoded first, it is held once, not twice.
        document = json.loads(file.read_bytes().decode())
    except FileNotFoundError:
        raise CheckpointError("no such file", file=file) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"is not JSON: {error}", file=file) from None
    if not isinstance(document, dict):
        raise CheckpointError("is not a JSON object", file=file)
    return document


def _positive(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"`{key}` is {value!r}" if key in values else f"`{key}` is missing", rule="must be >= 1")
    return value
