"""The run-time policy: layers without load stay, moves are few, small gains are left alone, changes are logged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_cli.metrics import balancedness, initial_map, rank_loads
from eplb_cli.planner.rebalancing import MIN_GAIN
from eplb_cli.vllm_plugin.rebalancing import WatchedPolicy, watch
from eplb_cli.vllm_plugin.settings import Settings

LAYERS, EXPERTS, REDUNDANT, RANKS = 3, 16, 8, 4
SLOTS = EXPERTS + REDUNDANT


class ReturningAMap:
    """A policy in the form of vLLM >= 0.20, which moves everything: the map in reverse."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert old_global_expert_indices is not None
        return old_global_expert_indices.flip(1)


class ReturningATriple:
    """The form of vLLM <= 0.18: the map and the two maps derived from it."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise AssertionError("eplb's policy takes its place")


def start_map() -> torch.Tensor:
    return torch.from_numpy(np.tile(initial_map(EXPERTS, REDUNDANT), (LAYERS, 1))).long()


def watched(
    settings: Settings, policy: Any = ReturningAMap, rank: int = 0, planned: tuple[int, int] = (LAYERS, SLOTS)
) -> WatchedPolicy:
    tensors = [torch.zeros(SLOTS // RANKS, 8, dtype=torch.float32)]
    model = SimpleNamespace(expert_weights=[tensors] * LAYERS)
    state = SimpleNamespace(model_states={"main": SimpleNamespace(physical_to_logical_map=start_map(), model=model)})
    return WatchedPolicy(settings, policy, state, planned, RANKS, rank)


def rebalance(policy: WatchedPolicy, loads: torch.Tensor, old: torch.Tensor) -> Any:
    return policy.rebalance_experts(loads, SLOTS, 1, 1, RANKS, old)


def skewed(seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy((random.dirichlet(np.full(EXPERTS, 0.3), LAYERS) * 1e5).astype(np.int64))


@pytest.mark.parametrize("name", ["vllm", "eplb"])
def test_an_empty_window_moves_nothing(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = watched(Settings(policy=name))
    with caplog.at_level(logging.INFO, "vllm.eplb"):
        assert torch.equal(rebalance(policy, torch.zeros(LAYERS, EXPERTS), start_map()), start_map())
    assert "no load in the window" in caplog.text
    assert policy.rebalances == 0


@pytest.mark.parametrize("name", ["vllm", "eplb"])
def test_a_layer_without_load_stays_while_others_move(name: Any) -> None:
    loads = skewed()
    loads[1] = 0
    new = rebalance(watched(Settings(policy=name)), loads, start_map())
    assert torch.equal(new[1], start_map()[1])
    assert not torch.equal(new[0], start_map()[0])


def test_vllm_s_own_policy_would_put_every_copy_on_the_first_expert() -> None:
    """Why the guard is there; read off the real policy."""
    default = pytest.importorskip("vllm.distributed.eplb.policy.default").DefaultEplbPolicy
    bare = default.rebalance_experts(torch.zeros(LAYERS, EXPERTS), SLOTS, 1, 1, RANKS, start_map())
    assert (bare == 0).sum(1).tolist() == [REDUNDANT + 1] * LAYERS
    guarded = rebalance(watched(Settings(), default), torch.zeros(LAYERS, EXPERTS), start_map())
    assert torch.equal(guarded, start_map())


@pytest.mark.parametrize("max_moves", [3, 5, 20])
def test_our_policy_moves_a_bounded_number_of_slots(max_moves: int) -> None:
    policy = watched(Settings(policy="eplb", max_moves=max_moves, min_gain=0.0))
    loads, old = skewed(), start_map()
    new = rebalance(policy, loads, old)
    assert 0 < int((new != old).sum()) <= max_moves
    before, after = (balancedness(rank_loads(rows.numpy(), loads.numpy()[None], RANKS)) for rows in (old, new))
    assert after > before


def test_twins_in_the_live_placement_do_not_break_the_bound() -> None:
    """vLLM's policy may leave two copies on one rank; mending them counts like any other change."""
    random = np.random.default_rng(5)
    rows = [random.permutation(np.r_[np.arange(EXPERTS), random.integers(0, 4, REDUNDANT)]) for _ in range(LAYERS)]
    old = torch.from_numpy(np.stack(rows))
    policy = watched(Settings(policy="eplb", max_moves=6, min_gain=0.0))
    for _ in range(8):
        new = rebalance(policy, skewed(), old)
        assert int((new != old).sum()) <= 6
        old = new
    before, after = (
        balancedness(rank_loads(map_, skewed().numpy()[None], RANKS)) for map_ in (np.stack(rows), old.numpy())
    )
    assert after > before


