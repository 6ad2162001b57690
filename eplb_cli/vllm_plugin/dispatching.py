"""Puts the `balanced` rule in the place of vLLM's choice of copies, proves that it is, and watches that ranks agree.

**Batches.** What the rule sees depends on where vLLM routes:

- without data parallelism all EP ranks route the same tokens: the batch is the step, and each rank decides for itself
  which of them it computes;
- with data parallelism and a layer that routes before it gathers, each EP rank has a batch of its own, and the decision
  travels with the tokens;
- with data parallelism and a layer that gathers first, all EP ranks route the same rows, padding included, of which no
  rank knows how many are others' padding: all of them count.

**Danger.** Where ranks decide for themselves and their ids differ in one token, tokens are computed twice or not at
all. So each rank keeps a digest of all its choices of each layer. The digests of all ranks are compared after each of
the first steps and after every hundredth from then on; they are sums from the start, so that no step between is left
out. When they differ, every rank stops.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_cli.dispatch import serving_slots
from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin.balanced_torch import Layer, Rule
from eplb_cli.vllm_plugin.proof import LiveLayer
from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import write_record

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Agreement", "choose_by_load", "is_due", "watch_steps"]

logger = logging.getLogger("vllm.eplb")

FIRST_STEPS = 10
"""After each of these the ranks compare their choices."""
STEPS = 100
"""After every so many they do from then on."""
REMEMBERED = 32
"""Compared steps whose balancedness is shown together."""
PROBE_TOKENS = 97


def is_due(step: int) -> bool:
    """Whether the ranks compare their choices after this step, counted from 1."""
    return step <= FIRST_STEPS or step % STEPS == 0


class RoutedByLoad:
    """Stands for one router's `_apply_eplb_mapping`: logical ids [n, k] in, physical ids out, loads recorded."""

    def __init__(self, layer: int, module: Any, rule: Rule, served: Tensor, digest: Tensor, gathers: bool) -> None:
        self.was_called = False
        self._layer = layer
        self._module = module
        self._rule = rule
        self._served = served
        self._digest = digest
        self._gathers = gathers
        if served.device.type == "cpu":
            from eplb_cli.vllm_plugin.balanced_torch import map_and_record
        else:
            from eplb_cli.vllm_plugin.balanced_triton import map_and_record
        self._map_and_record: Callable[..., Tensor] = map_and_record

    def __call__(self, topk_ids: Tensor) -> Tensor:
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id

        self.was_called = True
        if self._module.do_naive_dispatch_combine != self._gathers:
            raise ServeError("the layer's dispatch has changed since the start", layer=self._layer)
        seen = self._module.router.eplb_state
        rows = seen.num_unpadded_tokens_tensors[dbo_current_ubatch_id()]
        layer = Layer(
            seen.logical_to_physical_map,
            seen.logical_replica_count,
            seen.expert_load_view,
            seen.should_record_tensor,
            self._served,
            self._digest,
        )
        return self._map_and_record(topk_ids, self._rule, layer, counted=None if self._gathers else rows, recorded=rows)


@dataclass(frozen=True)
class Agreement:
    """What a rank keeps of its choices.

    Args:
        layer_ids: the decoder layer of each row, ascending.
        routed: what stands in the routers.
        served: int64 [L, P], tokens per slot since the last comparison was prepared.
        digests: int64 [L, 1], of all choices.
        shared: all EP ranks see the same batch and must choose alike.
        gathers: the layers gather the ranks' rows before they route.
        ep_size: G.
    """

    layer_ids: list[int]
    routed: list[RoutedByLoad]
    served: Tensor
    digests: Tensor
    shared: bool
    gathers: bool
    ep_size: int

    def own(self, *, is_dummy: bool) -> Tensor:
        """This rank's numbers, int64 [L, 1 + G] on the CPU: the digest, and the tokens that it sent to each rank."""
        import torch

        by_rank = self.served.reshape(len(self.layer_ids), self.ep_size, -1).sum(2)
        return torch.cat([self.digests, by_rank * (not is_dummy)], 1).cpu()

    def loads(self, everyone: list[Tensor]) -> Tensor:
        """Tokens of each rank in the step, int64 [L, G], from every rank's numbers.

        Raises:
            ServeError: ranks that see the same batch have chosen differently.
        """
        if not self.shared:
            return sum(numbers[:, 1:] for numbers in everyone)  # type: ignore[return-value]
        for rank, numbers in enumerate(everyone):
            rows = (numbers[:, 0] != everyone[0][:, 0]).nonzero()
            if len(rows):
                raise ServeError(
                    f"ranks 0 and {rank} have sent tokens to different copies",
                    layer=self.layer_ids[int(rows[0])],
                    rank=rank,
                    rule="all ranks that share a batch must see the same expert ids; tokens are computed twice or not "
                    "at all where they do not",
                    hint="Serve with --dispatch hash, and report the model and the flags.",
                )
        return everyone[0][:, 1:]


