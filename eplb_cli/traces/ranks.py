"""Files of several ranks: which are there, and which are missing."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from eplb_cli.errors import TraceError
from eplb_cli.traces.protocol import RankDumps, Recording

__all__ = ["check_ranks", "missing_numbers", "name_gaps"]

MOST_NAMED = 64
"""A file's own numbers say how many are missing: as many as they like."""


def missing_numbers(present: Collection[int], *, first: int | None = None, last: int | None = None) -> list[int]:
    """The first whole numbers between the least and the greatest (or the given ends) that are absent."""
    if not present:
        return []
    low, high = min(present) if first is None else first, max(present) if last is None else last
    there = set(present)
    return list(islice((number for number in range(low, high + 1) if number not in there), MOST_NAMED))


def check_ranks(present: Collection[int], recording: Recording, *, expected: int | None = None) -> None:
    """Refuse a recording that lacks ranks: a partial sum looks like a skewed load.

    Args:
        present: rank numbers of the files.
        expected: how many ranks there were, when the recorder tells.

    Raises:
        TraceError: a rank below the highest, or below `expected`, is missing; not with `--rank-dumps sum`, which warns.
    """
    if recording.replicas:
        return
    absent = missing_numbers(present, first=0, last=None if expected is None else max(expected - 1, *present))
    if absent:
        text = f"the files of ranks {absent} are missing; ranks {sorted(present)} are there"
        if recording.options.rank_dumps is not RankDumps.sum:
            raise TraceError(
                text, file=recording.folder, hint="Add their files, or pass --rank-dumps sum to go on without them."
            )
        recording.warnings.append(text)
    elif len(present) == 1 and expected is None:
        # A note, not kept in the profile: one of several identical dumps must give the bytes that all of them give.
        recording.notes.append("there is one rank's file only; is this one rank's dump of several?")
    elif len(present) > 1:
        recording.notes.append(f"the dumps of {len(present)} ranks were added")


def name_gaps(steps: Collection[int], recording: Recording, what: str) -> None:
    """Warn of steps that are missing between the first and the last."""
    absent = missing_numbers(steps)
    if absent:
        number = max(steps) - min(steps) + 1 - len(set(steps))
        shown = ", ".join(map(str, absent[:8])) + (", ..." if number > 8 else "")
        noun = what if number == 1 else f"{what}s"
        recording.warnings.append(f"{number} {noun} missing between the first and the last: {shown}")