def test_our_policy_leaves_small_gains_alone() -> None:
    assert torch.equal(rebalance(watched(Settings(policy="eplb", min_gain=1.0)), skewed(), start_map()), start_map())


def test_a_server_rebalances_for_as_little_as_a_replay_does() -> None:
    assert Settings().min_gain == MIN_GAIN


def test_a_drafter_starts_from_no_plan_and_has_windows_of_its_own() -> None:
    """Told apart by their maps' shapes: its first move has no budget, and the model's stays bounded."""
    policy = watched(Settings(policy="eplb", max_moves=3), planned=(LAYERS, SLOTS))
    assert int((rebalance(policy, skewed(), start_map()) != start_map()).sum()) <= 3
    drafter = start_map()[:1]
    assert int((rebalance(policy, skewed()[:1], drafter) != drafter).sum()) > 3


def test_our_policy_is_the_same_on_every_rank() -> None:
    answers = [rebalance(watched(Settings(policy="eplb"), rank=rank), skewed(), start_map()) for rank in range(2)]
    assert torch.equal(*answers)


def test_a_policy_that_answers_with_three_maps_is_answered_in_kind() -> None:
    new, slots, counts = rebalance(watched(Settings(policy="eplb"), ReturningATriple), skewed(), start_map())
    assert counts.sum(1).tolist() == [SLOTS] * LAYERS
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            holders = (new[layer] == expert).nonzero().flatten().tolist()
            assert slots[layer, expert, : counts[layer, expert]].tolist() == holders
    assert (slots[..., -1] >= -1).all()


def test_profiling_is_left_to_vllm() -> None:
    policy = watched(Settings(policy="eplb"))
    policy.profiling = True
    assert torch.equal(rebalance(policy, torch.zeros(LAYERS, EXPERTS), start_map()), start_map().flip(1))
    assert policy.rebalances == 0


def test_each_rebalance_is_logged_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loads = torch.ones(LAYERS, EXPERTS, dtype=torch.int64)
    loads[:, 0] = 100
    old = start_map()
    with caplog.at_level(logging.INFO, "vllm.eplb"):
        new = rebalance(watched(Settings(status_dir=tmp_path)), loads, old)
    record = json.loads((tmp_path / "rebalances.json").read_text())
    moved = int((new != old).sum())
    assert (record["rebalances"], record["slots_moved"], record["bytes_moved"]) == (1, moved, moved * 32)
    assert f"{moved} of {LAYERS * SLOTS} slots change" in caplog.text
    for key, rows in (("balancedness_before", old), ("balancedness_after", new)):
        assert record[key] == balancedness(rank_loads(rows.numpy(), loads.numpy()[None], RANKS))
    quiet = watched(Settings(status_dir=tmp_path / "other"), rank=1)
    rebalance(quiet, loads, old)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name, real", [("static", 0), ("vllm", 1)])
def test_only_a_static_plan_swallows_a_rebalance(name: Any, real: int) -> None:
    """Dummy rearrangements always pass: with them vLLM measures its memory."""
    seen: list[bool] = []

    class State:
        policy = ReturningAMap

        def step(self, is_profile: bool = False) -> None:
            self.rearrange(is_profile)

        def rearrange(self, is_profile: bool = False) -> None:
            seen.append(is_profile)
            self.policy.rebalance_experts(torch.zeros(LAYERS, EXPERTS), SLOTS, 1, 1, RANKS, start_map())

    state = State()
    watch(Settings(policy=name), state, SimpleNamespace(physical_to_logical_map=start_map()), RANKS, 0)
    state.step()
    state.step(is_profile=True)
    assert (seen.count(True), seen.count(False)) == (2, real)
