"""What happens to the plan at run time: the policy, a guard against windows without load, and a log of every change."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import LoadsError, ServeError
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.placement import Placement
from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import write_record

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WatchedPolicy", "watch"]

logger = logging.getLogger("vllm.eplb")


def watch(settings: Settings, state: Any, ep_size: int, ep_rank: int) -> None:
    """Put a WatchedPolicy in the place of vLLM's policy, keep a static plan static, and prove that both are in the way.

    The proof is the dummy step with which vLLM later measures its memory: it moves nothing, and has to come past.

    Raises:
        ServeError: vLLM rebalances by another way.
    """
    policy = WatchedPolicy(settings, state.policy, state, ep_size, ep_rank)
    state.policy = policy
    original = state.rearrange
    signature = inspect.signature(original)

    def rearrange(*args: Any, **kwargs: Any) -> Any:
        policy.profiling = bool(signature.bind(*args, **kwargs).arguments.get("is_profile", False))
        if settings.policy == "static" and not policy.profiling:
            logger.warning("eplb: vLLM wants to rebalance a static plan; the placement stays as it is")
            return None
        return original(*args, **kwargs)

    state.rearrange = rearrange
    state.step(is_profile=True)
    if not policy.profiling or not policy.was_asked:
        raise ServeError(
            "vLLM does not ask the policy that was put in the place of its own",
            rule="a dummy step must rearrange by EplbState.rearrange and ask EplbState.policy with the live placement",
        )


class WatchedPolicy:
    """vLLM's policy or eplb's, with layers that saw no load left as they are, and each change logged.

    All ranks call it with the same numbers and must get the same answer.
    """

    def __init__(self, settings: Settings, policy: Any, state: Any, ep_size: int, ep_rank: int) -> None:
        self._settings = settings
        self._policy = policy
        self._state = state
        self._ep_size = ep_size
        self._ep_rank = ep_rank
        self._signature = inspect.signature(policy.rebalance_experts)
        self.profiling = False
        self.was_asked = False
        self.rebalances = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def rebalance_experts(self, *args: Any, **kwargs: Any) -> Any:
        """The new physical-to-logical map, int64 [L, P], or a triple of maps where this vLLM's policy returns that."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        weight, old = arguments["weight"], arguments["old_global_expert_indices"]
        self.was_asked = True
        if self.profiling:  # without load, and nothing moves
            return self._policy.rebalance_experts(*args, **kwargs)
        loads = weight.detach().cpu().numpy().astype(np.int64)
        rows = old.detach().cpu().numpy().astype(np.int32)
        loaded = loads.sum(1) > 0
        if not loaded.any():
            if self._ep_rank == 0:
                logger.info("eplb: no load in the window; the placement stays as it is")
            return self._answer(rows, old)
        if self._settings.policy == "eplb":
            proposal = self._propose(loads, rows)
        else:
            result = self._policy.rebalance_experts(*args, **kwargs)
            proposal = (result[0] if isinstance(result, tuple) else result).cpu().numpy().astype(np.int32)
        new = np.where(loaded[:, None], proposal, rows)
        self._report(loads, rows, new)
        return self._answer(new, old)

    def _propose(self, loads: npt.NDArray[np.int64], rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The live placement with as few slots changed as help most, or as it is when that gains too little.

        Seeded, and the same on every rank.
        """
        layers = np.arange(len(rows), dtype=np.int32)
        live = Placement(_without_twins(rows, loads, self._ep_size), layers, loads.shape[1], self._ep_size)
        most = max(1, rows.size // 20) if self._settings.max_moves is None else self._settings.max_moves
        request = PlanRequest(
            ep_size=self._ep_size,
            num_redundant_experts=live.num_redundant_experts,
            strategy="mean",
            effort="fast",
            folds=0,
            previous=live,
            max_moves=most,
        )
        window = ExpertLoads(loads[None], np.zeros(1, np.int64), layers)
        try:
            planned = make_plan(window, request).placement.physical_to_logical
        except LoadsError:  # every layer's traffic is on one expert: nothing can be spread
            return rows
        proposal = _within(most, rows, planned, loads, self._ep_size)
        before, after = (balancedness(rank_loads(map_, window.counts, self._ep_size)) for map_ in (rows, proposal))
        return proposal if after - before >= self._settings.min_gain else rows

    def _answer(self, new: npt.NDArray[np.int32], old: Tensor) -> Any:
        """`new` in the form in which this vLLM's policies answer."""
        import torch

        map_ = torch.from_numpy(new).to(old.device, torch.int64)
        if "tuple" not in str(self._signature.return_annotation).lower():
            return map_
        experts = int(new.max()) + 1
        stage = Placement(new, np.arange(len(new), dtype=np.int32), experts, self._ep_size)
        slots = torch.from_numpy(stage.logical_to_physical()).to(old.device, torch.int64)
        counts = torch.from_numpy(stage.replica_counts()).to(old.device)
        return map_, slots, counts

    def _report(self, loads: npt.NDArray[np.int64], old: npt.NDArray[np.int32], new: npt.NDArray[np.int32]) -> None:
        """Log a rebalance and add it to this rank's status records; on the first rank only."""
        moved = int((old != new).sum())
        self.rebalances += 1
        if self._ep_rank != 0:
            return
        before, after = (balancedness(rank_loads(rows, loads[None], self._ep_size)) for rows in (old, new))
        moved_bytes = moved * self._slot_bytes(old)
        logger.info(
            "eplb: rebalance %d: %d of %d slots change (%.1f MB), balancedness of the window "
            "(mean/max rank load) %.4f -> %.4f",
            self.rebalances,
            moved,
            new.size,
            moved_bytes / 1e6,
            before,
            after,
        )
        record = {
            "rebalances": self.rebalances,
            "slots_moved": moved,
            "bytes_moved": moved_bytes,
            "balancedness_before": before,
            "balancedness_after": after,
        }
        write_record(self._settings.status_dir, "rebalances", record)

    def _slot_bytes(self, rows: npt.NDArray[np.int32]) -> int:
        """Weight bytes of one slot of the model whose map this is (drafters have their own)."""
        for model_state in self._state.model_states.values():
            if tuple(model_state.physical_to_logical_map.shape) == rows.shape:
                return sum(
                    tensor.numel() // tensor.shape[0] * tensor.element_size()
                    for tensor in model_state.model.expert_weights[0]
                )
        return 0


def _without_twins(rows: npt.NDArray[np.int32], loads: npt.NDArray[np.int64], ep_size: int) -> npt.NDArray[np.int32]:
    """The placement with each second copy of an expert on a rank replaced by what the rank lacks and needs most.

    vLLM's policy makes such copies, which serve nothing; the planner would place their layers anew, and move much.
    """
    mended = rows.copy()
    per_rank = rows.shape[1] // ep_size
    by_rank = np.sort(rows.reshape(len(rows), ep_size, per_rank), -1)
    for layer, rank in np.unique(np.argwhere(by_rank[..., 1:] == by_rank[..., :-1])[:, :2], axis=0):
        copies = np.bincount(mended[layer], minlength=loads.shape[1])
        slots = mended[layer, rank * per_rank : (rank + 1) * per_rank]
        for slot in range(per_rank):
            if (slots[:slot] == slots[slot]).any():
                share = loads[layer] / copies
                share[slots] = -1.0
                copies[slots[slot]] -= 1
                slots[slot] = share.argmax()
                copies[slots[slot]] += 1
    return mended


def _within(
    most: int,
    old: npt.NDArray[np.int32],
    new: npt.NDArray[np.int32],
    loads: npt.NDArray[np.int64],
    ep_size: int,
) -> npt.NDArray[np.int32]:
    """`new` in the layers that gain most per changed slot, `old` in the others; at most `most` slots change."""
    changed = (old != new).sum(1)
    if changed.sum() <= most:
        return new
    peak_old, peak_new = (rank_loads(rows, loads[None], ep_size)[0].max(1) for rows in (old, new))
    gain = (peak_old - peak_new) / np.maximum(changed, 1)
    kept = old.copy()
    for layer in np.argsort(-gain, kind="stable"):
        if gain[layer] > 0 and changed[layer] <= most:
            kept[layer] = new[layer]
            most -= int(changed[layer])
    return kept
