"""Placement algorithms: arrays in, arrays out; no files, no printing.

Letters, here and in docs/planner.md: W windows, T of them that are looked at one by one, L MoE layers, E logical
experts, R redundant experts, P = E + R physical slots, G EP ranks, S = P / G slots per rank; w loads, c copies, C
second moments over windows.
"""

from eplb_cli.planner.nodes import NodeOption
from eplb_cli.planner.plan import Figures, PlanResult, WorstLayer, make_plan
from eplb_cli.planner.request import EFFORTS, NODE_POLICIES, STRATEGIES, Effort, NodePolicy, PlanRequest, Strategy
from eplb_cli.planner.scoring import Score, score

__all__ = [
    "EFFORTS",
    "NODE_POLICIES",
    "STRATEGIES",
    "Effort",
    "Figures",
    "NodeOption",
    "NodePolicy",
    "PlanRequest",
    "PlanResult",
    "Score",
    "Strategy",
    "WorstLayer",
    "make_plan",
    "score",
]
