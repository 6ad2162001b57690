"""Makes vLLM's run-time EPLB start from a plan, on all ranks of an EP group or on none.

Runs when vLLM has loaded the model and registers it with EPLB, before any request, warm-up or graph capture: the plan
is checked against the model (`move`), what is loaded is written down (`proof`), experts and maps are moved (`move`),
the run-time policy and the rule that chooses copies are put in place (`rebalancing`, `dispatching`), and what is live
then is compared with the plan's file (`proof`). A failure of one rank stops all of them (`ranks`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import socket
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin import dispatching, move, proof, rebalancing
from eplb_cli.vllm_plugin.move import Target
from eplb_cli.vllm_plugin.ranks import Ranks
from eplb_cli.vllm_plugin.status import write_record

__all__ = ["NEVER", "Started", "require_plan", "start_from_plan"]

logger = logging.getLogger("vllm.eplb")

NEVER = 1 << 62
"""A rebalance interval in steps that no server lives to see."""


@dataclass(frozen=True)
class Started:
    """What a worker needs to say later whether the plan still is live; kept on vLLM's EPLB state as `eplb_plan`.

    Args:
        record: what was proven, as in the status record.
        wanted: the plan's file.
        model_state, model: vLLM's, of the model that the plan is for.
        all_layers: the worker holds all layers of the model.
    """

    record: dict[str, Any]
    wanted: proof.Wanted
    model_state: Any
    model: Any
    all_layers: bool

    def now(self) -> dict[str, Any]:
        """Whether the maps that the routers use are the plan's, and their digest."""
        live = proof.live_layers(self.model_state, self.model)
        return {
            "live_sha256": proof.live_sha256(self.wanted, live),
            "as_planned": proof.fault(self.wanted, live, all_layers=self.all_layers) is None,
        }


_in_force = False


