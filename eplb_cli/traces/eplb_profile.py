"""Profiles of our own: reading them again joins, skips or selects windows of what was recorded before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eplb_cli.loads import METADATA_KEY, ExpertLoads
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.protocol import CountBlock, LayerAxis, Match, ReadOptions, Recording, Space, matches, no_match

__all__ = ["EplbProfileReader"]


class EplbProfileReader:
    """The file that `eplb profile` writes."""

    name = "eplb-profile"
    looks_for = "safetensors whose metadata say eplb-profile"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The metadata say so."""
        if file.container is not Container.safetensors:
            return no_match()
        metadata = file.safetensors_header.metadata
        return matches("an eplb profile", 99) if METADATA_KEY in metadata else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """All windows of each profile."""
        for file in recording.files:
            loads = ExpertLoads.load(file.path)
            recording.top_k = recording.top_k or loads.top_k
            recording.architecture = recording.architecture or loads.model
            for reason, amount in loads.dropped.items():
                recording.drop(reason, amount)
            yield CountBlock(
                loads.counts,
                LayerAxis.absolute(loads.layer_ids.tolist()),
                file.name,
                loads.window_ids,
                loads.tokens if np.any(loads.tokens) else None,
                loads.window_phase,
                Space.logical,
            )
