"""Status records: what each rank's plugin did, as small JSON files that `eplb serve` and the metrics read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eplb_cli.errors import ServeError
from eplb_cli.untrusted import read_json

__all__ = ["read_records", "write_record"]

_MOST_BYTES = 64 << 20


def write_record(folder: Path | None, name: str, record: Mapping[str, Any]) -> None:
    """Write `<folder>/<name>.json` whole or not at all; no folder, no record."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Several ranks may write at once, and a reader may look at any time.
    partial = folder / f".{name}.{os.getpid()}.partial"
    partial.write_text(json.dumps(record, sort_keys=True))
    partial.replace(folder / f"{name}.json")


def read_records(folder: Path, prefix: str = "") -> Iterator[dict[str, Any]]:
    """The records whose name begins with `prefix`, in the order of their names."""
    for file in sorted(folder.glob(f"{prefix}*.json")):
        record = read_json(file, ServeError, most_bytes=_MOST_BYTES)
        if not isinstance(record, dict):
            raise ServeError("is no status record", file=file)
        yield record
