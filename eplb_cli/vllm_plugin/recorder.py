"""Records expert loads of a running vLLM: tokens per window, phase, MoE layer and logical expert.

Works with EPLB on or off, as the router shows the logical ids before EPLB maps them. Padding, dummy batches and warm-up
are not counted. Inside the forward pass each MoE layer copies its ids [tokens, k] into a buffer of its own, which has a
fixed address and so is captured with CUDA graphs as it is; after the pass one reduction adds the step's real rows to
the counts. The host waits for the device once a window.

**Files.** `<run>-dp<D>-pp<P>.jsonl` in the recording folder: one per data parallel rank D (its tensor parallel ranks
route the same tokens; the first one writes) and pipeline stage P. Each line is one JSON object, written whole and
flushed, so a killed server leaves at most a last line cut short, which readers skip. The first line is the header:

    {"format": "eplb-recording", "version": 1, "run": str, "model": str, "architecture": str, "num_experts": E,
     "top_k": k, "layer_ids": [absolute decoder layer of each row], "window_steps": N, "dp_rank": D, "dp_size": int,
     "pp_rank": P, "pp_size": int, "time": unix seconds}

Every other line is a part of a window:

    {"window": int, "phase": "prefill" | "decode" | "all", "steps": int, "tokens": int, "dropped": int,
     "time": unix seconds, "counts": [[E integers] for each layer of layer_ids]}

`counts` are assignments (k per token) of logical experts; `tokens` the tokens they come from; `dropped` ids that were
negative or >= E. A token is prefill when its position lies in the prompt. Phase "all" holds steps of both kinds whose
tokens could not be told apart. A window is N engine steps; lines with the same window and phase are parts of one window
(a server that idles for a second writes what it has). To put a run together: add lines of equal (run, window, phase)
over the files of all dp ranks, whose windows run in step, and join the layers of all stages. A rank that reaches its
size limit writes a last line {"end": "size limit"} and stops.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from eplb_cli.errors import ServeError
from eplb_cli.loads import PHASES
from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import write_record

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "VERSION", "Recorder", "count_steps", "record_after_loading", "token_phases"]

FORMAT = "eplb-recording"
VERSION = 1
IDLE_SECONDS = 1.0

logger = logging.getLogger("vllm.eplb")

_ALL, _PREFILL, _DECODE = (PHASES.index(phase) for phase in ("all", "prefill", "decode"))

_recorder: Recorder | None = None


def record_after_loading(settings: Settings, module: ModuleType) -> None:
    """Hook the end of weight loading, where all routers exist and nothing is captured yet."""
    original = module.BaseModelLoader.load_model
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _recorder
        model = original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        config, model_config = arguments["vllm_config"], arguments.get("model_config")
        if model_config is not None and model_config is not config.model_config:
            return model  # a drafter
        try:
            _recorder = Recorder(settings, config, model)
        except ServeError as error:
            write_record(settings.status_dir, f"failed-{os.getpid()}", {"error": str(error)})
            raise
        return model

    module.BaseModelLoader.load_model = load_model


def count_steps(module: ModuleType) -> None:
    """Hook the worker's steps, real and dummy."""
    wrapper = module.WorkerWrapperBase
    original = wrapper.execute_model

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder is None:
            return original(self, scheduler_output, *args, **kwargs)
        with _recorder.lock:
            result = original(self, scheduler_output, *args, **kwargs)
            _recorder.finish_step(scheduler_output, self.worker.model_runner)
        return result

    wrapper.execute_model = execute_model

    def execute_dummy_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.worker.execute_dummy_batch(*args, **kwargs)
        if _recorder is not None:
            with _recorder.lock:
                _recorder.finish_dummy_step()
        return result

    wrapper.execute_dummy_batch = execute_dummy_batch


