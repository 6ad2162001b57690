"""Model: MODEL opened once, and everything that others want to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint.classify import Kind, role_of
from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.checkpoint.hub import locate_config
from eplb_cli.checkpoint.kv_cache import KvCache, kv_cache_per_token
from eplb_cli.checkpoint.source import Checkpoint
from eplb_cli.errors import CheckpointError
from eplb_cli.loads import ModelShape

__all__ = ["ExpertBytes", "Model"]


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes of one expert in each MoE layer, the most where experts differ.

    Args:
        by_layer: by layer id.
        note: why they are estimated from config.json; None when they are exact, from the tensors' headers.
    """

    by_layer: Mapping[int, int]
    note: str | None = None


@dataclass(frozen=True)
class Model:
    """A model as its config.json tells it, and its weights where they are there.

    Args:
        name: MODEL as it was given.
        config: its config.json.
        folder: where it lies; None when only a config.json was given.
    """

    name: str
    config: ModelConfig
    folder: Path | None

    @classmethod
    def open(cls, model: str | Path) -> Model:
        """Read the config.json of MODEL: a folder, a config.json, or a repository id, of which this one file is
        downloaded when it is not in the local cache. Weights are not touched.

        Raises:
            CheckpointError: there is no such model, it is dense, or of no supported family.
        """
        file = locate_config(model)
        return cls(str(model), ModelConfig.load(file), None if Path(model).is_file() else file.parent)

    @property
    def shape(self) -> ModelShape:
        """Sizes and MoE layers."""
        return self.config.shape

    @property
    def num_expert_groups(self) -> int:
        """Groups of group-limited routing; 1 when any expert may be chosen."""
        return self.config.num_expert_groups

    @property
    def count_keys(self) -> tuple[str, ...]:
        """The config's keys that hold the expert count, in the physical layout that of the slots."""
        return self.config.count_keys

    @property
    def quantisation_method(self) -> str | None:
        """vLLM's name of the quantisation method; None for plain weights, or when the config does not say."""
        return None if self.config.quantisation is None else self.config.quantisation.method

    @property
    def placement(self) -> Mapping[str, Any] | None:
        """The record `eplb_placement` of a converted checkpoint, whose `layout` is a known one; None for others."""
        return self.config.placement

    def kv_cache(self, tensor_parallel_size: int = 1) -> KvCache | None:
        """What a token of context costs a rank; None when the config does not tell.

        Raises:
            CheckpointError: a size has a wrong type, or one that no model has.
        """
        try:
            return kv_cache_per_token(self.config.document, tensor_parallel_size)
        except CheckpointError as error:
            error.file = str(self.config.file)
            raise

    @cached_property
    def expert_bytes(self) -> ExpertBytes:
        """Exact from the tensors' headers where the weights are there and whole, else estimated from config.json.

        Raises:
            CheckpointError: the weights do not tell, and a size is missing in config.json.
        """
        if self.folder is None:
            note = "config.json was given alone"
        elif not any(self.folder.glob("*.safetensors")):
            note = f"no weights lie in {self.folder}"
        else:
            try:
                return ExpertBytes(_bytes_by_headers(Checkpoint.open(self.folder)))
            except CheckpointError as error:
                note = str(error)
        layers = self.shape.moe_layer_ids or ()
        return ExpertBytes(
            dict.fromkeys(layers, self.config.estimated_expert_bytes()),
            f"bytes of an expert are estimated from config.json: {note}",
        )


def _bytes_by_headers(checkpoint: Checkpoint) -> dict[int, int]:
    sums: dict[int, dict[int, int]] = {layer: {} for layer in checkpoint.config.shape.moe_layer_ids or ()}
    for entry in checkpoint.tensors.values():
        role = role_of(checkpoint.config, entry)
        if role.kind is Kind.EXPERT:
            sums[role.layer][role.expert] = sums[role.layer].get(role.expert, 0) + entry.nbytes
        elif role.kind is Kind.FUSED:
            sums[role.layer][0] = sums[role.layer].get(0, 0) + entry.nbytes // max(1, entry.shape[0])
    for layer, by_expert in sums.items():
        if not by_expert:
            raise CheckpointError("the files hold no experts of the layer", file=checkpoint.folder, layer=layer)
    return {layer: max(by_expert.values()) for layer, by_expert in sums.items()}
