"""Fields: typed reading of a config.json, whose values anybody may have written.

Every value that the code reads has a type and a sane bound here, so that none of them ends in a TypeError, an endless
loop, or an array of the whole memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from eplb_cli.errors import CheckpointError
from eplb_cli.untrusted import shown

__all__ = ["MOST_EXPERTS", "MOST_LAYERS", "MOST_SIZE", "Fields"]

MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000
MOST_SIZE = 1 << 24
"""Bounds of counts and of tensor axes: far above any model, far below what hurts."""

T = TypeVar("T")


class Fields:
    """One object of a config.json. A key that is absent and one that is null are the same.

    Args:
        values: the object.
        place: how messages call the object ("text_config."), nothing for the document itself.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.values = values
        self.place = place

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, *, least: int = 1, most: int = MOST_SIZE) -> int:
        """An integer that must be there.

        Raises:
            CheckpointError: it is not, it is no integer, or it is out of bounds.
        """
        if key not in self:
            raise CheckpointError(f"`{self.place}{key}` is missing", rule=f"it must be an integer >= {least}")
        return self.integer_or(key, 0, least=least, most=most)

    def integer_or(self, key: str, default: T, *, least: int = 1, most: int = MOST_SIZE) -> int | T:
        """An integer, or `default` where there is none.

        Raises:
            CheckpointError: it is no integer, or it is out of bounds.
        """
        value = self.values.get(key)
        if value is None:
            return default
        return value if type(value) is int and least <= value <= most else self._refuse(key, _integer(least, most))

    def integers(self, key: str, *, least: int = 0, most: int = MOST_SIZE) -> list[int] | None:
        """A list of integers; None where there is none.

        Raises:
            CheckpointError: it is no list, or a value is no integer or out of bounds.
        """
        value = self._list(key)
        if value is not None and any(type(item) is not int or not least <= item <= most for item in value):
            self._refuse(key, f"a list; every value {_integer(least, most)}")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings; None where there is none.

        Raises:
            CheckpointError: it is anything else.
        """
        value = self._list(key)
        if value is not None and any(type(item) is not str for item in value):
            self._refuse(key, "a list of strings")
        return value

    def is_list(self, key: str) -> bool:
        """Whether the value is a list, for keys that may also be a number."""
        return isinstance(self.values.get(key), list)

    def text(self, key: str) -> str | None:
        """A string; None where there is none.

        Raises:
            CheckpointError: it is anything else.
        """
        value = self.values.get(key)
        return value if value is None or type(value) is str else self._refuse(key, "a string")

    def flag(self, key: str) -> bool:
        """A truth value, false where there is none.

        Raises:
            CheckpointError: it is anything else, such as the string "false".
        """
        value = self.values.get(key)
        return bool(value) if value is None or type(value) is bool else self._refuse(key, "true or false")

    def section(self, key: str) -> Fields | None:
        """A nested object; None where there is none.

        Raises:
            CheckpointError: it is anything else.
        """
        value = self.values.get(key)
        if value is None:
            return None
        return Fields(value, f"{self.place}{key}.") if type(value) is dict else self._refuse(key, "an object")

    def _list(self, key: str) -> list[Any] | None:
        value = self.values.get(key)
        return value if value is None or type(value) is list else self._refuse(key, "a list")

    def _refuse(self, key: str, wanted: str) -> Any:
        raise CheckpointError(f"`{self.place}{key}` is {shown(self.values[key])}", rule=f"it must be {wanted}")


def _integer(least: int, most: int) -> str:
    return f"an integer >= {least}, at most {most:,}"
