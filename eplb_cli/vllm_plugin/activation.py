"""Reads the settings and hooks the parts of vLLM that they concern, each when vLLM imports it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from eplb_cli.errors import EplbError
from eplb_cli.placement import Placement
from eplb_cli.vllm_plugin.declaration import require
from eplb_cli.vllm_plugin.hooks import when_imported
from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import write_record
from eplb_cli.vllm_plugin.vllm_parts import Task

__all__ = ["activate"]

_done = False


def activate() -> None:
    """Install the hooks once in this process; vLLM may load a plugin several times.

    Raises:
        ServeError, PlacementError: the environment or the plan file is unusable, or this vLLM lacks what the plugin
            needs. The error leaves vLLM's plugin loading and ends the process before anything is served.
    """
    global _done
    if _done:
        return
    settings = Settings.from_environment(os.environ)
    try:
        able = require(_tasks(settings))
        if settings.plan is not None:
            _start_from_plan(settings, Placement.load(settings.plan), able)
    except EplbError as error:
        write_record(settings.status_dir, f"failed-{os.getpid()}", {"error": str(error)})
        raise
    if settings.record_dir is not None:
        from eplb_cli.vllm_plugin.recorder import count_steps, record_after_loading

        when_imported("vllm.model_executor.model_loader.base_loader", functools.partial(record_after_loading, settings))
        when_imported("vllm.v1.worker.worker_base", count_steps)
    _done = True


def _tasks(settings: Settings) -> Iterator[Task]:
    if settings.plan is not None:
        yield from ("plan", "llama4", "endpoint", "metrics")
        if settings.dispatch == "balanced":
            yield "dispatch"
        if settings.layout == "physical":
            yield "physical"
    if settings.record_dir is not None:
        yield "record"


def _start_from_plan(settings: Settings, placement: Placement, able: set[Task]) -> None:
    from eplb_cli.vllm_plugin import inspection, loading, move, warm_start

    target = move.Target(settings, placement)
    when_imported("vllm.distributed.eplb.eplb_state", functools.partial(warm_start.start_from_plan, target))
    when_imported("vllm.v1.worker.worker_base", functools.partial(warm_start.require_plan, target))
    if "endpoint" in able:
        when_imported("vllm.v1.worker.worker_base", inspection.add_remote_call)
    if "metrics" in able:
        when_imported("vllm.v1.metrics.prometheus", functools.partial(inspection.add_metrics, settings))
    if "llama4" in able:
        when_imported("vllm.model_executor.models.llama4", loading.give_fused_llama4_its_copies)
    if settings.layout == "physical":
        loading.read_slots_directly(settings, placement)
