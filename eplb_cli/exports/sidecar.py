"""`FILE.eplb.json` beside an exported file: the plan it was made from, since the engines' formats refuse extra keys.

It is believed only while FILE has the digest it names, and only after FILE was read and found to say the same.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from eplb_cli.errors import PlacementError
from eplb_cli.exports.text import integer, section
from eplb_cli.placement import MOST_PLAN_BYTES, Placement
from eplb_cli.untrusted import read_json, shown

__all__ = ["read_sidecar", "sidecar_of", "sidecar_path"]

FORMAT = "eplb-export"
VERSION = 1
KEYS = {"format", "version", "engine", "sha256", "layer_ids", "plan"}


def sidecar_path(file: Path) -> Path:
    """Where the sidecar of a file lies."""
    return file.with_name(file.name + ".eplb.json")


def sidecar_of(content: bytes, engine: str, placement: Placement, layer_ids: tuple[int, ...]) -> bytes:
    """The sidecar's content for a file's content, whose MoE layers are `layer_ids`."""
    fields = {
        "engine": json.dumps(engine),
        "format": json.dumps(FORMAT),
        "layer_ids": json.dumps(layer_ids),
        "plan": placement.to_json().decode().rstrip("\n"),
        "sha256": json.dumps(hashlib.sha256(content).hexdigest()),
        "version": str(VERSION),
    }
    body = ",\n".join(f'"{key}": {value}' for key, value in fields.items())
    return f"{{\n{body}\n}}\n".encode()


def read_sidecar(file: Path, content: bytes, engine: str) -> tuple[Placement, tuple[int, ...]] | None:
    """The plan of a file's sidecar and the file's MoE layers; None without a sidecar, or when the file changed since.

    Raises:
        PlacementError: the sidecar is damaged, or of another version.
    """
    path = sidecar_path(file)
    if not path.is_file():
        return None
    try:
        document = section(read_json(path, PlacementError, most_bytes=MOST_PLAN_BYTES), KEYS, "the sidecar")
        if document["format"] != FORMAT or integer(document["version"], "version") != VERSION:
            raise PlacementError(
                f"is {shown(document['format'])} version {document['version']}", rule=f"{FORMAT} {VERSION} is known"
            )
        if not isinstance(document["layer_ids"], list):
            raise PlacementError(f"layer_ids are {shown(document['layer_ids'])}", rule="a list is expected")
        layers = tuple(integer(layer, "layer_ids") for layer in document["layer_ids"])
        plan = Placement.from_json(json.dumps(document["plan"]).encode())
    except PlacementError as error:
        error.file = str(path)
        error.hint = error.hint or "Remove the sidecar to read the file alone."
        raise
    unchanged = document["sha256"] == hashlib.sha256(content).hexdigest() and document["engine"] == engine
    return (plan, layers) if unchanged else None
