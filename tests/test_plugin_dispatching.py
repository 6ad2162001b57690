"""The rule in vLLM's own routers: what it is put into, what it is tried on, and what stops it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_cli.dispatch import serving_slots
from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin import balanced_torch, dispatching
from eplb_cli.vllm_plugin.proof import LiveLayer
from eplb_cli.vllm_plugin.settings import Settings

base_router = pytest.importorskip("vllm.model_executor.layers.fused_moe.router.base_router")
eplb_state = pytest.importorskip("vllm.distributed.eplb.eplb_state")

ROWS = {1: [0, 1, 2, 3, 4, 0, 2, 5], 4: [5, 0, 1, 4, 3, 2, 4, 0]}
EXPERTS, RANKS, TOP_K = 6, 4, 2
IDS = torch.tensor([[0, 2], [0, 4], [0, 1], [2, 0], [0, 5], [4, 2], [2, 3]], dtype=torch.int32)
REAL = 5


class Router(base_router.BaseRouter):
    """A router of vLLM's whose ids are given."""

    def _compute_routing(self, hidden_states: Any, router_logits: Any, indices_type: Any, **rest: Any) -> Any:
        return None, router_logits

    @property
    def routing_method_type(self) -> Any:
        """Of no kernel."""
        return None


class OwnWay(Router):
    def _apply_eplb_mapping(self, topk_ids: torch.Tensor) -> torch.Tensor:
        return topk_ids


def module_of(row: list[int], router: type = Router, *, gathers: bool = False, splits: bool = False) -> Any:
    """A layer with the tables that vLLM would give it."""
    table, count = torch.full((EXPERTS, 1024), -1), torch.zeros(EXPERTS, dtype=torch.int64)
    for slot, expert in enumerate(row):
        table[expert, count[expert]] = slot
        count[expert] += 1
    state = eplb_state.EplbLayerState()
    state.logical_to_physical_map, state.logical_replica_count = table, count
    state.expert_load_view = torch.zeros(len(row), dtype=torch.int32)
    state.should_record_tensor = torch.tensor(True)
    state.num_unpadded_tokens_tensors = [torch.tensor(REAL, dtype=torch.int32)]
    return SimpleNamespace(
        router=router(TOP_K, EXPERTS, eplb_state=state),
        do_naive_dispatch_combine=gathers,
        moe_config=SimpleNamespace(is_sequence_parallel=splits),
    )


def state_of(**parallel: int) -> Any:
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": RANKS, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes), step=lambda is_dummy=False, is_profile=False: None)


def put(state: Any, modules: dict[int, Any], price: int = 0) -> dispatching.Agreement:
    live = {layer: LiveLayer(ROWS[layer], [], module) for layer, module in modules.items()}
    settings = Settings(dispatch="balanced", copy_cost_tokens=price)
    return dispatching.choose_by_load(settings, state, ROWS, live, RANKS)


def modules(**kinds: Any) -> dict[int, Any]:
    return {layer: module_of(row, **kinds) for layer, row in ROWS.items()}


def routed(module: Any, ids: torch.Tensor = IDS) -> np.ndarray:
    """What the layer's kernels would get, by vLLM's own way through the router."""
    return module.router._select_experts(None, ids)[1].numpy()


def by_the_rule(layer: int, *, real: int = REAL, price: int = 0, whole: bool = True) -> np.ndarray:
    return serving_slots(IDS.numpy(), real, np.array(ROWS[layer]), EXPERTS, RANKS, price, whole_step=whole)


def test_every_router_chooses_by_the_rule_on_its_own_map() -> None:
    layers = modules()
    put(state_of(), layers, price=1)
    for layer, module in layers.items():
        assert routed(module).tolist() == by_the_rule(layer, price=1).tolist()


def test_each_rank_s_batch_has_its_share_of_the_price() -> None:
    layers = modules()
    put(state_of(data_parallel_size=RANKS, tensor_parallel_size=1), layers, price=4)
    assert routed(layers[1]).tolist() == by_the_rule(1, price=1, whole=False).tolist()


def test_rows_that_were_gathered_are_one_batch_in_which_all_count() -> None:
    layers = modules(gathers=True)
    agreement = put(state_of(data_parallel_size=RANKS, tensor_parallel_size=1), layers, price=1)
    assert agreement.shared
    assert routed(layers[1]).tolist() == by_the_rule(1, real=len(IDS), price=1).tolist()
    assert int(layers[1].router.eplb_state.expert_load_view.sum()) == REAL * TOP_K


