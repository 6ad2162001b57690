"""TensorRT-LLM's expert statistic: `rank{r}.safetensors` beside `meta_info.json`.

Keys are "{iteration}_{layer}" with the decoder layer's number, values int64 [num_experts]: the picks of that rank's
own tokens, so ranks add up. The recorder counts slots: with a load balancer on, `num_experts` in the meta file is the
number of slots, and the map of that run is needed. `rank{r}_raw.safetensors` holds raw ids and is left out;
`rank{r}_numtokens.json` holds tokens by the same keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.numbers import whole_number
from eplb_cli.traces.protocol import (
    MOST_EXPERTS,
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
from eplb_cli.traces.ranks import check_ranks, name_gaps

__all__ = ["TensorrtLlmReader"]

KEY = re.compile(r"(0|[1-9][0-9]{0,17})_(0|[1-9][0-9]{0,8})")
RANK = re.compile(r"rank(\d+)\.safetensors$")
RANK_TOKENS = re.compile(r"rank(\d+)_numtokens\.json$")
META_KEYS = {"num_experts", "num_experts_per_token"}


class TensorrtLlmReader:
    """The folder that EXPERT_STATISTIC_PATH named."""

    name = "tensorrt-llm"
    looks_for = "meta_info.json beside rank*.safetensors whose tensors are called {iteration}_{layer}"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Tensor names are iteration and layer; the meta file names experts and top-k."""
        if file.container is Container.json and isinstance(file.document, dict):
            if file.document.keys() >= META_KEYS:
                return matches("names num_experts and num_experts_per_token", 95, companion=True)
            if (
                file.document
                and all(KEY.fullmatch(key) for key in file.document)
                and RANK_TOKENS.search(file.path.name)
            ):
                return matches("holds tokens by {iteration}_{layer}", 95, companion=True)
            return no_match()
        if file.container is not Container.safetensors:
            return no_match()
        tensors = file.safetensors_header.tensors
        if not tensors or not all(KEY.fullmatch(name) for name in tensors):
            return near_miss("its tensors are not called {iteration}_{layer}", 5)
        if file.path.name.endswith("_raw.safetensors") or any(len(entry.shape) == 2 for entry in tensors.values()):
            return matches("raw ids", 95, skip="it holds the raw ids of what rank*.safetensors counts")
        return matches("its tensors are called {iteration}_{layer}", 95)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window an iteration, summed over ranks."""
        meta = _meta(recording)
        columns, recording.top_k, ep_size = (
            whole_number(meta.get(key, 0), f"{key} of meta_info.json", str(recording.folder), most=MOST_EXPERTS)
            for key in ("num_experts", "num_experts_per_token", "ep_size")
        )
        ranks = _by_rank(recording)
        check_ranks(ranks, recording, expected=ep_size or None)
        keys: set[tuple[int, int]] | None = None
        totals: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        for file in ranks.values():
            own = _read(file, columns)
            if keys is not None and own.keys() != keys:
                odd = sorted(own.keys() ^ keys)[0]
                raise TraceError(
                    f"iteration {odd[0]}, layer {odd[1]} is not in every rank's file",
                    file=file.name,
                    rule="all ranks record the same iterations and layers",
                )
            keys = set(own)
            for key, counts in own.items():
                totals[key] = totals[key] + counts if key in totals else counts
        iterations = sorted({iteration for iteration, _ in totals})
        layers = sorted({layer for _, layer in totals})
        name_gaps(iterations, recording, "iteration")
        for key in ((i, layer) for i in iterations for layer in layers):
            if key not in totals:
                raise TraceError(
                    f"iteration {key[0]} lacks the layer", file=recording.folder, layer=key[1], rule="each holds all"
                )
        tokens = _tokens(recording, ranks)
        space = Space.physical
        if recording.options.num_experts is None and recording.options.physical_to_logical is None:
            space = Space.logical
            recording.warnings.append(
                f"meta_info.json names {columns} experts, which are slots if a load balancer was on; --model or "
                "--num-experts checks it"
            )
        for iteration in iterations:
            counts = np.stack([totals.pop((iteration, layer)) for layer in layers])
            known = tokens.get(iteration)
            yield CountBlock(
                counts[None],
                LayerAxis.absolute(layers),
                str(recording.folder),
                np.array([iteration]),
                None if known is None else np.array([known]),
                space=space,
            )


def _meta(recording: Recording) -> Mapping[str, Any]:
    for file in recording.companions:
        if file.document.keys() >= META_KEYS:
            return file.document  # type: ignore[no-any-return]
    path = recording.folder / "meta_info.json"
    document = TraceFile(path).document if path.is_file() else None
    if not isinstance(document, dict) or not document.keys() >= META_KEYS:
        raise TraceError(
            "meta_info.json is missing", file=recording.folder, hint="Give the whole folder that the recorder wrote."
        )
    return document


def _by_rank(recording: Recording) -> dict[int, TraceFile]:
    ranks = {}
    for file in recording.files:
        match = RANK.search(file.path.name)
        if match is None:
            raise TraceError("the name does not tell the rank", file=file.name, rule="rank{r}.safetensors is expected")
        ranks[int(match[1])] = file
    return dict(sorted(ranks.items()))


def _read(file: TraceFile, columns: int) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
    found = {}
    for name, entry in file.safetensors_header.tensors.items():
        match = KEY.fullmatch(name)
        if match is None or entry.shape != (columns,) or entry.numpy_dtype.kind not in "iu":
            raise TraceError(
                f"{entry.dtype} {list(entry.shape)}",
                file=file.name,
                tensor=name,
                rule=f"integers [num_experts = {columns}] of meta_info.json are expected",
            )
        found[int(match[1]), int(match[2])] = file.safetensors_array(name).astype(np.int64)
    return found


def _tokens(recording: Recording, ranks: Mapping[int, TraceFile]) -> dict[int, int]:
    """Tokens of each iteration over the ranks that count; empty unless each of them tells."""
    files = {}
    for file in recording.companions:
        match = RANK_TOKENS.search(file.path.name)
        if match:
            files[int(match[1])] = file
    if not files.keys() >= ranks.keys():
        return {}
    tokens: dict[int, int] = {}
    for file in (files[rank] for rank in ranks):
        own: dict[int, int] = {}
        for key, count in file.document.items():
            iteration = int(key.split("_")[0])
            own[iteration] = max(own.get(iteration, 0), whole_number(count, f"{key}", file.name))
        for iteration, count in own.items():
            tokens[iteration] = tokens.get(iteration, 0) + count
    return tokens
