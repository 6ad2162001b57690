"""JSON of placement files: strict on the way in, stable to the byte on the way out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import PlacementError
from eplb_cli.untrusted import MOST_DEPTH, shown

__all__ = ["integer", "parse_yaml", "row_lines", "rows_of", "section"]

_NO_KEY = object()


def section(document: Any, keys: set[str], what: str, *, optional: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    """`document` as an object with exactly these keys.

    Raises:
        PlacementError: it is none, lacks a key, or has one more.
    """
    if not isinstance(document, dict):
        raise PlacementError(f"{what} is not an object")
    missing, unknown = keys - document.keys(), [key for key in document if key not in keys | optional]
    if missing or unknown:
        raise PlacementError(
            f"{what} lacks {sorted(missing)}" if missing else f"{what} has the unknown keys {shown(unknown)}",
            rule=f"its keys must be {sorted(keys)}",
        )
    return document


def integer(value: Any, what: str) -> int:
    """A whole number >= 0 of 31 bits.

    Raises:
        PlacementError: it is none.
    """
    if type(value) is not int or not 0 <= value < 2**31:
        raise PlacementError(f"{what} is {shown(value)}", rule="a whole number >= 0 that fits in 32 bits is expected")
    return value


def rows_of(value: Any, what: str) -> npt.NDArray[np.int64]:
    """A list of equally long lists of whole numbers, int64 [n, P].

    Raises:
        PlacementError: it is none, with the row that is not.
    """
    if not isinstance(value, list) or not value:
        raise PlacementError(f"{what} is no list of rows")
    for index, row in enumerate(value):
        if not isinstance(row, list) or not row or any(type(expert) is not int for expert in row):
            raise PlacementError(f"{what}: row {index} is no list of whole numbers")
        if len(row) != len(value[0]):
            raise PlacementError(
                f"{what}: row {index} has {len(row)} slots", rule=f"row 0 has {len(value[0])}; all layers have as many"
            )
        if max(row) >= 2**31 or min(row) < -(2**31):
            raise PlacementError(f"{what}: row {index} holds {max(row, key=abs)}", rule="ids fit in 32 bits")
    return np.array(value, np.int64)


def parse_yaml(content: bytes) -> Any:
    """A YAML document of mappings, lists, decimal whole numbers and text.

    Anchors, aliases and merges can blow a small file up without end, and tags run constructors: all are refused. So are
    repeated keys, of which YAML keeps the last without a word. What is not a decimal number stays text.

    Raises:
        PlacementError: it is none.
    """
    import yaml

    done: list[Any] = []
    open_: list[tuple[Any, Any]] = []  # the containers around, each with the key whose value comes next
    try:
        for event in yaml.parse(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise PlacementError("holds an anchor, an alias or a tag", row=event.start_mark.line + 1)
            if isinstance(event, yaml.ScalarEvent):
                whole = event.implicit[0] and re.fullmatch(r"-?(0|[1-9][0-9]{0,63})", event.value)
                value: Any = int(event.value) if whole else event.value
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                open_.append(({} if isinstance(event, yaml.MappingStartEvent) else [], _NO_KEY))
                if len(open_) > MOST_DEPTH:
                    raise PlacementError("is nested too deep", rule=f"at most {MOST_DEPTH} levels are read")
                continue
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                value = open_.pop()[0]
            else:
                continue
            if not open_:
                done.append(value)
                continue
            around, key = open_[-1]
            if isinstance(around, list):
                around.append(value)
            elif key is not _NO_KEY:
                around[key] = value
                open_[-1] = around, _NO_KEY
            elif not isinstance(value, int | str) or value in around:
                raise PlacementError(f"has the key {shown(value)} twice, or as a key", row=event.start_mark.line + 1)
            else:
                open_[-1] = around, value
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PlacementError(f"is not YAML: {' '.join(str(error).split())}") from None
    if len(done) != 1:
        raise PlacementError(f"holds {len(done)} YAML documents", rule="one is expected")
    return done[0]


def row_lines(rows: npt.NDArray[np.int32]) -> str:
    """Rows as JSON, one a line."""
    return ",\n".join(json.dumps(row.tolist()) for row in rows)
