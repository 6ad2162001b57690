"""`GET /eplb/placement`: who may ask, what it costs the ranks, and what it names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eplb_cli.vllm_plugin import inspection
from eplb_cli.vllm_plugin.inspection import EndpointPlugin
from eplb_cli.vllm_plugin.status import write_record

pytestmark = pytest.mark.usefixtures("needs_vllm")  # whose web framework it runs in

RANK = {
    "pp_rank": 0, "ep_rank": 1, "live_sha256": "a5", "plan_sha256": "a5", "policy": "static", "as_planned": True,
    "dispatch": "balanced",
    "host": "node-7", "plan": "/home/me/plan.json", "physical_to_logical": [[1, 0]],
}  # fmt: skip


class Ranks:
    """Counts how often they are asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """As vLLM's engine."""
        self.asked.append(kwargs["full"])
        await asyncio.sleep(0)
        return [RANK, None]


def client_of(ranks: Ranks, api_key: Any) -> Any:
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    plugin, app = EndpointPlugin(), FastAPI()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(ranks, None, SimpleNamespace(api_key=api_key)))
    return TestClient(app)


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPLB_PLAN", "plan.json")
    monkeypatch.setenv("EPLB_STATUS_DIR", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.mark.parametrize("given", [["one", "two"], "two", None], ids=["list", "text", "variable"])
def test_a_server_with_a_key_wants_it(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is None:
        monkeypatch.setenv("VLLM_API_KEY", "two")
    ranks = Ranks()
    client = client_of(ranks, given)
    for wrong in ("", "two", "Bearer", "Bearer ", "Bearer tw", "Bearer two ", "Basic two", "Bearer \xe9"):
        assert client.get("/eplb/placement", headers={"Authorization": wrong.encode("latin-1")}).status_code == 401
    assert client.get("/eplb/placement").status_code == 401
    assert not ranks.asked
    answer = client.get("/eplb/placement", headers={"Authorization": "bearer two"})
    assert answer.status_code == 200
    assert answer.json()["ranks"] == [RANK]


def test_without_a_key_neither_hosts_nor_files_are_named() -> None:
    answer = client_of(Ranks(), None).get("/eplb/placement")
    assert answer.json() == {
        "ranks": [{name: value for name, value in RANK.items() if name not in ("host", "plan")}],
        "consistent": True,
        "as_planned": True,
        "last_rebalance": None,
        "step_balancedness": None,
    }


def test_the_balancedness_of_the_last_steps_is_in_the_answer(tmp_path: Path) -> None:
    write_record(tmp_path, "dispatch", {"steps": 100, "balancedness": 0.875})
    assert client_of(Ranks(), None).get("/eplb/placement").json()["step_balancedness"] == 0.875


def test_the_metrics_name_the_rule_and_the_balancedness_of_steps_under_it(tmp_path: Path) -> None:
    write_record(tmp_path, "stage0-rank0", {"slots_verified": 5, "dispatch": "balanced"})
    write_record(tmp_path, "stage0-rank1", {"slots_verified": 5, "dispatch": "balanced"})
    write_record(tmp_path, "dispatch", {"steps": 100, "balancedness": 0.875})
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(inspection._Gauges(tmp_path))
    assert registry.get_sample_value("eplb:dispatch", {"rule": "balanced"}) == 1
    assert registry.get_sample_value("eplb:step_balancedness") == 0.875


def test_the_ranks_are_asked_once_however_many_want_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(inspection, "time", SimpleNamespace(monotonic=lambda: now))
    plugin, ranks = EndpointPlugin(), Ranks()

    async def crowd() -> None:
        await plugin.init_state(ranks, None, SimpleNamespace())
        await asyncio.gather(*(plugin._placement(full) for full in (False, True) * 20))

    asyncio.run(crowd())
    assert ranks.asked == [False, True]
    now += 0.99
    asyncio.run(plugin._placement(False))
    assert ranks.asked == [False, True]
    now += 0.01
    asyncio.run(plugin._placement(False))
    assert ranks.asked == [False, True, False]
