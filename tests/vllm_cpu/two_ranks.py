"""Starts from a plan on two ranks: `python -m tests.vllm_cpu.two_ranks FOLDER RANK PORT WHAT SCRATCH`.

WHAT is `controls`: starts without a mistake, answers as one JSON object on stdout; `mistakes`: these, and every entry
of MISTAKES in turn, each on a model of its own; or `dies` or `hangs`: rank 1 runs out of memory in the middle of the
move, and ends or stays.

The experts move by the real transfer of the vLLM in FOLDER. The model is a few weight tensors an MoE layer, built as
vLLM builds it: the routers see views of the maps, the layers list their weights.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from eplb_cli.errors import EplbError
from eplb_cli.metrics import initial_map
from eplb_cli.placement import Placement, Provenance
from eplb_cli.vllm_plugin import move, ranks, rebalancing, status, warm_start
from eplb_cli.vllm_plugin.settings import Settings
from tests.vllm_cpu.released_eplb import RANKS, join

LAYER_IDS, EXPERTS, REDUNDANT, WIDTH = (1, 2, 4, 7), 7, 3, 12
SLOTS = EXPERTS + REDUNDANT
PER_RANK = SLOTS // RANKS


class Experts(nn.Module):
    """A rank's slots of one MoE layer; two of the tensors are alike in shape and dtype."""

    def __init__(self, layer_id: int, rank: int, held: list[int], full: list[torch.Tensor]) -> None:
        super().__init__()
        self.layer_name = f"model.layers.{layer_id}.mlp.experts"
        self.router = SimpleNamespace(eplb_state=SimpleNamespace())
        own = range(rank * PER_RANK, (rank + 1) * PER_RANK)
        self.expert_map = torch.tensor([slot - own[0] if slot in own else -1 for slot in range(SLOTS)])
        for index, tensor in enumerate(full):
            slots = torch.full((PER_RANK, *tensor.shape[1:]), 77).to(tensor.dtype)
            for place, slot in enumerate(own):
                if held[slot] >= 0:
                    slots[place] = tensor[held[slot]]
            self.register_buffer(f"w{index}", slots)

    def get_expert_weights(self) -> list[torch.Tensor]:
        return list(self.buffers())


class Model(nn.Module):
    """Decoder layers, some of them MoE layers, with experts as loaded in the given layout."""

    num_logical_experts, num_physical_experts = EXPERTS, SLOTS

    def __init__(self, rank: int, layout: str, plan: Placement) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(max(LAYER_IDS) + 1))
        for row, layer_id in zip(plan.physical_to_logical, LAYER_IDS, strict=True):
            full = [
                torch.randn(EXPERTS, 6, 4, generator=random),
                torch.randn(EXPERTS, 6, 4, generator=random),
                torch.randint(-100, 100, (EXPERTS, 5), generator=random, dtype=torch.int8),
                torch.randn(EXPERTS, 7, generator=random).to(torch.bfloat16),
                torch.randn(EXPERTS, generator=random),
            ]
            held = {
                "source": [*range(EXPERTS), *[-1] * REDUNDANT],
                "stock": [*row[:EXPERTS].tolist(), *[-1] * REDUNDANT],
                "physical": row.tolist(),
            }[layout]
            self.model.layers[layer_id].mlp = nn.Module()
            self.model.layers[layer_id].mlp.experts = Experts(layer_id, rank, held, full)
        self.moe_layers = [self.model.layers[layer_id].mlp.experts for layer_id in LAYER_IDS]
        self.expert_weights = [layer.get_expert_weights() for layer in self.moe_layers]
        start = torch.from_numpy(initial_map(EXPERTS, REDUNDANT)).long()
        self.rows = start.repeat(len(LAYER_IDS), 1)
        self.table = torch.full((len(LAYER_IDS), EXPERTS, WIDTH), -1)
        self.counts = torch.zeros((len(LAYER_IDS), EXPERTS), dtype=torch.long)
        for slot, expert in enumerate(start.tolist()):
            self.table[:, expert, self.counts[0, expert]] = slot
            self.counts[:, expert] += 1
        for index, layer in enumerate(self.moe_layers):
            layer.router.eplb_state.logical_to_physical_map = self.table[index]
            layer.router.eplb_state.logical_replica_count = self.counts[index]


