"""What is live: a remote call on every worker, `GET /eplb/placement`, and gauges on vLLM's own `/metrics`."""

from __future__ import annotations

import asyncio
import functools
import hmac
import math
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EndpointPlugin", "add_metrics", "add_remote_call"]

ANSWER_SECONDS = 1.0
"""How long an answer of `GET /eplb/placement` is given again: asking interrupts every rank."""


def add_remote_call(module: ModuleType) -> None:
    """Give every worker a method `eplb_placement`, reachable through vLLM's `collective_rpc`."""
    module.WorkerBase.eplb_placement = _live_placement


def _live_placement(self: Any, full: bool = False) -> dict[str, Any] | None:
    """The placement as the routers of this worker see it now."""
    runner = self.model_runner
    state = getattr(runner, "eplb_state", None) or getattr(getattr(runner, "eplb", None), "state", None)
    started = getattr(state, "eplb_plan", None)
    if state is None or started is None:
        return None
    answer = {
        **started.record,
        **started.now(),
        "rebalances": state.policy.rebalances,
        "steps_since_rebalance": state.expert_rearrangement_step,
    }
    if full:
        answer["physical_to_logical"] = started.model_state.physical_to_logical_map.tolist()
    return answer


class EndpointPlugin:
    """Adds `GET /eplb/placement` to vLLM's server (vLLM >= 0.26, when VLLM_PLUGINS names it)."""

    name = "eplb"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: Any = None
        self._keys: list[str] = []
        self._answers: dict[bool, tuple[float, dict[str, Any]]] = {}
        self._asking = asyncio.Lock()

    def attach_router(self, app: Any) -> None:
        """Add the route, in servers that run a plan."""
        if "EPLB_PLAN" not in os.environ:
            return
        from fastapi import HTTPException, Request

        async def placement(request, full=False):  # type: ignore[no-untyped-def]
            # vLLM's own check of the key leaves out every path that is not the API's.
            if not self._is_allowed(request.headers.get("Authorization", "")):
                raise HTTPException(401, "Unauthorized")
            return await self._placement(full)

        placement.__annotations__ = {"request": Request, "full": bool}
        app.add_api_route("/eplb/placement", placement, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep the engine to ask, and the keys that vLLM takes."""
        self._engine = engine_client
        given = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY") or []
        self._keys = [key for key in ([given] if isinstance(given, str) else given) if key]

    def _is_allowed(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        # Compared in a time that does not tell how much of a guess is right.
        matches = [hmac.compare_digest(key.encode(), known.encode()) for known in self._keys]
        return not self._keys or (scheme.lower() == "bearer" and any(matches))

    async def _placement(self, full: bool) -> dict[str, Any]:
        """The live placement, asked of the ranks once in ANSWER_SECONDS however many want it."""
        async with self._asking:
            asked, answer = self._answers.get(full, (-math.inf, {}))
            if time.monotonic() - asked >= ANSWER_SECONDS:
                answer = await self._ask(full)
                self._answers[full] = time.monotonic(), answer
        return answer

    async def _ask(self, full: bool) -> dict[str, Any]:
        ranks = await self._engine.collective_rpc("eplb_placement", kwargs={"full": full}) if self._engine else []
        ranks = [rank for rank in ranks if rank]
        folder = os.environ.get("EPLB_STATUS_DIR")
        rebalances = list(read_records(Path(folder), "rebalances")) if folder else []
        steps = list(read_records(Path(folder), "dispatch")) if folder else []
        return {
            "ranks": ranks if self._keys else [_anonymous(rank) for rank in ranks],
            "consistent": len({(rank["pp_rank"], rank["live_sha256"]) for rank in ranks})
            == len({rank["pp_rank"] for rank in ranks}),
            "as_planned": bool(ranks) and all(rank["as_planned"] for rank in ranks),
            "last_rebalance": rebalances[0] if rebalances else None,
            "step_balancedness": steps[0]["balancedness"] if steps else None,
        }


def _anonymous(rank: dict[str, Any]) -> dict[str, Any]:
    """A rank's answer for anybody: without the names of hosts and files."""
    return {
        name: value
        for name, value in rank.items()
        if not isinstance(value, str) or name in ("plan_sha256", "live_sha256", "policy", "dispatch")
    }


def add_metrics(settings: Settings, module: ModuleType) -> None:
    """Add the gauges to every registry that vLLM's `/metrics` is made from."""
    folder = settings.status_dir
    if folder is None:
        return
    original = module.get_prometheus_registry

    @functools.wraps(original)
    def get_prometheus_registry() -> Any:
        registry = original()
        if not getattr(registry, "has_eplb_gauges", False):
            registry.register(_Gauges(folder))
            registry.has_eplb_gauges = True
        return registry

    # The server's modules may have taken the function by name already.
    for user in list(sys.modules.values()):
        if (
            str(getattr(user, "__name__", "")).startswith("vllm.")
            and vars(user).get("get_prometheus_registry") is original
        ):
            vars(user)["get_prometheus_registry"] = get_prometheus_registry


class _Gauges:
    """Reads the status records when Prometheus asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """One metric family after another."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stages = list(read_records(self._folder, "stage"))
        slots = sum(record.get("slots_verified", 0) for record in stages)
        yield GaugeMetricFamily("eplb:slots_verified", "Expert slots proven to hold the plan's experts.", value=slots)
        rule = GaugeMetricFamily("eplb:dispatch", "The rule that chooses among an expert's copies.", labels=["rule"])
        for name in {record["dispatch"] for record in stages if "dispatch" in record}:
            rule.add_metric([name], 1)
        yield rule
        steps = next(read_records(self._folder, "dispatch"), None)
        if steps is not None and steps["balancedness"] is not None:
            yield GaugeMetricFamily(
                "eplb:step_balancedness",
                "Mean over max rank load of the last steps that were looked at, summed over layers.",
                value=steps["balancedness"],
            )
        last = next(read_records(self._folder, "rebalances"), None)
        rebalances = last["rebalances"] if last else 0
        yield CounterMetricFamily("eplb:rebalances", "Run-time rebalances since start.", value=rebalances)
        if last is None:
            return
        ratio = GaugeMetricFamily(
            "eplb:balancedness",
            "Mean over max rank load in the last rebalance's window, summed over layers.",
            labels=["placement"],
        )
        ratio.add_metric(["before"], last["balancedness_before"])
        ratio.add_metric(["after"], last["balancedness_after"])
        yield ratio
        yield GaugeMetricFamily("eplb:slots_moved", "Slots that the last rebalance changed.", value=last["slots_moved"])
