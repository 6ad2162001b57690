"""MindIE's hot-spot gathering: one CSV a rank without a header, `{stage}_{rank}.csv`, beside `model_gen_config.json`.

Every few forward passes a block of rows is appended, a row a MoE layer, a column a slot of that rank. Columns of all
ranks side by side are the physical slots. `{stage}_{rank}_bak.csv` repeats the file and `{stage}_topk_{rank}.csv` is
something else; both are left out. The config's `eplb_expert_map_file` is the map that was in force.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.loads import PHASES
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
from eplb_cli.traces.ranks import check_ranks
from eplb_cli.traces.tables import csv_header, number_matrix
from eplb_cli.untrusted import shown

__all__ = ["MindieReader"]

NAME = re.compile(r"(prefill|decode)_(\d+)\.csv$")
LEFT_OUT = {
    re.compile(r"(prefill|decode)_\d+_bak\.csv$"): "it repeats the file without _bak",
    re.compile(r"(prefill|decode)_topk_\d+\.csv$"): "it holds top-k picks, not the counts",
}
CONFIG = "model_gen_config.json"
CONFIG_KEYS = {"num_moe_layers", "num_of_experts"}


class MindieReader:
    """The folder that MINDIE_EXPERT_HOTPOT_DUMP_PATH named."""

    name = "mindie"
    looks_for = "CSVs of numbers called {prefill|decode}_{rank}.csv beside model_gen_config.json"
    replicas_possible = False

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Numbers without a header under a rank's name; the config's keys."""
        if file.container is Container.json:
            document = file.document
            if isinstance(document, dict) and document.keys() >= CONFIG_KEYS:
                return matches("names num_moe_layers and num_of_experts", 95, companion=True)
            return no_match()
        cells = csv_header(file)
        if not cells or not all(cell.isdigit() for cell in cells if cell):
            return no_match()
        for pattern, reason in LEFT_OUT.items():
            if pattern.search(file.path.name):
                return matches("a companion", 90, skip=reason)
        if NAME.search(file.path.name):
            return matches("numbers of one rank", 90)
        return near_miss("numbers without a header, but the name is not {prefill|decode}_{rank}.csv", 20)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a block of rows; the stages of a folder one after the other."""
        config, where = _config(recording)
        layers = whole_number(config["num_moe_layers"], "num_moe_layers", where, most=MOST_EXPERTS)
        if config.get("num_dangling_shared_experts"):
            raise TraceError(
                "num_dangling_shared_experts is not 0",
                file=where,
                rule="ranks that hold shared experts only cannot be told from the others",
                hint="Remove those ranks' files, renumber the others from 0, and set it to 0.",
            )
        picked = config.get("num_of_selected_experts")
        if picked:
            picked = picked[0] if isinstance(picked, list) else picked
            recording.top_k = whole_number(picked, "num_of_selected_experts", where, most=MOST_EXPERTS)
        table = _map(config, where)
        experts = recording.options.num_experts or whole_number(config["num_of_experts"], "num_of_experts", where)
        for stage in ("prefill", "decode"):
            ranks = {}
            for file in recording.files:
                match = NAME.search(file.path.name)
                if match is None:
                    raise TraceError("the name does not tell stage and rank", file=file.name)
                if match[1] == stage:
                    ranks[int(match[2])] = file
            if ranks:
                yield _stage(ranks, layers, table, experts, PHASES.index(stage), recording)


def _stage(
    ranks: dict[int, TraceFile],
    layers: int,
    table: npt.NDArray[Any] | None,
    experts: int,
    phase: int,
    recording: Recording,
) -> CountBlock:
    check_ranks(ranks, recording)
    matrices = {rank: number_matrix(file, ",") for rank, file in sorted(ranks.items())}
    lengths = {rank: len(matrix) for rank, matrix in matrices.items()}
    if len(set(lengths.values())) > 1:
        raise TraceError(f"ranks have different numbers of rows: {lengths}", file=recording.folder)
    rows = lengths[min(lengths)]
    if not layers:
        raise TraceError("num_moe_layers is 0", file=recording.folder, rule="a recording has MoE layers")
    if rows % layers and rows % (layers + 1) == 0:
        layers += 1  # a draft (MTP) layer follows the MoE layers
    if rows % layers:
        raise TraceError(
            f"{rows} rows are no whole number of blocks", file=recording.folder, rule=f"num_moe_layers is {layers}"
        )
    counts = np.concatenate(list(matrices.values()), axis=1).reshape(rows // layers, layers, -1)
    if table is not None and table.shape != counts.shape[1:]:
        raise TraceError(
            f"{list(counts.shape[1:])} layers and slots",
            file=recording.folder,
            rule=f"the map in force has {list(table.shape)}",
        )
    # Without a map file MindIE places expert e in slot e, and has no other slots.
    default = table is None and counts.shape[2] == experts and recording.options.physical_to_logical is None
    return CountBlock(
        counts,
        LayerAxis(layers, ordinal=True),
        str(recording.folder),
        phase=phase,
        space=Space.logical if default else Space.physical,
        physical_to_logical=table,
    )


def _config(recording: Recording) -> tuple[Mapping[str, Any], str]:
    for file in recording.companions:
        return file.document, file.name
    for folder in (recording.folder, recording.folder.parent):
        if (folder / CONFIG).is_file():
            file = TraceFile(folder / CONFIG)
            if isinstance(file.document, dict) and file.document.keys() >= CONFIG_KEYS:
                return file.document, file.name
    raise TraceError(
        f"{CONFIG} is missing", file=recording.folder, hint="It tells the number of MoE layers; give the whole folder."
    )


def _map(config: Mapping[str, Any], where: str) -> npt.NDArray[np.int64] | None:
    """[layers, slots] of the expert map file that the config names; None when it names none."""
    name = config.get("eplb_expert_map_file")
    if not name:
        return None
    if not isinstance(name, str) or "\0" in name:
        raise TraceError(f"eplb_expert_map_file is {shown(name)}", file=where, rule="a file's name is expected")
    candidates = [Path(name), Path(where).parent / Path(name).name]
    path = next((path for path in candidates if os.path.isfile(path)), None)  # noqa: PTH113 - no OSError
    if path is None:
        raise TraceError(
            f"the map in force, {shown(name)}, is not here",
            file=where,
            rule="physical against logical is never guessed",
            hint=f"Copy it beside {CONFIG}.",
        )
    document = TraceFile(path).document
    try:
        rows = [
            [expert for device in layer["device_list"] for expert in device["device_expert"]]
            for layer in document["layer_list"]
        ]
        return np.array(rows, np.int64)
    except (TypeError, KeyError, ValueError, OverflowError):
        raise TraceError("is not an expert map: layer_list, device_list, device_expert", file=path) from None
