"""Readers of expert loads as recorders write them, one module a recorder, and the rules they share."""

from eplb_cli.traces.pipeline import Profile
from eplb_cli.traces.protocol import Counters, RankDumps, ReadOptions
from eplb_cli.traces.registry import READERS, read_traces

__all__ = ["READERS", "Counters", "Profile", "RankDumps", "ReadOptions", "read_traces"]
