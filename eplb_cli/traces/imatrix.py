"""llama.cpp's importance matrix in GGUF: `blk.N.ffn_{gate,up,down}_exps.weight.counts`, tokens routed to each expert.

The three projections see the same tokens; one of them is counted. The old `.dat` format has one count for all experts
and cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.protocol import (
    CountBlock,
    LayerAxis,
    Match,
    ReadOptions,
    Recording,
    Space,
    matches,
    near_miss,
    no_match,
)
from eplb_cli.untrusted import shown

__all__ = ["ImatrixReader"]

TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight\.counts$")
EXACT_BELOW = 2**24
"""Counts are float32: whole numbers are exact up to here."""


class ImatrixReader:
    """The file that `llama-imatrix -o imatrix.gguf` writes."""

    name = "llama-imatrix"
    looks_for = "GGUF tensors blk.N.ffn_*_exps.weight.counts"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """GGUF with expert counts."""
        if file.container is Container.unknown and b"blk." in file.head[:64]:
            return near_miss("the old .dat format has one count for all experts; write imatrix.gguf instead", 40)
        if file.container is not Container.gguf:
            return no_match()
        if _counts(file):
            return matches("holds expert counts", 95)
        return near_miss("a GGUF without ffn_*_exps.weight.counts: a model, or the imatrix of a dense one", 40)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a file."""
        for file in recording.files:
            layers = _counts(file)
            if not layers:
                raise TraceError("holds no expert counts", file=file.name, rule=ImatrixReader.looks_for)
            rows = []
            for layer in sorted(layers):
                parts = layers[layer]
                name = min(parts)
                for other, counts in parts.items():
                    if not np.array_equal(counts, parts[name]):
                        recording.warnings.append(
                            f"{file.label}: layer {layer}: ffn_{other} and ffn_{name} differ; ffn_{name} was counted"
                        )
                rows.append(parts[name])
            if len({len(row) for row in rows}) > 1:
                raise TraceError("layers have different numbers of experts", file=file.name)
            counts = np.stack(rows)
            if counts.max(initial=0) >= EXACT_BELOW:
                recording.warnings.append(f"{file.label}: counts above {EXACT_BELOW} are rounded, they are float32")
            yield CountBlock(counts[None], LayerAxis.absolute(sorted(layers)), file.name, space=Space.logical)


def _counts(file: TraceFile) -> dict[int, dict[str, npt.NDArray[Any]]]:
    """Layer -> projection -> counts."""
    from gguf import GGUFReader

    class Bounded(GGUFReader):  # type: ignore[misc, unused-ignore]
        """The library's reader gives short arrays where the file ends, and goes on for as many items as are claimed."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends before what it claims to hold")
            return super()._get(offset, dtype, count, override_order)

    file.open().close()  # a pipe would be waited for
    try:
        tensors = Bounded(str(file.path)).tensors
    except Exception as error:  # the library raises whatever a damaged header leads it into
        raise TraceError(f"cannot be read as GGUF ({shown(str(error))})", file=file.name) from None
    layers: dict[int, dict[str, npt.NDArray[Any]]] = {}
    for tensor in tensors:
        match = TENSOR.match(tensor.name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = np.array(tensor.data).reshape(-1)
    return layers
