"""What is asked of the planner, and the rules that a request must keep before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eplb_cli.dispatch import RULES, STATIC_RULES, Rule
from eplb_cli.errors import UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.metrics import require_table, smallest_redundancy
from eplb_cli.placement import Placement

__all__ = [
    "EFFORTS",
    "NODE_POLICIES",
    "STRATEGIES",
    "Effort",
    "NodePolicy",
    "PlanRequest",
    "Strategy",
    "Topology",
    "topology_of",
]

Strategy = Literal["auto", "windows", "mean", "deepseek", "stock"]
Effort = Literal["fast", "normal", "thorough"]
NodePolicy = Literal["flat", "relaxed", "strict"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "windows", "mean", "deepseek", "stock")
NODE_POLICIES: tuple[NodePolicy, ...] = ("flat", "relaxed", "strict")
EFFORTS: tuple[Effort, ...] = ("fast", "normal", "thorough")


@dataclass(frozen=True)
class PlanRequest:
    """The topology to plan for and how hard to try.

    Args:
        ep_size: EP ranks G.
        num_redundant_experts: R; None takes the smallest for which E + R divides over G, "auto" sweeps (`redundancy`).
        num_nodes: nodes the ranks are spread over, in equal consecutive blocks.
        num_groups: routing groups of the model (`n_group` in config.json); None when the router has none.
        strategy: see `eplb_cli.planner`; "auto" takes "windows" when there are two windows or more, else "mean".
        dispatch: the rule that will choose among copies (`eplb_cli.dispatch`); figures are of that rule.
        effort: how much search; each level is no worse than the one before on the strategy's own objective (for
            "balanced" on that of its primaries, which the copies come after).
        seed: seeds whatever is random; recorded in the plan.
        folds: K of the contiguous K-fold cross-validation behind `held_out`; below 2 there is none.
        previous: a plan in force; moves are counted from it, and kept few.
        max_moves: most slots whose expert may change rank against `previous`; None for as many as improve.
        node_policy: with groups and several nodes: "flat" places without regard to nodes, "strict" keeps whole groups
            on nodes, "relaxed" takes NODE_PRICE for every slot off its home node.
        step_tokens: tokens of an engine step over all ranks, for what chance leaves of balance in a step.
        expert_bytes: weight bytes of one expert by layer id, for the memory that R costs.
        max_extra_gib: refuse an R whose extra weights exceed this many GiB per rank.
        model: the model's sizes, when known; MoE layers that the loads lack get the initial layout.
    """

    ep_size: int
    num_redundant_experts: int | Literal["auto"] | None = None
    num_nodes: int = 1
    num_groups: int | None = None
    strategy: Strategy = "auto"
    dispatch: Rule = "even"
    effort: Effort = "normal"
    seed: int = 0
    folds: int = 5
    previous: Placement | None = None
    max_moves: int | None = None
    node_policy: NodePolicy = "flat"
    step_tokens: int | None = None
    expert_bytes: Mapping[int, int] | None = None
    max_extra_gib: float | None = None
    model: ModelShape | None = None


@dataclass(frozen=True)
class Topology:
    """Sizes that fit together: E experts in P slots, S on each of G ranks, on M nodes, with the router's groups.

    `layer_ids` are the decoder layers of the loads.
    """

    num_experts: int
    num_slots: int
    ep_size: int
    num_nodes: int
    num_groups: int | None
    layer_ids: tuple[int, ...]

    @property
    def num_redundant_experts(self) -> int:
        """R = P - E."""
        return self.num_slots - self.num_experts

    @property
    def slots_per_rank(self) -> int:
        """S = P / G."""
        return self.num_slots // self.ep_size

    @property
    def groups_split_over_nodes(self) -> bool:
        """True when whole groups can stay on nodes and there is more than one node to keep apart."""
        return self.num_groups is not None and self.num_nodes > 1 and self.num_groups % self.num_nodes == 0


def topology_of(loads: ExpertLoads, request: PlanRequest) -> Topology:
    """Check a request, whose R is a number or None, against the loads and return the sizes it means.

    Raises:
        UsageError: the sizes do not divide, R is of no use, or the parts of the request contradict each other.
    """
    for name, value, known in (
        ("strategy", request.strategy, STRATEGIES),
        ("dispatch", request.dispatch, RULES),
        ("effort", request.effort, EFFORTS),
        ("node-policy", request.node_policy, NODE_POLICIES),
    ):
        if value not in known:
            raise UsageError(f"--{name} {value!r} is not known", rule=f"use {', '.join(known[:-1])} or {known[-1]}")
    if request.model is not None and request.model.num_experts != loads.num_experts:
        raise UsageError(
            f"the loads are of {loads.num_experts} experts, the model has {request.model.num_experts}",
            rule="loads and model must belong together",
        )
    experts, ranks, nodes, groups = loads.num_experts, request.ep_size, request.num_nodes, request.num_groups
    if ranks < 1:
        raise UsageError(f"{ranks} ranks", rule="--ep-size must be at least 1")
    require_table(loads.num_layers, experts, ranks, UsageError)
    if request.seed < 0:
        raise UsageError(f"--seed {request.seed}", rule="it must be at least 0")
    if request.max_extra_gib is not None and not request.max_extra_gib >= 0:
        raise UsageError(f"--max-extra-gib {request.max_extra_gib}", rule="it must be at least 0")
    redundant = request.num_redundant_experts
    if not isinstance(redundant, int):
        redundant = smallest_redundancy(experts, ranks)
    _check_redundancy(experts, ranks, redundant)
    if nodes < 1 or ranks % nodes:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        listed = divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
        raise UsageError(f"{ranks} ranks do not split over {nodes} nodes", rule=f"use {listed}")
    if groups is not None:
        if groups < 1 or experts % groups:
            raise UsageError(f"{experts} experts do not split into {groups} groups", rule="groups are of equal size")
        if groups % nodes:
            raise UsageError(
                f"{groups} groups do not split over {nodes} nodes",
                rule="whole groups stay on nodes only when the nodes divide them",
                hint="Leave out --num-groups to place experts without regard to groups.",
            )
    topology = Topology(experts, experts + redundant, ranks, nodes, groups, tuple(loads.layer_ids.tolist()))
    if request.node_policy != "flat" and not topology.groups_split_over_nodes:
        raise UsageError(
            f"--node-policy {request.node_policy} without expert groups on several nodes",
            hint="Pass --num-groups and --num-nodes as well.",
        )
    if request.node_policy != "flat" and request.strategy in ("deepseek", "stock"):
        raise UsageError(
            f"--node-policy {request.node_policy} with --strategy {request.strategy}",
            rule="the reference keeps whole groups on nodes by itself, and the stock map cannot",
        )
    if request.dispatch == "balanced" and request.node_policy != "flat":
        raise UsageError(
            f"--node-policy {request.node_policy} with --dispatch balanced",
            rule="the search for it does not weigh home nodes",
        )
    if request.dispatch in STATIC_RULES and request.previous is not None:
        raise UsageError(
            f"--previous with --dispatch {request.dispatch}",
            rule="moves are traded for balance only where the copies of an expert are alike",
            hint="Plan without --previous.",
        )
    if request.max_moves is not None and request.previous is None:
        raise UsageError("--max-moves without --previous", rule="moves are counted from a plan in force")
    if request.previous is not None and request.strategy in ("deepseek", "stock") and request.max_moves is not None:
        raise UsageError(
            f"--max-moves with --strategy {request.strategy}", rule="only windows and mean can trade balance for moves"
        )
    return topology


def _check_redundancy(experts: int, ranks: int, redundant: int) -> None:
    if redundant < 0:
        raise UsageError(f"{redundant} redundant experts", rule="--num-redundant-experts must be at least 0")
    if ranks == 1 and redundant:
        raise UsageError(
            f"{redundant} redundant experts on a single rank", rule="copies on one rank serve nothing; use 0"
        )
    most = experts * (ranks - 1)
    if (experts + redundant) % ranks:
        smallest = smallest_redundancy(experts, ranks)
        slots = experts + smallest
        raise UsageError(
            f"{experts} + {redundant} experts do not divide over {ranks} ranks",
            rule=f"smallest valid --num-redundant-experts is {smallest} ({slots} slots, {slots // ranks} per rank)",
        )
    if redundant > most:
        raise UsageError(
            f"{redundant} redundant experts are more than {experts} experts on {ranks} ranks can use",
            rule=f"the maximum is {most}, where every rank holds every expert",
        )