def choose_by_load(
    settings: Settings, state: Any, rows: Mapping[int, list[int]], live: Mapping[int, LiveLayer], ep_size: int
) -> Agreement:
    """Put the rule into every router of this worker, and prove on a batch of its own that the router asks it.

    Args:
        settings: the price.
        state: vLLM's EPLB state.
        rows: the map in force, by decoder layer.
        live: the layers, by decoder layer.
        ep_size: G.

    Raises:
        ServeError: a layer routes where the rule cannot be put, or the probe's ids are not the plain rule's.
    """
    import torch

    parallel = state.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ServeError("--dispatch balanced with prefill context parallelism", rule="its ranks see parts of a batch")
    alone = parallel.data_parallel_size == 1
    gathers = any(_gathers(layer, found.module) for layer, found in live.items())
    batches = 1 if alone or gathers else ep_size
    slots = len(next(iter(rows.values())))
    price = settings.copy_cost_tokens // batches
    device = next(iter(live.values())).module.router.eplb_state.expert_load_view.device
    rule = Rule.on(device, ep_size, slots, price, whole_step=batches == 1)
    served = torch.zeros((len(live), slots), dtype=torch.int64, device=device)
    digests = torch.zeros((len(live), 1), dtype=torch.int64, device=device)
    routed = []
    for index, layer in enumerate(sorted(live)):
        module = live[layer].module
        if _gathers(layer, module) != gathers:
            raise ServeError("some layers gather tokens before they route, others after", layer=layer)
        splits = module.moe_config.is_sequence_parallel
        if not alone and not gathers and parallel.tensor_parallel_size > 1 and not splits:
            raise ServeError(
                "tensor parallel ranks share the batch of their data parallel rank",
                layer=layer,
                rule="--dispatch balanced needs a step that is one batch, or a batch of its own on every EP rank",
                hint="Use --tensor-parallel-size 1, or --dispatch hash.",
            )
        mapping = RoutedByLoad(layer, module, rule, served[index], digests[index], gathers)
        module.router._apply_eplb_mapping = mapping
        _probe(layer, module, rule, rows[layer], gathers)
        mapping.was_called = False
        routed.append(mapping)
    served.zero_()
    digests.zero_()
    return Agreement(sorted(live), routed, served, digests, batches == 1, gathers, ep_size)


def _gathers(layer: int, module: Any) -> bool:
    """Whether the layer's router sees all ranks' rows; refuses layers whose router the rule cannot be put into."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    router = getattr(module, "router", None)
    if not isinstance(router, BaseRouter) or type(router)._apply_eplb_mapping is not BaseRouter._apply_eplb_mapping:
        raise ServeError(
            f"{type(module if router is None else router).__name__} maps experts to slots in its own way",
            layer=layer,
            rule="--dispatch balanced replaces BaseRouter._apply_eplb_mapping",
            hint="Serve with --dispatch hash.",
        )
    return bool(module.do_naive_dispatch_combine)


def _probe(layer: int, module: Any, rule: Rule, row: list[int], gathers: bool) -> None:
    """Let the router map a batch, with padding and missing ids, and compare with the plain rule; counts nothing."""
    import torch

    seen = module.router.eplb_state
    experts = seen.logical_replica_count.shape[0]
    random = np.random.default_rng(layer)
    # A few experts have most of the tokens, so that copies open.
    ids = random.integers(0, experts, (PROBE_TOKENS, module.router.top_k)) // random.integers(1, 9, (PROBE_TOKENS, 1))
    ids[::13, 0] = -1
    real = PROBE_TOKENS if gathers else PROBE_TOKENS - 9
    rows, switch = seen.num_unpadded_tokens_tensors[0], seen.should_record_tensor
    before = rows.clone(), switch.clone()
    rows.fill_(real)
    switch.fill_(False)
    chosen = module.router._apply_eplb_mapping(torch.from_numpy(ids).to(rows.device, torch.int32))
    rows.copy_(before[0])
    switch.copy_(before[1])
    expected = serving_slots(ids, real, np.array(row), experts, rule.ep_size, rule.price, whole_step=rule.whole_step)
    wrong = np.argwhere(chosen.cpu().numpy() != expected)
    if len(wrong):
        token, place = wrong[0]
        raise ServeError(
            f"the router sends expert {ids[token, place]} of a trial batch to slot {int(chosen[token, place])} "
            f"({len(wrong)} of {expected.size} choices are wrong)",
            layer=layer,
            rule=f"the rule says slot {expected[token, place]}",
            hint="Serve with --dispatch hash, and report the device and the versions of vLLM and Triton.",
        )


def watch_steps(settings: Settings, state: Any, agreement: Agreement, group: Any) -> None:
    """Compare the ranks' choices after steps, and keep a status record of how balanced those steps were.

    `EplbState.step` comes after every step on all EP ranks alike: vLLM itself rebalances there, together.
    """
    import torch
    import torch.distributed as dist

    original = state.step
    signature = inspect.signature(original)
    recent: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
    steps = 0

    def compare(is_dummy: bool) -> None:
        mine = agreement.own(is_dummy=is_dummy)
        everyone = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(everyone, mine, group=group.cpu_group)
        missing = [
            layer for layer, each in zip(agreement.layer_ids, agreement.routed, strict=True) if not each.was_called
        ]
        if missing:
            raise ServeError(
                "the router has not asked --dispatch balanced in a step",
                layer=missing[0],
                rule="vLLM would choose copies by another rule",
            )
        if agreement.gathers and steps == 1:
            # Warm-up is in these digests, whose batches need not be alike.
            agreement.digests.zero_()
            return
        loads = agreement.loads(everyone).double()
        recent.append((float(loads.mean(1).sum()), float(loads.max(1).values.sum())))
        if group.rank_in_group == 0:
            means, peaks = (sum(part) for part in zip(*recent, strict=True))
            record = {"steps": steps, "balancedness": means / peaks if peaks else None}
            write_record(settings.status_dir, "dispatch", record)

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("is_profile", False):
            return original(*args, **kwargs)
        steps += 1
        if is_due(steps):
            try:
                compare(bool(arguments.get("is_dummy", False)))
            except ServeError as error:
                write_record(settings.status_dir, f"failed-{os.getpid()}", {"error": str(error)})
                logger.critical("eplb: %s; the server stops", error)
                raise
        if is_due(steps + 1):
            agreement.served.zero_()
        return original(*args, **kwargs)

    state.step = step
