"""Recorded routing replayed as engine steps: what each step waits for, under a plan and a rule that chooses copies.

A plan's own figures come from sums over windows and an even split of every expert over its copies. Here the recorded
ids of single tokens are put into steps of a given size, the rule chooses the copies in every step, and the busiest rank
of every step counts. Run-time policies may change the placement between steps, as in a server.
"""

from eplb_cli.replay.policies import Rebalance
from eplb_cli.replay.result import PhaseSteps, Replay, Row
from eplb_cli.replay.run import replay_traces
from eplb_cli.replay.steps import LANE_TOKENS, Step, steps_of

__all__ = ["LANE_TOKENS", "PhaseSteps", "Rebalance", "Replay", "Row", "Step", "replay_traces", "steps_of"]