class Recorder:
    """Counts of one worker since the last line, on the device, and the file they go to.

    Raises:
        ServeError: this vLLM or this model routes where it cannot be watched.
    """

    def __init__(self, settings: Settings, vllm_config: Any, model: Any) -> None:
        import torch
        from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group

        parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
        layers = _moe_layers(model)
        self.lock = threading.Lock()
        self._dp_rank = get_dp_group().rank_in_group
        self._dp_size = get_dp_group().world_size
        self._active = get_tp_group().rank_in_group == 0
        self._experts = int(model_config.get_num_experts())
        self._layer_ids = sorted(layers)
        top_k = {int(layer.router.top_k) for layer in layers.values()}
        if len(top_k) != 1:
            raise ServeError(f"the MoE layers choose {sorted(top_k)} experts per token", rule="recording needs one k")
        self._top_k = top_k.pop()
        if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            raise ServeError("recording with prefill context parallelism", rule="its ranks see parts of each prompt")
        for layer_id, layer in layers.items():
            if getattr(layer.moe_config, "is_sequence_parallel", False):
                raise ServeError(
                    "the MoE layer splits its tokens over the tensor parallel ranks, which recording cannot follow",
                    layer=layer_id,
                    hint="Use another --all2all-backend, or --tensor-parallel-size 1 with more data parallel ranks.",
                )
        self._rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._prompt_lengths: dict[str, int] = {}
        self._steps_total = self._steps = 0
        self._steps_limit = settings.record_steps
        self._tokens = dict.fromkeys(range(len(PHASES)), 0)
        self._phase_steps = dict.fromkeys(range(len(PHASES)), 0)
        self._seen = [False] * len(layers)
        self._full = False
        self._limit = settings.record_max_bytes
        if not self._active:
            return
        device = vllm_config.device_config.device
        self._buffer = torch.zeros((len(layers), self._rows, self._top_k), dtype=torch.int32, device=device)
        self._counts = torch.zeros(
            (len(PHASES), len(layers), self._experts + 1), dtype=torch.int64, device=device
        )  # the last column takes ids out of range
        for index, layer_id in enumerate(self._layer_ids):
            self._watch(index, layers[layer_id].router)
        self._file = self._open(settings, vllm_config, get_pp_group())
        self._last_step = time.monotonic()
        threading.Thread(target=self._write_when_idle, name="eplb-recorder", daemon=True).start()
        atexit.register(self.write)
        logger.info("eplb: recording expert loads of %d MoE layers to %s", len(layers), self._file.name)

    def _open(self, settings: Settings, vllm_config: Any, stage: Any) -> IO[str]:
        folder = settings.record_dir or Path()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{settings.record_run}-dp{self._dp_rank}-pp{stage.rank_in_group}.jsonl"
        file = open(folder / name, "x", encoding="utf-8")  # noqa: SIM115 - open as long as the server
        header = {
            "format": FORMAT,
            "version": VERSION,
            "run": settings.record_run,
            "model": str(vllm_config.model_config.model),
            "architecture": vllm_config.model_config.hf_config.architectures[0],
            "num_experts": self._experts,
            "top_k": self._top_k,
            "layer_ids": self._layer_ids,
            "window_steps": self._steps_limit,
            "dp_rank": self._dp_rank,
            "dp_size": self._dp_size,
            "pp_rank": stage.rank_in_group,
            "pp_size": stage.world_size,
            "time": round(time.time(), 3),
        }
        file.write(json.dumps(header) + "\n")
        file.flush()
        return file

    def _watch(self, index: int, router: Any) -> None:
        """Let a router copy its ids into this layer's buffer, after whoever watched it before."""
        before = getattr(router, "capture_fn", None)
        buffer = self._buffer[index]

        def capture(topk_ids: Tensor) -> None:
            if before is not None:
                before(topk_ids)
            self._seen[index] = True
            self._check_rows(topk_ids.shape[0])
            buffer[: topk_ids.shape[0]].copy_(topk_ids)

        router.set_capture_fn(capture)

    def _check_rows(self, rows: int) -> None:
        """Refuse layouts in which the router sees other ranks' tokens; runs when eager and at graph capture."""
        if self._dp_size > 1:
            from vllm.forward_context import get_forward_context

            metadata = get_forward_context().dp_metadata
            if metadata is not None and rows != int(metadata.num_tokens_across_dp_cpu[self._dp_rank]):
                raise ServeError(
                    f"the router sees {rows} rows, this data parallel rank has "
                    f"{int(metadata.num_tokens_across_dp_cpu[self._dp_rank])}",
                    rule="recording needs a dispatch that routes before it gathers",
                )
        if rows > self._rows:
            raise ServeError(f"the router sees {rows} rows, a step has {self._rows} at most")

    def finish_step(self, scheduler_output: Any, runner: Any) -> None:
        """Add a step's ids to the counts; called with the lock held, once the forward pass is queued."""
        import torch

        tokens = int(scheduler_output.total_num_scheduled_tokens)
        if not self._active or self._full or not tokens:
            return
        if not all(self._seen):
            raise ServeError(
                "the router has shown no ids in a step that routed tokens",
                layer=self._layer_ids[self._seen.index(False)],
                rule="recording would count nothing",
            )
        batch = getattr(runner, "input_batch", None)
        phases = token_phases(scheduler_output, getattr(batch, "req_ids", None), self._prompt_lengths)
        ids = self._buffer[:, :tokens].long()
        ids = torch.where((ids >= 0) & (ids < self._experts), ids, self._experts)
        layers, columns = len(self._layer_ids), self._experts + 1
        place = ids + (torch.arange(layers, device=ids.device) * columns)[:, None, None]
        if len(set(phases)) > 1:
            phase = torch.tensor(phases, device=ids.device)
            place += (phase * layers * columns)[None, :, None]
        else:
            place += phases[0] * layers * columns
        flat = place.reshape(-1)
        self._counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat))
        for code in set(phases):
            self._tokens[code] += phases.count(code)
            self._phase_steps[code] += 1
        self._count()

    def finish_dummy_step(self) -> None:
        """A step that this rank spent waiting for the others; keeps the windows of all ranks in step."""
        if self._active and not self._full:
            self._count()

    def _count(self) -> None:
        self._steps += 1
        self._last_step = time.monotonic()
        if (self._steps_total + self._steps) % self._steps_limit == 0:
            self.write()

    def _write_when_idle(self) -> None:
        while not self._full:
            time.sleep(IDLE_SECONDS / 4)
            with self.lock:
                if self._steps and time.monotonic() - self._last_step >= IDLE_SECONDS:
                    self.write()

    def write(self) -> None:
        """Write one line for each phase that has tokens, and begin anew."""
        if self._full or not self._steps:
            return
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # another thread's stream may still add to the counts
        counts = self._counts.to("cpu", copy=True)
        self._counts.zero_()
        window = (self._steps_total + self._steps - 1) // self._steps_limit
        self._steps_total += self._steps
        self._steps = 0
        for code, name in enumerate(PHASES):
            if not self._tokens[code]:
                continue
            line = {
                "window": window,
                "phase": name,
                "steps": self._phase_steps[code],
                "tokens": self._tokens[code],
                "dropped": int(counts[code, :, -1].sum()),
                "time": round(time.time(), 3),
                "counts": counts[code, :, :-1].tolist(),
            }
            self._tokens[code] = self._phase_steps[code] = 0
            text = json.dumps(line, separators=(",", ":")) + "\n"
            if self._file.tell() + len(text) > self._limit:
                self._full = True
                self._file.write(json.dumps({"end": "size limit"}) + "\n")
                logger.warning("eplb: %s has reached its size limit; recording stops", self._file.name)
                break
            self._file.write(text)
        self._file.flush()


