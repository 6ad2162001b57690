"""Which files a converted checkpoint may hold, and the side files' content."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from eplb_cli.checkpoint.expert_names import MOST_SEARCHED_BYTES, may_name_experts
from eplb_cli.checkpoint.source import PROVENANCE_FILE, Checkpoint
from eplb_cli.checkpoint.verify_names import ExpertNames
from eplb_cli.errors import CheckpointError
from eplb_cli.placement import PLAN_FILE
from eplb_cli.untrusted import open_file, parse_json, read_file

__all__ = ["HUB_FILES", "HUB_FOLDERS", "file_problems", "list_files", "printable", "side_file_problems"]

HUB_FOLDERS = (".cache/huggingface", ".git")
"""Folders that the Hub's client and git keep beside a model; no loader looks into them."""

HUB_FILES = (".gitattributes", "README.md")
"""Files that the Hub adds to a repository; no loader reads them."""

_BLOCK = 1 << 20
_MOST_GROWTH = 64
"""A side file that names experts grows with their copies."""


def list_files(folder: Path) -> set[str]:
    """Paths of the regular files below a folder, those of HUB_FOLDERS left out.

    Raises:
        CheckpointError: there is something else, a link to a folder, or a link to a file that is neither the folder's
            own nor of the Hub's cache that the folder belongs to.
    """
    root = folder.resolve()
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    found = set()
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        try:
            entries = sorted(os.scandir(root / parent), key=lambda entry: entry.name)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=printable(folder / parent)) from error
        for entry in entries:
            path = f"{parent}/{entry.name}" if parent else entry.name
            if entry.is_dir(follow_symlinks=False):
                if path not in HUB_FOLDERS:
                    waiting.append(path)
                continue
            target = Path(os.path.realpath(entry.path))
            if not any(target.is_relative_to(home) for home in homes):
                raise CheckpointError(
                    "is a link out of the folder",
                    file=printable(folder / path),
                    rule="a converted checkpoint holds files of its own",
                )
            if not target.is_file():
                raise CheckpointError("is no regular file", file=printable(folder / path))
            found.add(path)
    return found


def file_problems(source: Checkpoint, output: Checkpoint, present: Collection[str]) -> Iterator[str]:
    """The output holds its weights, the source's side files, the plan and the provenance; the Hub may add its own."""
    wanted = {*output.shards, *source.side_files, "config.json", PLAN_FILE, PROVENANCE_FILE}
    if output.index_name is not None:
        wanted.add(output.index_name)
    for name in sorted(wanted - set(present)):
        yield f"{printable(output.folder / name)}: is missing"
    for name in sorted(set(present) - wanted - set(HUB_FILES)):
        yield f"{printable(output.folder / name)}: must not be there; it is no file of the source"


def side_file_problems(source: Checkpoint, output: Checkpoint, names: ExpertNames, name: str) -> Iterator[str]:
    """A side file equals the source's: its bytes, or where it may name experts its values."""
    before, after = source.folder / name, output.folder / name
    if not may_name_experts(name, before.stat().st_size):
        if not _same_bytes(before, after):
            yield f"{printable(after)}: differs from the source's"
        return
    original = read_file(before, CheckpointError, most_bytes=MOST_SEARCHED_BYTES)
    try:
        content = read_file(after, CheckpointError, most_bytes=_MOST_GROWTH * MOST_SEARCHED_BYTES)
    except CheckpointError as error:
        yield str(error)
        return
    if not name.endswith(".json"):
        if not _same_text(names, original, content):
            yield f"{printable(after)}: differs from the source's"
        return
    try:
        document = parse_json(original, CheckpointError, finite=False)
    except CheckpointError:
        # No reader takes it for JSON.
        if original != content:
            yield f"{printable(after)}: differs from the source's"
        return
    try:
        found = parse_json(content, CheckpointError, file=after, finite=False)
    except CheckpointError as error:
        yield str(error)
        return
    for difference in names.differences(document, found):
        yield f"{printable(after)}: {difference}"


def _same_text(names: ExpertNames, before: bytes, after: bytes) -> bool:
    try:
        return names.same_text(before.decode(), after.decode())
    except UnicodeDecodeError:
        return before == after


def _same_bytes(before: Path, after: Path) -> bool:
    with open_file(before, CheckpointError) as one, open_file(after, CheckpointError) as two:
        if os.fstat(one.fileno()).st_size != os.fstat(two.fileno()).st_size:
            return False
        while True:
            block = one.read(_BLOCK)
            if block != two.read(_BLOCK):
                return False
            if not block:
                return True


def printable(path: Path) -> str:
    """A path as it may be printed; names need not be UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")