class State:
    """As much of vLLM's EplbState as the start touches; its dummy step asks the release's own policy."""

    def __init__(self, model: Model) -> None:
        from vllm.distributed.eplb.policy import default

        self.parallel_config = SimpleNamespace()
        self.policy = default.DefaultEplbPolicy
        self.expert_rearrangement_step, self.expert_rearrangement_step_interval = 75, 100
        self.model_state = SimpleNamespace(
            physical_to_logical_map=model.rows,
            logical_to_physical_map=model.table,
            logical_replica_count=model.counts,
            expert_load_pass=torch.ones(len(LAYER_IDS), SLOTS),
            expert_buffer=[torch.empty_like(tensor) for tensor in model.expert_weights[0]],
            model=model,
        )
        self.model_states = {"main": self.model_state}
        with contextlib.suppress(ImportError, FileNotFoundError):
            from vllm.distributed.eplb import eplb_communicator

            # Named for NCCL, it is torch.distributed's point-to-point calls on whatever group it is given.
            self.model_state.communicator = eplb_communicator.TorchDistNcclEplbCommunicator(
                ep_group=torch.distributed.group.WORLD
            )

    def step(self, is_dummy: bool = False, is_profile: bool = False) -> None:
        self.rearrange(is_profile=is_profile)

    def rearrange(self, is_profile: bool = False) -> None:
        self.policy.rebalance_experts(
            torch.ones(len(LAYER_IDS), EXPERTS), SLOTS, 1, 1, RANKS, self.model_state.physical_to_logical_map
        )


def plan(seed: int = 0, layout: str = "source") -> Placement:
    """A random plan; in vLLM's start form for `stock`."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in LAYER_IDS:
        order = random.permutation(EXPERTS)
        spare = random.integers(0, EXPERTS, REDUNDANT)
        rows.append(np.r_[order, order[:REDUNDANT]] if layout == "stock" else random.permutation(np.r_[order, spare]))
    return Placement(
        np.stack(rows).astype(np.int32), np.array(LAYER_IDS, np.int32), EXPERTS, RANKS,
        provenance=Provenance(strategy="deepseek"),
    )  # fmt: skip


class Attempt:
    """One start on this rank, and where a mistake may be put into it."""

    def __init__(self, folder: Path, rank: int, layout: str = "source", seed: int = 0) -> None:
        self.rank = rank
        self.placement = plan(seed, layout)
        self.file = folder / f"plan-{layout}-{seed}.json"
        self.placement.save(self.file)
        self.settings = Settings(plan=self.file, layout=layout, policy="static")  # type: ignore[arg-type]
        self.model = Model(rank, layout, self.placement)
        self.state = State(self.model)
        self._undo: list[tuple[Any, str, Any]] = []

    def change(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(it)` until the attempt is over."""
        original = getattr(owner, name)
        self._undo.append((owner, name, original))
        setattr(owner, name, make(original))

    def after(self, owner: Any, name: str, do: Callable[..., None]) -> None:
        """Call `do` with the arguments of `owner.name` each time it has run."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                do(*args, **kwargs)
                return result

            return wrapped

        self.change(owner, name, make)

    def run(self) -> str | None:
        """Start; returns why it was refused, or None."""
        try:
            target = move.Target(self.settings, self.placement)
            warm_start._apply(target, self.state, self.state.model_state, self.model)
        except EplbError as error:
            return str(error)
        finally:
            for owner, name, original in reversed(self._undo):
                setattr(owner, name, original)
        return None

    def rows(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Let the move work with other rows than the plan's."""

        def make(original: Callable[..., Placement]) -> Callable[..., Placement]:
            def stage(*args: Any) -> Placement:
                right = original(*args)
                rows = np.ascontiguousarray(change(right.physical_to_logical))
                return Placement(rows, right.layer_ids, EXPERTS, RANKS, provenance=right.provenance)

            return stage

        self.change(move.Target, "stage", make)

    def maps(self, change: Callable[[Any], None]) -> None:
        """Spoil the maps just after they were written."""
        self.after(move, "write_maps", lambda model_state, stage: change(model_state))

    def weights(self, change: Callable[[list[list[torch.Tensor]]], None]) -> None:
        """Spoil this rank's weights just after the move."""
        self.after(move, "fill_slots", lambda *args: change(self.model.expert_weights))


