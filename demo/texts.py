"""Texts of three kinds that any machine with Python has: code, prose and data."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

KINDS = ("code", "prose", "data")
SPLITS = ("train", "record", "replay")
CHARACTERS = 32_768
"""Length of each split of each kind."""


def kind_of_text(kind: str, split: str) -> str:
    """Text of one kind; the splits do not overlap."""
    whole = {"code": _code, "prose": _prose, "data": _data}[kind]()
    # Non-ASCII characters are dropped, so that characters and byte tokens are the same count.
    whole = whole.encode("ascii", "ignore").decode()
    start = SPLITS.index(split) * CHARACTERS
    return whole[start : start + CHARACTERS]


def _code() -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(
        (library / name).read_text()
        for name in ("argparse.py", "decimal.py", "_pydecimal.py", "typing.py", "inspect.py", "ast.py")
        if (library / name).exists()
    )


def _prose() -> str:
    """Docstrings of the standard library: sentences written by people."""
    import ast

    library = Path(sysconfig.get_paths()["stdlib"])
    pieces = []
    for path in sorted(library.glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                pieces.append(ast.get_docstring(node) or "")
        if sum(map(len, pieces)) > len(SPLITS) * CHARACTERS * 2:
            break
    return "\n\n".join(piece for piece in pieces if len(piece) > 200)


def _data() -> str:
    """JSON lines about the interpreter's own modules."""
    rows = []
    for index, name in enumerate(sorted(sys.stdlib_module_names) * 20):
        rows.append(
            json.dumps({"id": index, "module": name, "size": len(name) * 37 % 101, "ratio": round(index / 7, 3)})
        )
    return "\n".join(rows)
