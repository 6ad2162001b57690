"""Readers of expert loads as recorders write them, one module a recorder, and the rules they share."""

from eplb_cli.traces.pipeline import Profile
from eplb_cli.traces.protocol import Counters, RankDumps, ReadOptions
from eplb_cli.traces.registry import READERS, open_recordings, read_traces
from eplb_cli.traces.tokens import RecordedTokens, recorded_tokens

__all__ = [
    "READERS",
    "Counters",
    "Profile",
    "RankDumps",
    "ReadOptions",
    "RecordedTokens",
    "open_recordings",
    "read_traces",
    "recorded_tokens",
]