def _exchange(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[[one, other]] = tensor[[other, one]].clone()


# The deliberate mistakes -------------------------------------------------------------------------------------------


def rows_rotated_by_a_rank(attempt: Attempt) -> None:
    attempt.rows(lambda rows: np.roll(rows, PER_RANK, 1))


def slots_of_each_rank_reversed(attempt: Attempt) -> None:
    attempt.rows(lambda rows: rows.reshape(len(rows), RANKS, PER_RANK)[:, :, ::-1].reshape(rows.shape))


def layers_reversed(attempt: Attempt) -> None:
    attempt.rows(lambda rows: rows[::-1])


def layer_index_off_by_one(attempt: Attempt) -> None:
    attempt.rows(lambda rows: np.roll(rows, 1, 0))


def first_layer_s_row_for_all(attempt: Attempt) -> None:
    attempt.rows(lambda rows: np.repeat(rows[:1], len(rows), 0))


def experts_renumbered(attempt: Attempt) -> None:
    attempt.rows(lambda rows: (rows + 1) % EXPERTS)


def another_plan_moved(attempt: Attempt) -> None:
    attempt.rows(lambda rows: plan(9).physical_to_logical)


def start_layout_kept(attempt: Attempt) -> None:
    attempt.rows(lambda rows: np.tile(initial_map(EXPERTS, REDUNDANT).astype(np.int32), (len(rows), 1)))


def layers_told_by_moe_index(attempt: Attempt) -> None:
    attempt.change(move, "_layer_ids", lambda original: lambda model: list(range(len(model.moe_layers))))


def layers_told_in_reverse(attempt: Attempt) -> None:
    attempt.change(move, "_layer_ids", lambda original: lambda model: original(model)[::-1])


def experts_swapped_in_the_router(attempt: Attempt) -> None:
    attempt.maps(lambda state: _exchange(state.logical_to_physical_map[2], 3, 5))


def experts_swapped_in_the_router_with_counts(attempt: Attempt) -> None:
    def change(state: Any) -> None:
        _exchange(state.logical_to_physical_map[1], 0, 6)
        _exchange(state.logical_replica_count[1], 0, 6)

    attempt.maps(change)


def replica_counts_all_one(attempt: Attempt) -> None:
    attempt.maps(lambda state: state.logical_replica_count.fill_(1))


def one_count_too_high(attempt: Attempt) -> None:
    attempt.maps(lambda state: state.logical_replica_count[3, 2].add_(1))


def one_copy_listed_twice(attempt: Attempt) -> None:
    def change(state: Any) -> None:
        layer, expert = (state.logical_replica_count > 1).nonzero()[0].tolist()
        state.logical_to_physical_map[layer, expert, 1] = state.logical_to_physical_map[layer, expert, 0]

    attempt.maps(change)


def router_tables_of_two_layers_exchanged(attempt: Attempt) -> None:
    def change(state: Any) -> None:
        _exchange(state.logical_to_physical_map, 0, 3)
        _exchange(state.logical_replica_count, 0, 3)

    attempt.maps(change)


def routers_wired_to_other_layers(attempt: Attempt) -> None:
    views = [vars(layer.router.eplb_state) for layer in attempt.model.moe_layers]
    for layer, view in zip(attempt.model.moe_layers, [dict(view) for view in views[::-1]], strict=True):
        vars(layer.router.eplb_state).update(view)


def router_sees_a_map_of_its_own(attempt: Attempt) -> None:
    seen = attempt.model.moe_layers[1].router.eplb_state
    seen.logical_to_physical_map = seen.logical_to_physical_map.clone()


def router_sees_counts_of_its_own(attempt: Attempt) -> None:
    seen = attempt.model.moe_layers[0].router.eplb_state
    seen.logical_replica_count = seen.logical_replica_count.clone()


def weights_without_maps(attempt: Attempt) -> None:
    attempt.change(move, "write_maps", lambda original: lambda *args: None)


def maps_of_one_rank_only(attempt: Attempt) -> None:
    if attempt.rank == 1:
        weights_without_maps(attempt)


def last_layer_s_maps_not_written(attempt: Attempt) -> None:
    def change(state: Any) -> None:
        fresh = State(Model(0, "source", attempt.placement)).model_state
        for name in ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count"):
            getattr(state, name)[3] = getattr(fresh, name)[3]

    attempt.maps(change)


def only_vllm_s_own_map_wrong(attempt: Attempt) -> None:
    attempt.maps(lambda state: _exchange(state.physical_to_logical_map[0], 0, 9))


def maps_without_weights(attempt: Attempt) -> None:
    attempt.change(move, "transfer", lambda original: lambda *args: None)


def spare_slots_trusted(attempt: Attempt) -> None:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def transfer(model_state: Any, weights: Any, old: torch.Tensor, new: torch.Tensor, group: Any) -> None:
            start = torch.from_numpy(initial_map(EXPERTS, REDUNDANT)).long().expand_as(old)
            original(model_state, weights, start, new, group)

        return transfer

    attempt.change(move, "transfer", make)


def weights_of_another_plan(attempt: Attempt) -> None:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def transfer(model_state: Any, weights: Any, old: torch.Tensor, new: torch.Tensor, group: Any) -> None:
            original(model_state, weights, old, new.roll(1, 1), group)

        return transfer

    attempt.change(move, "transfer", make)


def one_bit_changed(attempt: Attempt) -> None:
    if attempt.rank == 1:
        attempt.weights(lambda layers: layers[1][0][2].view(-1).view(torch.int32)[3].bitwise_xor_(1))


def two_words_exchanged(attempt: Attempt) -> None:
    if attempt.rank == 0:
        attempt.weights(lambda layers: _exchange(layers[3][1][4].view(-1), 0, 23))


def two_tensors_of_a_slot_exchanged(attempt: Attempt) -> None:
    def change(layers: list[list[torch.Tensor]]) -> None:
        one, other = layers[2][0][1], layers[2][1][1]
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)

    attempt.weights(change)


