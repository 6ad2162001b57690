"""What happens to the plan at run time: the policy, a guard against windows without load, and a log of every change."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule, loads_under
from eplb_cli.errors import ServeError
from eplb_cli.metrics import balancedness
from eplb_cli.placement import Placement
from eplb_cli.planner.rebalancing import Rebalancer
from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import write_record

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WatchedPolicy", "watch"]

logger = logging.getLogger("vllm.eplb")


def watch(settings: Settings, state: Any, model_state: Any, ep_size: int, ep_rank: int) -> None:
    """Put a WatchedPolicy in the place of vLLM's policy, keep a static plan static, and prove that both are in the way.

    `model_state` is vLLM's, of the model that the plan is for; a drafter starts from vLLM's own layout.

    The proof is the dummy step with which vLLM later measures its memory: it moves nothing, and has to come past.

    Raises:
        ServeError: vLLM rebalances by another way.
    """
    planned = tuple(model_state.physical_to_logical_map.shape)
    policy = WatchedPolicy(settings, state.policy, state, planned, ep_size, ep_rank)
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

    def __init__(
        self, settings: Settings, policy: Any, state: Any, planned: tuple[int, int], ep_size: int, ep_rank: int
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._state = state
        # By the shape of their maps, which is all that vLLM tells of a model here; `planned` is that of the plan's.
        self._planned = planned
        self._rebalancers: dict[tuple[int, ...], Rebalancer] = {}
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
            proposal = self._rebalancer(rows.shape).rebalance(loads, rows)
        else:
            result = self._policy.rebalance_experts(*args, **kwargs)
            proposal = (result[0] if isinstance(result, tuple) else result).cpu().numpy().astype(np.int32)
        new = np.where(loaded[:, None], proposal, rows)
        self._report(loads, rows, new)
        return self._answer(new, old)

    def _rebalancer(self, shape: tuple[int, ...]) -> Rebalancer:
        if shape not in self._rebalancers:
            self._rebalancers[shape] = Rebalancer(
                self._ep_size,
                shape == self._planned,
                self._settings.max_moves,
                self._settings.min_gain,
                self._rule(shape),
            )
        return self._rebalancers[shape]

    def _rule(self, shape: tuple[int, ...]) -> Rule:
        """The rule that chooses copies under a map of this shape; drafters keep vLLM's, an even split on average."""
        return "balanced" if self._settings.dispatch == "balanced" and shape == self._planned else "even"

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
        rule = self._rule(old.shape)
        before, after = (balancedness(loads_under(rule, rows, loads[None], self._ep_size)) for rows in (old, new))
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