def _moe_layers(model: Any) -> dict[int, Any]:
    """The modules that route, by absolute decoder layer."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    layers: dict[int, Any] = {}
    for module in model.modules():
        if not (hasattr(module, "router") and hasattr(module, "moe_config")):
            continue
        found = re.findall(r"(?:^|\.)layers\.(\d+)\.", str(getattr(module, "layer_name", "")))
        if len(found) != 1 or int(found[0]) in layers:
            raise ServeError(f"the decoder layer of {getattr(module, 'layer_name', '?')!r} is not to be told")
        layer = int(found[0])
        method = getattr(module, "_quant_method", None) or getattr(module, "quant_method", None)
        if not isinstance(module.router, BaseRouter) or not hasattr(module.router, "set_capture_fn"):
            raise ServeError(
                f"{type(module.router).__name__} shows no ids", layer=layer, rule="recording needs vLLM 0.16 or later"
            )
        if getattr(method, "is_monolithic", False):
            raise ServeError(
                f"{type(method).__name__} routes inside its kernel, where it cannot be watched",
                layer=layer,
                hint="Choose another --moe-backend for the recording.",
            )
        layers[layer] = module
    if not layers:
        raise ServeError("a recording was asked for, but vLLM sees no MoE layers in this model")
    return layers


def token_phases(
    scheduler_output: Any, batch_order: list[str] | None, prompt_lengths: dict[str, int]
) -> list[int]:  # fmt: skip
    """The phase code of each token of a step, in the order of the batch.

    Args:
        scheduler_output: what vLLM's scheduler planned for the step.
        batch_order: request ids in the order of the batch's rows, or None where the runner does not show it.
        prompt_lengths: prompt tokens of the requests under way; kept up to date here.
    """
    start: dict[str, int] = {}
    for request in scheduler_output.scheduled_new_reqs:
        prompt = request.prompt_token_ids
        embedded = getattr(request, "prompt_embeds", None)
        prompt_lengths[request.req_id] = len(prompt) if prompt is not None else len(embedded or ())
        start[request.req_id] = request.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    by_request = {}
    for name, tokens in scheduled.items():
        in_prompt = min(tokens, max(0, prompt_lengths.get(name, 0) - start.get(name, 0)))
        by_request[name] = [_PREFILL] * in_prompt + [_DECODE] * (tokens - in_prompt)
    for name in scheduler_output.finished_req_ids:
        prompt_lengths.pop(name, None)
    present = {code for codes in by_request.values() for code in codes}
    total = sum(scheduled.values())
    if len(present) == 1:
        return [present.pop()] * total
    order = [name for name in batch_order or () if name in by_request]
    if len(order) != len(by_request):
        return [_ALL] * total
    return [code for name in order for code in by_request[name]]