def slots_of_a_rank_exchanged(attempt: Attempt) -> None:
    if attempt.rank == 1:
        attempt.weights(lambda layers: [_exchange(tensor, 0, 3) for tensor in layers[0]] and None)


def one_tensor_left_behind(attempt: Attempt) -> None:
    """vLLM lists all but one of a layer's tensors."""
    attempt.model.expert_weights = [tensors[:-1] for tensors in attempt.model.expert_weights]
    attempt.state.model_state.expert_buffer.pop()


def weights_of_two_layers_exchanged(attempt: Attempt) -> None:
    layers = attempt.model.expert_weights
    layers[0], layers[2] = layers[2], layers[0]


def another_file_on_one_rank(attempt: Attempt) -> None:
    if attempt.rank == 1:
        attempt.placement = plan(5)


def file_replaced_since_it_was_checked(attempt: Attempt) -> None:
    other = attempt.file.with_name(f"other-{attempt.rank}.json")
    plan(5).save(other)
    object.__setattr__(attempt.settings, "plan", other)


def _for(layer_ids: tuple[int, ...]) -> Placement:
    rows = np.resize(plan().physical_to_logical, (len(layer_ids), SLOTS))
    return Placement(rows, np.array(layer_ids, np.int32), EXPERTS, RANKS, provenance=Provenance(strategy="deepseek"))


def plan_lacks_a_layer(attempt: Attempt) -> None:
    attempt.placement = _for((1, 2, 7))


def plan_has_a_layer_more(attempt: Attempt) -> None:
    attempt.placement = _for((1, 2, 4, 6, 7))


