"""JSON and text of the output compared with the source's, by value and type, with names of experts read back.

Shares nothing with the writer: names are taken apart at their dots, and the output's ids are looked up in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eplb_cli.untrusted import shown

__all__ = ["ExpertName", "ExpertNames"]


class ExpertName(NamedTuple):
    """A module's or tensor's name with the expert's id taken out."""

    before: tuple[str, ...]
    layer: int
    id: int
    after: tuple[str, ...]

    def of(self, expert: str) -> str:
        """The same name of another expert."""
        return ".".join((*self.before, expert, *self.after))


@dataclass(frozen=True)
class ExpertNames:
    """How names of experts read in the output.

    Args:
        rows: source expert of each id in the output, by MoE layer; empty where names do not change.
        drafts: modules of draft heads, whose experts keep their ids.
    """

    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    drafts: Sequence[str] = ()

    def differences(self, before: Any, after: Any, path: str = "") -> Iterator[str]:
        """Where a JSON value is not what it must be, in words.

        Values are compared with their types: 1, 1.0, true and "1" differ. Order counts in lists, not in objects. An
        expert's key stands there once for each of its ids, and so does its entry in a list, in ascending order.

        Args:
            before: the source's value, or what must be there.
            after: the output's.
            path: where both stand in the document.
        """
        where = path or "the document"
        if isinstance(before, dict) and isinstance(after, dict):
            yield from self._object_differences(before, after, path)
        elif isinstance(before, list) and isinstance(after, list):
            yield from self._list_differences(before, after, path)
        elif isinstance(before, str) and isinstance(after, str):
            if self._ids(before, [after]) is None or self._copies(before) != 1:
                yield f"{where} is {shown(after)}, must be {self._wanted(before)}"
        elif type(before) is not type(after) or repr(before) != repr(after):
            # Numbers by their text: NaN is no different from itself, 0.0 is from -0.0.
            yield f"{where} is {shown(after)}, must be {shown(before)}"

    def same_text(self, before: str, after: str) -> bool:
        """Whether a text equals the source's but for names of experts, each of which has one id."""

        def back(match: re.Match[str]) -> str:
            name = self.parse(match[0])
            if name is None:
                return match[0]
            row = self.rows[name.layer]
            if name.id >= len(row) or row.count(row[name.id]) != 1:
                return "?"
            return name.of(str(row[name.id]))

        return re.sub(r"[A-Za-z0-9_.*]+", back, after) == before

    def parse(self, text: str) -> ExpertName | None:
        """A name of an expert of a MoE layer; None for every other text."""
        if not self.rows or "experts." not in text or any(text.startswith(f"{draft}.") for draft in self.drafts):
            return None
        parts = text.split(".")
        layer = -1
        for at, part in enumerate(parts[:-1]):
            if part == "layers" and _is_number(parts[at + 1]):
                layer = int(parts[at + 1])
            if part == "experts" and layer in self.rows:
                # The id follows the module, or the projection where that comes first.
                for place in (at + 1, at + 2):
                    if place < len(parts) and _is_number(parts[place]):
                        return ExpertName(tuple(parts[:place]), layer, int(parts[place]), tuple(parts[place + 1 :]))
        return None

    def _object_differences(self, before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[str]:
        found: dict[str, list[str]] = {}
        for key in after:
            found.setdefault(self._back(key), []).append(key)
        for key, item in before.items():
            keys = found.pop(key, [])
            if len(keys) != self._copies(key):
                yield f"{_joined(path, key)} is missing" if not keys else f"{_joined(path, key)} lacks copies"
            for new in keys:
                yield from self.differences(item, after[new], _joined(path, new))
        for keys in found.values():
            yield f"{_joined(path, keys[0])} must not be there"

    def _list_differences(self, before: Sequence[Any], after: Sequence[Any], path: str) -> Iterator[str]:
        at = 0
        for item in before:
            if not isinstance(item, str):
                if at >= len(after):
                    break
                yield from self.differences(item, after[at], f"{path}[{at}]")
                at += 1
                continue
            entries = after[at : at + self._copies(item)]
            ids = self._ids(item, entries)
            if ids is None or ids != sorted(set(ids)):
                yield f"{path}[{at}] is {shown(after[at])}, must be {self._wanted(item)}"
                # What follows has moved, and would differ all along.
                return
            at += len(entries)
        wanted = sum(map(self._copies, before))
        if len(after) != wanted:
            yield f"{path or 'the document'} has {len(after)} entries, must have {wanted}"

    def _ids(self, name: str, entries: Sequence[Any]) -> list[int] | None:
        """The output's ids in entries that all read back as `name`; None where one does not."""
        if any(not isinstance(entry, str) or self._back(entry) != name for entry in entries):
            return None
        parsed = [self.parse(entry) for entry in entries]
        return [index if found is None else found.id for index, found in enumerate(parsed)]

    def _copies(self, name: Any) -> int:
        """How often a name of the source stands in the output."""
        parsed = self.parse(name) if isinstance(name, str) else None
        return 1 if parsed is None else self.rows[parsed.layer].count(parsed.id)

    def _back(self, name: str) -> str:
        """The source's name for one of the output's."""
        parsed = self.parse(name)
        if parsed is None:
            return name
        row = self.rows[parsed.layer]
        expert = str(row[parsed.id]) if parsed.id < len(row) else "?"
        return parsed.of(expert)

    def _wanted(self, name: str) -> str:
        parsed = self.parse(name)
        if parsed is None:
            return shown(name)
        ids = [index for index, expert in enumerate(self.rows[parsed.layer]) if expert == parsed.id]
        return f"{shown(name)} by the ids {ids}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and (text == "0" or text[0] != "0")


def _joined(path: str, key: str) -> str:
    key = key if key.isprintable() and len(key) <= 200 else shown(key)
    return f"{path}.{key}" if path else key
