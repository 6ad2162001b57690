"""What is fuzzed: each target reads a folder as the command line would."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from eplb_cli.checkpoint.classify import classify
from eplb_cli.checkpoint.model import Model
from eplb_cli.checkpoint.safetensors_file import read_header
from eplb_cli.checkpoint.source import Checkpoint
from eplb_cli.checkpoint.verify import Level, verify
from eplb_cli.errors import EplbError
from eplb_cli.exports import ENGINES, Facts, import_file
from eplb_cli.loads import ExpertLoads
from eplb_cli.placement import Placement
from eplb_cli.traces import ReadOptions, read_traces
from eplb_cli.traces.pipeline import as_recorded
from tests.fuzz.seeds import MODEL

__all__ = ["TARGETS", "files_to_mutate", "is_netted"]


def files_to_mutate(target: str, names: list[str]) -> list[str]:
    """Of a seed's files those that are the target's to read."""
    return [name for name in names if not name.startswith("source/")] if target == "verify" else names


def is_netted(error: EplbError) -> bool:
    """True when a reader tripped, and `traces.pipeline.as_recorded` made a TraceError of it."""
    return traceback.extract_tb(error.__traceback__)[-1].name == as_recorded.__name__


def _traces(folder: Path) -> None:
    try:
        read_traces([folder], ReadOptions())
    except EplbError as error:  # what no model tells is guessed, or asked for
        if is_netted(error):
            raise
    profile = read_traces([folder], ReadOptions(MODEL))
    profile.loads.save(folder / "out.safetensors")
    ExpertLoads.load(folder / "out.safetensors")


def _headers(folder: Path) -> None:
    read_header(folder / "model.safetensors")


def _loads(folder: Path) -> None:
    ExpertLoads.load(folder / "loads.safetensors")


def _plans(folder: Path) -> None:
    Placement.load(folder / "plan.json").save(folder / "again.json")


def _imports(folder: Path) -> None:
    path = next(path for path in folder.iterdir() if path.stem in ENGINES)
    facts = Facts(MODEL, None, None, 2, None)
    import_file(path, ENGINES[path.stem], facts).placement.save(folder / "plan.json")


def _config(folder: Path) -> None:
    model = Model.open(folder)
    model.kv_cache(2)
    _ = model.shape, model.num_expert_groups, model.count_keys, model.quantisation_method, model.placement
    _ = model.expert_bytes


def _checkpoint(folder: Path) -> None:
    _config(folder)
    checkpoint = Checkpoint.open(folder)
    classify(checkpoint.config, checkpoint.tensors, stored_experts=checkpoint.config.shape.num_experts)


def _verify(folder: Path) -> None:
    source = Checkpoint.open(folder / "source")
    plan = folder / "plan.json"
    verify(source, folder / "out", Placement.load(plan) if plan.exists() else None, Level.full)


TARGETS: Mapping[str, Callable[[Path], None]] = {
    "traces": _traces,
    "headers": _headers,
    "loads": _loads,
    "plans": _plans,
    "imports": _imports,
    "config": _config,
    "checkpoint": _checkpoint,
    "verify": _verify,
}