def file_lacks_a_layer(attempt: Attempt) -> None:
    _for((1, 2, 4)).save(attempt.file)


def file_has_a_layer_more(attempt: Attempt) -> None:
    _for((0, *LAYER_IDS)).save(attempt.file)


def loaded_in_another_layout(attempt: Attempt) -> None:
    _exchange(attempt.model.rows[2], 1, 3)


def policy_not_asked(attempt: Attempt) -> None:
    policy = attempt.state.policy
    attempt.state.rearrange = lambda is_profile=False: policy.rebalance_experts(
        torch.ones(len(LAYER_IDS), EXPERTS), SLOTS, 1, 1, RANKS, attempt.model.rows
    )


def rebalances_by_another_way(attempt: Attempt) -> None:
    attempt.state.step = lambda is_profile=False: None


def policy_asked_without_the_live_map(attempt: Attempt) -> None:
    state = attempt.state
    state.rearrange = lambda is_profile=False: state.policy.rebalance_experts(
        torch.ones(len(LAYER_IDS), EXPERTS), SLOTS, 1, 1, RANKS
    )


def moved_once_more_after_the_start(attempt: Attempt) -> None:
    """Whatever the dummy step does, the proof comes after it."""
    state = attempt.state
    rearrange = state.rearrange

    def moving(is_profile: bool = False) -> None:
        rearrange(is_profile)
        _exchange(attempt.model.rows[0], 0, 9)

    state.rearrange = moving


MISTAKES: dict[str, tuple[Callable[[Attempt], None], str]] = {
    function.__name__: (function, message)
    for function, message in (
        (rows_rotated_by_a_rank, "is said to hold expert"),
        (slots_of_each_rank_reversed, "is said to hold expert"),
        (layers_reversed, "is said to hold expert"),
        (layer_index_off_by_one, "is said to hold expert"),
        (first_layer_s_row_for_all, "is said to hold expert"),
        (experts_renumbered, "is said to hold expert"),
        (another_plan_moved, "is said to hold expert"),
        (start_layout_kept, "is said to hold expert"),
        (layers_told_by_moe_index, "the plan has no row for this MoE layer"),
        (layers_told_in_reverse, "not ascending"),
        (experts_swapped_in_the_router, "layer 4, expert 3: the router sends the expert's tokens to slots"),
        (experts_swapped_in_the_router_with_counts, "layer 2, expert 0: the router sends the expert's tokens to slots"),
        (replica_counts_all_one, "the router sends the expert's tokens to slots"),
        (one_count_too_high, "layer 7, expert 2: the router sends the expert's tokens to slots"),
        (one_copy_listed_twice, "the router sends the expert's tokens to slots"),
        (router_tables_of_two_layers_exchanged, "layer 1, expert"),
        (routers_wired_to_other_layers, "layer 1"),
        (router_sees_a_map_of_its_own, "layer 2: the router does not see the map that vLLM keeps for it"),
        (router_sees_counts_of_its_own, "layer 1: the router does not see the map that vLLM keeps for it"),
        (weights_without_maps, "is said to hold expert"),
        (maps_of_one_rank_only, "is said to hold expert"),
        (last_layer_s_maps_not_written, "layer 7"),
        (only_vllm_s_own_map_wrong, "layer 1, rank 0: slot 0 is said to hold expert"),
        (maps_without_weights, "slots hold the wrong weights"),
        (spare_slots_trusted, "slots hold the wrong weights"),
        (weights_of_another_plan, "slots hold the wrong weights"),
        (one_bit_changed, "layer 2, rank 1: slot 7 does not hold expert"),
        (two_words_exchanged, "layer 7, rank 0: slot 4 does not hold expert"),
        (two_tensors_of_a_slot_exchanged, "layer 4, rank 0: slot 1 does not hold expert"),
        (slots_of_a_rank_exchanged, "slots hold the wrong weights"),
        (one_tensor_left_behind, "slots hold the wrong weights"),
        (weights_of_two_layers_exchanged, "slots hold the wrong weights"),
        (another_file_on_one_rank, "the ranks read different plans"),
        (file_replaced_since_it_was_checked, "is said to hold expert"),
        (plan_lacks_a_layer, "layer 4: the plan has no row for this MoE layer"),
        (plan_has_a_layer_more, "layer 6: the plan has a row for a layer that is not an MoE layer of the model"),
        (file_lacks_a_layer, "layer 7: the plan's file has no row for this layer of the model"),
        (file_has_a_layer_more, "layer 0: the plan's file has a row for a layer that is not live"),
        (loaded_in_another_layout, "vLLM did not load the model in its usual start layout"),
        (policy_not_asked, "vLLM does not ask the policy"),
        (rebalances_by_another_way, "vLLM does not ask the policy"),
        (policy_asked_without_the_live_map, "old_global_expert_indices"),
        (moved_once_more_after_the_start, "layer 1, rank 0: slot 0 is said to hold expert"),
    )
}
"""What is wrong, and what the refusal says."""


