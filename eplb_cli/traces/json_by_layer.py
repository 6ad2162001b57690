"""JSON shapes of smaller tools that key counts by layer.

- saliency: `{"n_expert": E, "tokens": T, "layers": {"3": {"cnt": [E numbers], ..}}}` (GLM and llama.cpp pruning tools)
- heat map: `{"0": {"1": 7641, "3": 17636}}`, experts that were never hit absent, so E must be given
- plumb-moe: `{"layers": [{"layer_id", "experts": [{"expert_id", "token_count"}]}]}`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from eplb_cli.errors import TraceError
from eplb_cli.traces.counts import json_matrix
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.numbers import number_of_key, whole_number
from eplb_cli.traces.protocol import (
    MOST_EXPERTS,
    CountBlock,
    LayerAxis,
    Match,
    ReadOptions,
    Recording,
    Space,
    matches,
    no_match,
)
from eplb_cli.traces.sparse import dense_counts
from eplb_cli.untrusted import shown

__all__ = ["HeatMapReader", "PlumbMoeReader", "SaliencyReader"]


class SaliencyReader:
    """`cnt` of each layer, with the tokens."""

    name = "saliency-json"
    looks_for = 'a JSON object with "layers": {"3": {"cnt": [..]}}'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Layers by number, each with `cnt`."""
        layers = _section(file, "layers")
        fits = (
            isinstance(layers, dict)
            and bool(layers)
            and all(key.isdigit() and isinstance(value, dict) and "cnt" in value for key, value in layers.items())
        )
        return matches("layers with cnt", 95) if fits else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a file."""
        for file in recording.files:
            document = file.document
            layers = {
                number_of_key(key, "a layer", file.name): value["cnt"] for key, value in document["layers"].items()
            }
            counts = json_matrix([layers[layer] for layer in sorted(layers)], file.name)
            told = document.get("n_expert")
            if told is not None and told != counts.shape[1]:
                raise TraceError(f"n_expert is {told}", file=file.name, rule=f"cnt has {counts.shape[1]} numbers")
            tokens = document.get("tokens")
            yield CountBlock(
                counts[None],
                LayerAxis.absolute(sorted(layers)),
                file.name,
                tokens=np.array([tokens]) if type(tokens) is int else None,
                space=Space.logical,
            )


class HeatMapReader:
    """Counts by layer and expert, zeros absent."""

    name = "heat-map"
    looks_for = 'a JSON object {"layer": {"expert": count}}'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Numbers as keys, two deep, and numbers as values."""
        document = file.document if file.container is Container.json else None
        fits = (
            isinstance(document, dict)
            and bool(document)
            and all(
                key.isdigit()
                and isinstance(value, dict)
                and all(expert.isdigit() and isinstance(count, int | float) for expert, count in value.items())
                for key, value in document.items()
            )
        )
        return matches("counts by layer and expert", 90) if fits else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a file."""
        for file in recording.files:
            entries = []
            for layer_key, row in file.document.items():
                layer = number_of_key(layer_key, "a layer", file.name)
                for expert_key, count in row.items():
                    expert = number_of_key(expert_key, "an expert", file.name)
                    entries.append((layer, expert, _whole(count, file, layer, expert)))
            counts, axis = dense_counts(entries, recording.options.need_num_experts(file.name), file.name)
            yield CountBlock(counts, axis, file.name, space=Space.logical)


class PlumbMoeReader:
    """plumb-moe's report."""

    name = "plumb-moe"
    looks_for = 'a JSON object with "layers": [{"layer_id", "experts": [{"expert_id", "token_count"}]}]'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """A list of layers with experts and token counts."""
        layers = _section(file, "layers")
        fits = (
            isinstance(layers, list)
            and bool(layers)
            and all(
                isinstance(layer, dict)
                and "layer_id" in layer
                and isinstance(layer.get("experts"), list)
                and all(isinstance(e, dict) and {"expert_id", "token_count"} <= e.keys() for e in layer["experts"])
                for layer in layers
            )
        )
        return matches("layers with experts and token counts", 95) if fits else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a file."""
        for file in recording.files:
            entries = [
                (_id(layer, "layer_id", file), _id(expert, "expert_id", file), _count(layer, expert, file))
                for layer in file.document["layers"]
                for expert in layer["experts"]
            ]
            experts = recording.options.num_experts or _complete(entries)
            experts = experts or recording.options.need_num_experts(file.name)
            counts, axis = dense_counts(entries, experts, file.name)
            yield CountBlock(counts, axis, file.name, space=Space.logical)


def _complete(entries: list[tuple[int, int, int]]) -> int | None:
    """E when every layer lists the same experts from 0 on; None when some may have been left out."""
    listed: dict[int, set[int]] = {}
    for layer, expert, _ in entries:
        listed.setdefault(layer, set()).add(expert)
    first = next(iter(listed.values()), set())
    complete = first == set(range(len(first))) and all(experts == first for experts in listed.values())
    return len(first) if complete and first else None


def _id(entry: dict[str, Any], key: str, file: TraceFile) -> int:
    return whole_number(entry[key], key, file.name, most=MOST_EXPERTS)


def _count(layer: dict[str, Any], expert: dict[str, Any], file: TraceFile) -> int:
    return _whole(expert["token_count"], file, int(layer["layer_id"]), int(expert["expert_id"]))


def _section(file: TraceFile, key: str) -> Any:
    document = file.document if file.container is Container.json else None
    return document.get(key) if isinstance(document, dict) else None


def _whole(count: Any, file: TraceFile, layer: int, expert: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int | float) or not (0 <= count < 2**62 and count % 1 == 0):
        raise TraceError(
            f"load is {shown(count)}",
            file=file.name,
            layer=layer,
            expert=expert,
            rule="loads must be whole numbers, finite and >= 0",
        )
    return int(count)