def test_the_trial_batch_leaves_no_trace() -> None:
    layers = modules()
    agreement = put(state_of(), layers)
    for module in layers.values():
        seen = module.router.eplb_state
        assert not seen.expert_load_view.any()
        assert bool(seen.should_record_tensor)
        assert int(seen.num_unpadded_tokens_tensors[0]) == REAL
    assert not agreement.served.any()
    assert not agreement.digests.any()
    assert not any(each.was_called for each in agreement.routed)


def test_a_wrong_choice_in_the_trial_batch_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    right = balanced_torch.map_and_record

    def wrong(ids: torch.Tensor, *rest: Any, **rows: Any) -> torch.Tensor:
        chosen = right(ids, *rest, **rows)
        chosen[3, 1] = 7 - chosen[3, 1]
        return chosen

    monkeypatch.setattr(balanced_torch, "map_and_record", wrong)
    with pytest.raises(ServeError, match=r"of a trial batch to slot .* \(1 of 194 choices are wrong\)") as caught:
        put(state_of(), modules())
    assert caught.value.layer == 1


REFUSED = {
    "a router of its own way": (state_of(), {"router": OwnWay}, "OwnWay maps experts to slots in its own way"),
    "no router": (state_of(), {"router": lambda *_, **__: None}, "SimpleNamespace maps experts"),
    "ranks that share a part of the step": (
        state_of(data_parallel_size=2, tensor_parallel_size=2),
        {},
        "tensor parallel ranks share the batch",
    ),
    "split prompts": (state_of(prefill_context_parallel_size=2), {}, "prefill context parallelism"),
}


@pytest.mark.parametrize("state, kinds, message", REFUSED.values(), ids=REFUSED.keys())
def test_where_ranks_could_differ_it_is_refused(state: Any, kinds: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        put(state, modules(**kinds))


def test_tokens_that_are_split_over_the_ranks_are_a_batch_of_their_own() -> None:
    assert not put(state_of(data_parallel_size=2, tensor_parallel_size=2), modules(splits=True)).shared


def test_layers_that_gather_beside_layers_that_do_not_are_refused() -> None:
    layers = {1: module_of(ROWS[1], gathers=True), 4: module_of(ROWS[4])}
    with pytest.raises(ServeError, match="some layers gather tokens before they route"):
        put(state_of(data_parallel_size=RANKS, tensor_parallel_size=1), layers)


def test_a_layer_that_gathers_later_on_stops() -> None:
    layers = modules()
    put(state_of(), layers)
    layers[4].do_naive_dispatch_combine = True
    with pytest.raises(ServeError, match="the layer's dispatch has changed") as caught:
        routed(layers[4])
    assert caught.value.layer == 4


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=dist.group.WORLD)
    dist.destroy_process_group()


def watched(group: Any, folder: Path) -> tuple[Any, dict[int, Any]]:
    state, layers = state_of(), modules()
    agreement = put(state, layers)
    dispatching.watch_steps(Settings(dispatch="balanced", status_dir=folder), state, agreement, group)
    return state, layers


def test_a_router_that_does_not_ask_stops_the_first_step(group: Any, tmp_path: Path) -> None:
    state, layers = watched(group, tmp_path)
    routed(layers[1])
    state.step(is_profile=True)  # no step of the model's
    with pytest.raises(ServeError, match="the router has not asked --dispatch balanced in a step") as caught:
        state.step()
    assert caught.value.layer == 4
    assert "has not asked" in next(tmp_path.glob("failed-*.json")).read_text()


def test_the_record_says_how_balanced_the_steps_were_that_were_looked_at(group: Any, tmp_path: Path) -> None:
    state, layers = watched(group, tmp_path)
    for _ in range(100):
        for module in layers.values():
            routed(module)
        state.step()
    loads = np.stack([np.bincount(by_the_rule(layer)[:REAL].ravel() // 2, minlength=RANKS) for layer in ROWS])
    record = json.loads((tmp_path / "dispatch.json").read_text())
    assert record["steps"] == 100
    assert record["balancedness"] == pytest.approx(loads.mean(1).sum() / loads.max(1).sum())