def controls(folder: Path, rank: int) -> Iterator[tuple[str, Any]]:
    """Starts without a mistake, and what is said of them later."""
    for layout in ("source", "stock", "physical"):
        attempt = Attempt(folder, rank, layout)
        problem = attempt.run()
        if problem is not None:
            yield layout, problem
            continue
        started = attempt.state.eplb_plan
        right = attempt.placement.map_sha256
        at_first = started.now()
        attempt.state.rearrange()  # under a static plan nothing may come of it
        attempt.state.step()
        idle = started.now()
        _exchange(attempt.model.rows[1], 0, 9)
        yield (
            layout,
            {
                "plan_sha256": started.record["plan_sha256"] == right,
                "slots_verified": started.record["slots_verified"],
                "at first": at_first == {"live_sha256": right, "as_planned": True},
                "idle": idle == at_first,
                "moved": started.now()["as_planned"] or started.now()["live_sha256"] == right,
                "step": attempt.state.expert_rearrangement_step,
                "interval": attempt.state.expert_rearrangement_step_interval == warm_start.NEVER,
                "load": float(attempt.state.model_state.expert_load_pass.sum()),
            },
        )

    yield "empty window", _empty_window(Attempt(folder, rank), rank)


def _empty_window(attempt: Attempt, rank: int) -> list[bool]:
    """Which layers the release's own policy, watched, leaves as they are when only the second saw load."""
    planned = (len(LAYER_IDS), SLOTS)
    policy = rebalancing.WatchedPolicy(Settings(), attempt.state.policy, attempt.state, planned, RANKS, rank)
    loads = torch.zeros(len(LAYER_IDS), EXPERTS)
    loads[1] = torch.arange(EXPERTS) + 1
    old = torch.from_numpy(attempt.placement.physical_to_logical).long()
    answer = policy.rebalance_experts(loads, SLOTS, 1, 1, RANKS, old)
    return ((answer[0] if isinstance(answer, tuple) else answer) == old).all(1).tolist()


def out_of_memory(folder: Path, rank: int, stays: bool) -> None:
    """Rank 1 fails before it sends what rank 0 waits for."""
    attempt = Attempt(folder, rank)
    if rank == 1:

        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

        attempt.change(move, "transfer", lambda original: fail)
    elif stays:
        ranks.PATIENCE_SECONDS = 0.5
    attempt.settings = Settings(plan=attempt.file, policy="static", status_dir=folder / "status")
    sys.stdout.write(f"{attempt.run()}\n")
    sys.stdout.flush()
    if rank == 1 and stays:
        while len(list(status.read_records(folder / "status"))) < 2:
            time.sleep(0.1)


def main(folder: Path, rank: int, port: int, what: str, scratch: Path) -> None:
    join(folder, rank, port)
    if what in ("dies", "hangs"):
        out_of_memory(scratch, rank, what == "hangs")
        return
    answers: dict[str, Any] = dict(controls(scratch, rank))
    for name, (mistake, _) in MISTAKES.items() if what == "mistakes" else ():
        attempt = Attempt(scratch, rank)
        mistake(attempt)
        answers[name] = attempt.run()
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