def start_from_plan(target: Target, module: ModuleType) -> None:
    """Hook `EplbState.add_model`, which vLLM calls once for each loaded model."""
    original = module.EplbState.add_model
    signature = inspect.signature(original)

    @functools.wraps(original)
    def add_model(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        known = set(self.model_states)
        original(self, *args, **kwargs)
        if _is_drafter(arguments["model_config"]):
            logger.info("eplb: the drafter keeps vLLM's own expert layout")
            return
        added = [state for key, state in self.model_states.items() if key not in known]
        scaled_up = arguments.get("global_expert_load") is not None
        _apply(target, self, added[0] if len(added) == 1 and not scaled_up else None, arguments["model"])

    module.EplbState.add_model = add_model


def require_plan(target: Target, module: ModuleType) -> None:
    """Stop a worker whose model is loaded but was never registered with EPLB, and one that would reload weights."""
    original = module.WorkerWrapperBase.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _in_force:
            problem = ServeError(
                "a plan was asked for, but vLLM loaded the model without EPLB",
                rule="--enable-eplb must be on and the model must be a mixture of experts that supports it",
            )
            write_record(target.settings.status_dir, f"failed-{os.getpid()}", {"error": str(problem)})
            raise problem
        return original(self, *args, **kwargs)

    module.WorkerWrapperBase.initialize_from_config = initialize_from_config

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ServeError(
            "weights cannot be reloaded under a plan",
            rule="vLLM would load them in its own layout while the maps keep the plan's",
            hint="Restart the server with the new weights.",
        )

    # Reached through collective_rpc; shadows the model runner's method of the same name.
    module.WorkerWrapperBase.reload_weights = reload_weights


def _is_drafter(model_config: Any) -> bool:
    if getattr(model_config, "runner_type", None) == "draft" or getattr(model_config, "runner", None) == "draft":
        return True
    from vllm.config import get_current_vllm_config

    speculative = getattr(get_current_vllm_config(), "speculative_config", None)
    return speculative is not None and getattr(speculative, "draft_model_config", None) is model_config


def _apply(target: Target, state: Any, model_state: Any | None, model: Any) -> None:
    """Put the plan in force and prove it, on every EP rank.

    Raises:
        ServeError: on every rank alike, when one of them cannot go on.
    """
    global _in_force
    from vllm.distributed.parallel_state import get_ep_group, get_pp_group

    started = time.monotonic()
    settings, group, stages = target.settings, get_ep_group(), get_pp_group()
    name = f"stage{stages.rank_in_group}-rank{group.rank_in_group}"

    def tell(error: ServeError) -> None:
        write_record(settings.status_dir, name, {"error": str(error), "ep_rank": group.rank_in_group})

    try:
        with Ranks(group, tell) as ranks:
            record = _start(target, state, model_state, model, ranks, group, stages)
            record["seconds"] = round(time.monotonic() - started, 3)
            # Each node sees its own files only, so each holds the records of all.
            everyone = ranks.together(lambda: ranks.gather(record))
    except ServeError as error:
        tell(error)
        raise
    write_record(settings.status_dir, name, {**record, "ranks": everyone})
    _in_force = True
    if group.rank_in_group == 0:
        logger.info(
            "eplb: the plan %s (sha256 %s) is in force: %d experts in %d slots on %d EP ranks, %d MoE layers, "
            "all slots verified in %.1f s; rebalancing at run time: %s; copies are chosen by: %s",
            settings.plan,
            record["plan_sha256"][:16],
            target.placement.num_experts,
            target.placement.num_slots,
            record["ep_size"],
            len(record["layer_ids"]),
            record["seconds"],
            {"static": "never", "vllm": "vLLM's policy", "eplb": "eplb's planner"}[settings.policy],
            settings.dispatch,
        )


def _start(
    target: Target, state: Any, model_state: Any, model: Any, ranks: Ranks, group: Any, stages: Any
) -> dict[str, Any]:
    """The steps of the module's text; returns what this rank has proven."""
    settings, all_layers = target.settings, stages.world_size == 1
    stage = ranks.agree(lambda: move.stage_of(target, state, model_state, model, group.world_size, all_layers))

    def look() -> tuple[proof.Wanted, dict[int, proof.LiveLayer], dict[int, dict[int, int]]]:
        live = proof.live_layers(model_state, model)
        return proof.Wanted.read(settings.plan, settings.layout), live, proof.own_slots(live)  # type: ignore[arg-type]

    wanted, live, own = ranks.agree(look)
    plans = ranks.together(lambda: ranks.gather(target.placement.map_sha256))
    if len(set(plans)) > 1:
        raise ServeError(
            f"the ranks read different plans: {[digest[:12] for digest in plans]}",
            rule="every node must see the same plan file",
            hint="Copy the plan, or the converted folder, to all nodes again.",
        )
    loaded = ranks.together(lambda: ranks.gather(own))
    first = ranks.agree(lambda: proof.first_copies(wanted, live, proof.all_slots(loaded), settings.layout))
    if settings.layout != "physical":  # whose loader has filled every slot under its own number
        ranks.together(lambda: move.fill_slots(state, model_state, model, stage, group))
    ranks.agree(lambda: move.write_maps(model_state, stage))
    ranks.together(lambda: rebalancing.watch(settings, state, model_state, stage.ep_size, group.rank_in_group))
    if settings.dispatch == "balanced":
        rows = {int(layer): row.tolist() for layer, row in zip(stage.layer_ids, stage.physical_to_logical, strict=True)}
        agreement = ranks.agree(lambda: dispatching.choose_by_load(settings, state, rows, live, stage.ep_size))
        dispatching.watch_steps(settings, state, agreement, group)
    state.expert_rearrangement_step = 0
    model_state.expert_load_pass.zero_()
    if settings.policy == "static":
        state.expert_rearrangement_step_interval = NEVER

    def prove() -> str:
        fault = proof.fault(wanted, live, all_layers=all_layers, weights=(proof.all_slots(held), first))
        if fault is not None:
            raise fault
        return proof.live_sha256(wanted, live)

    wanted, live, own = ranks.agree(look)  # the file anew as well
    held = ranks.together(lambda: ranks.gather(own))
    digest = ranks.agree(prove)
    record = {
        "plan_sha256": digest,
        "ep_rank": group.rank_in_group,
        "ep_size": group.world_size,
        "pp_rank": stages.rank_in_group,
        "pp_size": stages.world_size,
        "host": socket.gethostname(),
        "layer_ids": sorted(live),
        "slots": stage.num_layers * stage.slots_per_rank,
        "slots_verified": sum(map(len, own.values())),
        "policy": settings.policy,
        "dispatch": settings.dispatch,
        **({"copy_cost_tokens": settings.copy_cost_tokens} if settings.dispatch == "balanced" else {}),
    }
    state.eplb_plan = Started(record, wanted, model_state, model, all_layers)
    return record
