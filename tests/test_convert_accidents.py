"""Killed runs, full and failing devices, sources that change, two runs at once: real processes, real file systems."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.checkpoint import copying
from tests.checkpoints import (
    Synthetic,
    Tensor,
    qwen3_moe,
    random_rows,
    read_checkpoint,
    save_plan,
    scattered_rows,
    skeleton,
)
from tests.conftest import REPOSITORY
from tests.faulty_eplb import Call, Done, start

Eplb = Callable[..., Any]


def big_qwen3(megabytes: int = 6) -> Synthetic:
    """A Qwen3-MoE with embeddings of some size, so that files have more than one write."""
    model = qwen3_moe()
    model.copy("model.embed_tokens.weight", (megabytes << 14, 32))
    return model


class Place:
    """A source, a plan and an output."""

    def __init__(self, folder: Path, where: Path | None = None, *, layout: str = "stock", megabytes: int = 6) -> None:
        self.folder = folder
        self.model = big_qwen3(megabytes)
        self.source = self.model.save(folder / "source", shards=3, seed=1)
        self.layout = layout
        make = random_rows if layout == "stock" else scattered_rows
        self.rows = make(self.model.moe_layers, 4, seed=2)
        self.plan = save_plan(folder / "plan.json", self.rows)
        self.out = (where or folder) / "out"
        self.partial = self.out.with_name("out.partial")
        self.unfinished = self.partial / "checkpoint"
        self.journal = self.partial / "journal"
        self.before = fingerprint(self.source)

    @property
    def arguments(self) -> list[str]:
        return ["convert", str(self.source), str(self.plan), "-o", str(self.out), "--layout", self.layout]

    def faulty(self, fault: str, *options: str, **how: Any) -> Done:
        done = start(fault, [*self.arguments, *options, "--format", "json"], **how).wait()
        assert "Traceback" not in done.err
        return done

    def expected(self) -> dict[str, Tensor]:
        return self.model.expected(self.rows, self.layout)

    def require_right(self) -> None:
        """The output is what the oracle says, nothing is left beside it, and the source is as it was."""
        assert read_checkpoint(self.out) == self.expected()
        assert not self.partial.exists()
        self.require_source()

    def require_source(self) -> None:
        assert fingerprint(self.source) == self.before

    def require_nothing_half_done(self) -> None:
        """OUT is not there, and what the journal calls finished is complete."""
        assert not self.out.exists()
        wanted = self.expected()
        for name in self.finished():
            # The reader fails on a file that is cut short; its tensors must be those of the finished checkpoint.
            for tensor, value in whole(self.unfinished / name).items():
                assert wanted[tensor] == value

    def notes(self) -> dict[str, int]:
        """Bytes by file, as the journal has them."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        records = [json.loads(line[9:]) for line in lines[1:]]
        return {record["file"]: record["bytes"] for record in records}

    def finished(self) -> list[str]:
        return [name for name, count in self.notes().items() if count == self.size(name)]

    def size(self, name: str) -> int:
        file = self.unfinished / name
        return file.stat().st_size if file.exists() else -1


def whole(file: Path) -> dict[str, Tensor]:
    from tests.checkpoints import read_safetensors

    tensors = read_safetensors(file)
    for name, tensor in tensors.items():
        assert len(tensor.data) == len(Tensor(tensor.dtype, tensor.shape, tensor.data).data), name
    return tensors


def fingerprint(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(file.relative_to(folder)): (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file()
    }


@contextmanager
def mounted(folder: Path, *make: str, options: str = "loop", megabytes: int = 64) -> Iterator[Path]:
    """A file system of its own in a loop-mounted image, or a tmpfs; skips where mounting is impossible."""
    mount = folder / "mount"
    mount.mkdir()
    if make:
        image = folder / "image"
        with image.open("wb") as stream:
            stream.truncate(megabytes << 20)
        steps = [[*make, str(image)], ["mount", "-o", options, str(image), str(mount)]]
    else:
        steps = [["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(mount)]]
    for step in steps:
        if shutil.which(step[0]) is None:
            pytest.skip(f"{step[0]} is not installed")
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# Killed runs.


@pytest.mark.parametrize(
    ("layout", "force", "swap", "every"),
    [
        ("physical", False, True, False),
        ("physical", True, True, False),
        ("stock", True, False, False),
        pytest.param("stock", False, True, True, marks=pytest.mark.slow),
        pytest.param("physical", True, False, True, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_before_any_call_goes_on_to_the_same_bytes(
    tmp_path: Path, layout: str, force: bool, swap: bool, every: bool
) -> None:
    """Between any two calls that change something: OUT whole or not at all, an older one kept, nothing copied twice.

    Before the last call of each kind and the second, or before every one.
    """
    place = Place(tmp_path, layout=layout, megabytes=1)
    options = ["--force"] if force else []
    how = {"sync": False, "swap": swap, "buffer": 1 << 18}
    run = place.faulty("none:any:0", **how)
    assert run.code == 0, run.err
    older, wanted = tmp_path / "older", contents(place.out)
    shutil.copytree(place.out, older)
    (older / "mine.txt").write_text("of the older one")
    if force:
        run = place.faulty("none:any:0", *options, **how)
        assert run.code == 0, run.err
    calls = [call for call in run.calls if call.name not in ("preadv", "ioctl")]
    numbers = range(1, len(calls) + 1) if every else of_each_kind(calls)
    if force and not every:
        # Only from the first rename on does an older output change anything.
        numbers = [number for number in numbers if number >= first(calls, "_renameat2")]
    assert len(numbers) >= (6 if force else 15), numbers
    resumed = 0
    for number in numbers:
        for folder in (place.out, place.partial):
            shutil.rmtree(folder, ignore_errors=True)
        if force:
            shutil.copytree(older, place.out)
        assert place.faulty(f"kill:any:{number}", *options, **how).code == -signal.SIGKILL
        committed = place.out.exists() and contents(place.out) == wanted
        if not committed:
            assert force == (place.out.exists() or (place.partial / "replaced").exists())
        notes = place.notes()
        run = place.faulty("none:any:0", *options, **how)
        if committed and not force:
            assert "the output exists already" in run.err
            continue
        if run.code:
            assert not swap
            assert "was put back: a run was stopped while replacing it" in run.err
            assert contents(place.out) == contents(older)
            run = place.faulty("none:any:0", *options, **how)
        assert run.code == 0, run.err
        assert contents(place.out) == wanted
        assert not place.partial.exists()
        if not committed:
            resumed += bool(notes)
            total = sum(file.stat().st_size for file in place.out.glob("*.safetensors"))
            assert json.loads(run.out)["bytes_written"] == total - sum(notes.values())
    assert resumed >= (1 if force else 3)
    place.require_source()


def of_each_kind(calls: list[Call]) -> list[int]:
    """Numbers of the second (or only) and the last call of each kind: its name, and what sort of file it is for."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, call in enumerate(calls, 1):
        kinds.setdefault((call.name, *(Path(path).suffix for path in call.paths)), []).append(number)
    return sorted({number for numbers in kinds.values() for number in (*numbers[:2][-1:], numbers[-1])})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_killed_inside_a_large_file_goes_on_from_its_last_step(tmp_path: Path) -> None:
    place = Place(tmp_path)
    largest, number = 0, 0
    while largest < 2 << 20:
        number += 1
        shutil.rmtree(place.partial, ignore_errors=True)
        assert place.faulty(f"kill:pwritev:{number}", sync=False).code == -signal.SIGKILL
        parts = {name: count for name, count in place.notes().items() if name not in place.finished()}
        largest = max(parts.values(), default=0)
    done = sum(place.notes().values())
    run = place.faulty("none:any:0")
    assert run.code == 0, run.err
    place.require_right()
    total = sum(file.stat().st_size for file in place.out.glob("*.safetensors"))
    assert json.loads(run.out)["bytes_written"] == total - done


def test_a_run_is_not_taken_up_with_another_plan_layout_or_source(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    assert place.faulty("kill:pwritev:4").code == -signal.SIGKILL
    other = save_plan(tmp_path / "other.json", random_rows(place.model.moe_layers, 4, seed=9))
    run = eplb("convert", place.source, other, "-o", place.out)
    assert run.code == 1
    assert "an unfinished run of another plan" in run.err
    run = eplb("convert", place.source, place.plan, "-o", place.out, "--layout", "physical")
    assert run.code == 1
    assert "an unfinished run of another layout" in run.err
    os.utime(place.source / "LICENSE", ns=(1, 1))
    run = eplb(*place.arguments)
    assert run.code == 1
    assert "an unfinished run of another or since changed source" in run.err
    assert "--no-resume" in run.err
    run = eplb(*place.arguments, "--no-resume", "--format", "quiet")
    assert run.code == 0, run.err
    assert read_checkpoint(place.out) == place.expected()


# The order of calls: a killed process never loses the page cache, a power cut does.


def test_what_is_noted_or_named_is_on_the_device_before(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (place.source / "notes").mkdir()
    (place.source / "notes" / "deep.txt").write_text("a side file in a folder of its own")
    run = place.faulty("none:any:0", "--force", buffer=1 << 20)
    assert run.code == 0, run.err
    calls = run.calls
    journal, work = str(place.journal), str(place.partial)
    commit = next(i for i, call in enumerate(calls) if call.name == "_renameat2")
    assert calls[commit].paths == (str(place.unfinished), str(place.out))

    # Each journal line: the file's bytes before it, the folder's names before it, the line itself right after.
    lines = [i for i, call in enumerate(calls) if call.name == "write" and call.paths == (journal,)]
    assert lines
    for i in lines:
        assert next_of(calls, i, "fsync", "write").paths == (journal,)
        record = json.loads(calls[i].text[9:])
        if "identity" in record:
            later = [call.paths[0] for call in calls[i : first(calls, "_reserve")] if call.name == "fsync"]
            assert later[:3] == [journal, work, str(tmp_path)]
            continue
        file = str(place.unfinished / record["file"])
        last = max(j for j in range(i) if calls[j].name == "pwritev" and calls[j].paths == (file,))
        assert Call("fsync", (file,)) in calls[last:i]
        assert Call("fsync", (str(place.unfinished),)) in calls[:i]
    notes = [json.loads(calls[i].text[9:]) for i in lines[1:]]
    shards = {file.name: file.stat().st_size for file in place.out.glob("*.safetensors")}
    assert {note["file"]: note["bytes"] for note in notes} == shards
    assert len(notes) > len(shards)

    # Every file is synced after its last write, every folder after its last new name, and all of it before the rename.
    written = {call.paths[0] for call in calls[:commit] if call.name in ("write", "pwritev") and call.paths}
    named = {path for path in written if path.startswith(str(place.unfinished))}
    names = {str(file.relative_to(place.out)) for file in place.out.rglob("*") if file.is_file()}
    assert {str(Path(path).relative_to(place.unfinished)) for path in named} >= names - {"LICENSE"}
    for path in named:
        last = max(j for j in range(commit) if calls[j].name in ("write", "pwritev") and calls[j].paths == (path,))
        assert Call("fsync", (path,)) in calls[last:commit], path
        for folder in Path(path).relative_to(place.unfinished).parents:
            assert Call("fsync", (str(place.unfinished / folder),)) in calls[last:commit], path

    # The parent after the rename, before anything of the run is removed.
    after = calls[commit + 1 :]
    assert after[0] == Call("fsync", (str(tmp_path),))
    assert [call.name for call in after[1:] if call.paths] == ["unlink", "unlink", "rmdir"]


def test_an_older_output_is_removed_only_when_the_new_one_is_on_the_device(tmp_path: Path) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("none:any:0").code == 0
    run = place.faulty("none:any:0", "--force")
    assert run.code == 0, run.err
    commit = first(run.calls, "_renameat2")
    assert run.calls[commit + 1] == Call("fsync", (str(tmp_path),))
    assert not [call for call in run.calls[:commit] if call.name in ("unlink", "rmdir")]
    place.require_right()


def first(calls: list[Call], name: str) -> int:
    return next(i for i, call in enumerate(calls) if call.name == name)


def next_of(calls: list[Call], after: int, *names: str) -> Call:
    return next(call for call in calls[after + 1 :] if call.name in names)


# What stands where the output is to be.


@pytest.mark.parametrize("swap", [True, False], ids=["renameat2", "plain rename"])
def test_an_output_that_appeared_meanwhile_is_left_alone(tmp_path: Path, eplb: Eplb, swap: bool) -> None:
    place = Place(tmp_path, megabytes=1)
    failed = place.faulty(f"make:_renameat2:1:{place.out}", swap=swap)
    assert failed.code == 1
    assert f"{place.out}: appeared while eplb was running; it was left alone" in failed.err
    assert f"in {place.unfinished}" in failed.err
    assert "--force" in failed.err
    assert contents(place.out) == {"mine.txt": b"keep"}
    assert read_checkpoint(place.unfinished) == place.expected()
    # Nothing of the next step's commands destroys it either.
    for options in ([], ["--no-resume"], ["--force"]):
        assert eplb(*place.arguments, *options).code == 1
        assert contents(place.out) == {"mine.txt": b"keep"}
    place.out.rename(tmp_path / "mine")
    run = eplb(*place.arguments, "--format", "json")
    assert run.json["bytes_written"] == 0
    place.require_right()


@pytest.mark.parametrize("change", ["a new file", "a changed file", "another folder", "gone", "a link"])
@pytest.mark.parametrize("moment", ["fsync:6", "_renameat2:1"])
def test_with_force_only_what_was_there_at_the_start_is_replaced(tmp_path: Path, change: str, moment: str) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("none:any:0", sync=False).code == 0
    older = place.out
    process = start(f"stop:{moment}", [*place.arguments, "--force"])
    wait_for_stop(process.pid)
    if change == "a new file":
        (older / "mine.txt").write_text("keep")
    elif change == "a changed file":
        status = (older / "config.json").stat()
        (older / "config.json").write_bytes((older / "config.json").read_bytes().swapcase())
        os.utime(older / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        older.rename(tmp_path / "elsewhere")
        if change == "another folder":
            shutil.copytree(tmp_path / "elsewhere", older)
        elif change == "a link":
            older.symlink_to(tmp_path / "elsewhere")
    mine = contents(older) if older.exists() else {}
    os.kill(process.pid, signal.SIGCONT)
    done = process.wait()
    if change == "gone":
        if moment == "fsync:6":
            assert done.code == 0, done.err
            place.require_right()
        else:
            assert done.code == 1
            assert "Traceback" not in done.err
        return
    assert done.code == 1
    if moment == "fsync:6":
        assert "changed while eplb was running; it was left alone" in done.err
        assert contents(older) == mine
        assert read_checkpoint(place.unfinished) == place.expected()
    else:
        assert "changed in the last moment and was not removed" in done.err
        assert read_checkpoint(older) == place.expected()
        assert contents(place.unfinished) == mine


def wait_for_stop(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_force_replaces_what_eplb_wrote_and_nothing_else(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path, megabytes=1)
    place.out.mkdir()
    (place.out / "config.json").write_text("{}")
    run = eplb(*place.arguments, "--force")
    assert run.code == 1
    assert "was not written by eplb convert" in run.err
    assert contents(place.out) == {"config.json": b"{}"}
    shutil.rmtree(place.out)
    target = tmp_path / "target"
    target.mkdir()
    place.out.symlink_to(target)
    for options in ([], ["--force"]):
        run = eplb(*place.arguments, *options)
        assert run.code == 1
        assert "is in the way" in run.err
    assert place.out.is_symlink()
    place.out.unlink()
    place.out.mkdir()
    assert eplb(*place.arguments, "--force", "--format", "quiet").code == 0
    place.require_right()


@pytest.mark.parametrize("where", ["out", "out.partial"])
def test_a_mount_point_is_not_replaced(tmp_path: Path, eplb: Eplb, where: str) -> None:
    """A rename cannot take its place, so that is said before everything is copied."""
    place = Place(tmp_path, megabytes=1)
    with mounted(tmp_path) as mount:
        bound = tmp_path / where
        bound.mkdir()
        subprocess.run(["mount", "--bind", str(mount), str(bound)], check=True)
        try:
            run = eplb(*place.arguments, "--force")
            assert run.code == 1
            assert f"{bound}: {'is a mount point' if where == 'out' else 'is in the way'}" in run.err
            assert list(mount.iterdir()) == []
        finally:
            subprocess.run(["umount", str(bound)], check=True)
    assert not place.unfinished.exists()
    assert eplb(*place.arguments, "--force", "--format", "quiet").code == 0
    place.require_right()


def test_force_replaces_an_output_whose_files_get_one_more_name(tmp_path: Path, eplb: Eplb) -> None:
    """With --link the older output shares files with the source, and the new one gives them a further name."""
    place = Place(tmp_path, megabytes=1)
    place.rows = {layer: [*range(8)] for layer in place.model.moe_layers}
    same = save_plan(tmp_path / "same.json", place.rows)
    for options in ([], ["--force"]):
        run = eplb("convert", place.source, same, "-o", place.out, "--link", *options, "--format", "json")
        assert run.code == 0, run.err
        assert run.json["bytes_written"] == 0
    assert (place.out / "model-00001-of-00003.safetensors").stat().st_nlink == 2
    place.require_right()


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("source/out", "the output lies in the source"),
        ("source", "the output lies in the source"),
        (".", "the source lies in the output"),
        ("out/..", "the source lies in the output"),
        ("other/inner/..", "is no name for a new folder"),
        ("missing/out", "the output's folder does not exist"),
        ("link/out", "the output lies in the source"),
    ],
)
def test_outputs_that_cannot_be(
    tmp_path: Path, eplb: Eplb, monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    place = Place(tmp_path, megabytes=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(place.source)
    monkeypatch.chdir(tmp_path)
    run = eplb("convert", place.source, place.plan, "-o", out)
    assert run.code == 1
    assert said in run.err
    place.require_source()


def test_a_source_that_is_called_like_the_run_s_own_folder_is_not_touched(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path, megabytes=1)
    place.source.rename(place.partial)
    for options in ([], ["--no-resume"]):
        run = eplb("convert", place.partial, place.plan, "-o", place.out, *options)
        assert run.code == 1
        assert "the source lies in the output" in run.err or "lies in the source" in run.err
    assert fingerprint(place.partial) == place.before


@pytest.mark.parametrize("name", ["mine.txt", "checkpoint/model.safetensors", "eplb_provenance.json", "journal"])
def test_a_foreign_folder_of_the_same_name_is_not_touched(tmp_path: Path, eplb: Eplb, name: str) -> None:
    place = Place(tmp_path, megabytes=1)
    (place.partial / name).parent.mkdir(parents=True)
    (place.partial / name).write_text("keep")
    for options in ([], ["--no-resume"]):
        run = eplb(*place.arguments, *options)
        assert run.code == 1
        assert "was not left by eplb" in run.err
    assert contents(place.partial) == {name: b"keep"}


@pytest.mark.parametrize("where", [".", "checkpoint", "journal", "lock"])
def test_links_in_place_of_the_run_s_own_files_are_refused(tmp_path: Path, eplb: Eplb, where: str) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("kill:pwritev:3", sync=False).code == -signal.SIGKILL
    (place.partial / where).rename(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere") if where in (".", "checkpoint") else (tmp_path / "elsewhere").read_bytes()
    for make in ("symlink_to", "hardlink_to"):
        if make == "hardlink_to" and where in (".", "checkpoint"):
            continue
        getattr(place.partial / where, make)(tmp_path / "elsewhere")
        for options in ([], ["--no-resume"]):
            run = eplb(*place.arguments, *options)
            assert run.code == 1
            assert "is in the way" in run.err or "was not left by eplb" in run.err
        (place.partial / where).unlink()
    elsewhere = tmp_path / "elsewhere"
    assert before == (contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes())


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_links_in_place_of_written_files_are_not_followed(tmp_path: Path, make: str) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("kill:_renameat2:1", sync=False).code == -signal.SIGKILL
    kept = {}
    for number, file in enumerate([*place.unfinished.glob("*.safetensors"), place.unfinished / "config.json"]):
        target = tmp_path / f"mine-{number}"
        file.rename(target)
        getattr(file, make)(target)
        kept[target] = target.read_bytes()
    run = place.faulty("none:any:0", sync=False)
    assert run.code == 0, run.err
    assert all(target.read_bytes() == content and target.stat().st_nlink == 1 for target, content in kept.items())
    place.require_right()


# What an earlier run left is not believed.


def line(text: str) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text.encode()), text.encode())


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    "forged",
    [
        b"garbage",
        b"\xff\x00\n\n",
        b"00000000 WHOLE\n",
        '{"file": "SHARD", "bytes": 1099511627776}',
        '{"file": "SHARD", "bytes": -4096}',
        '{"file": "SHARD", "bytes": true}',
        '{"file": "SHARD", "bytes": "4096"}',
        '{"file": "SHARD", "bytes": 1048584}',
        '{"file": ["SHARD"], "bytes": 4096}',
        '{"file": "../../source/config.json", "bytes": 4096}',
        "[" * 100_000,
        "9" * 5000,
        '{"file": "\\ud800", "bytes": 1}',
    ],
    ids=range(13),
)
def test_a_damaged_journal_loses_no_byte(tmp_path: Path, forged: bytes | str) -> None:
    place = Place(tmp_path, megabytes=3)
    victim = max(place.source.glob("*.safetensors"), key=lambda file: file.stat().st_size).name
    number = 2
    while place.notes().get(victim, 0) < 1 << 20:
        number += 1
        shutil.rmtree(place.partial, ignore_errors=True)
        assert place.faulty(f"kill:pwritev:{number}", sync=False).code == -signal.SIGKILL
    assert victim not in place.finished()
    with place.journal.open("ab") as stream:
        # A line that would make the shard a finished one, had it the right checksum.
        record = json.dumps({"file": victim, "bytes": place.size(victim)}).encode()
        stream.write(
            forged.replace(b"WHOLE", record) if isinstance(forged, bytes) else line(forged.replace("SHARD", victim))
        )
    # Killed once more, where a note that was believed would now vouch for bytes that are not there.
    assert place.faulty("kill:pwritev:1", sync=False).code == -signal.SIGKILL
    # Damaged lines are cut off, or the lines after them would never be read.
    assert place.notes()[victim] < place.size(victim)
    run = place.faulty("none:any:0", sync=False)
    assert run.code == 0, run.err
    place.require_right()


@pytest.mark.parametrize("content", [b"", b"garbage\n", line("[]"), line("{}"), line('{"format": 1}')])
def test_a_journal_without_its_first_line_is_not_taken_up(tmp_path: Path, content: bytes) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("kill:pwritev:5", sync=False).code == -signal.SIGKILL
    place.journal.write_bytes(content)
    run = place.faulty("none:any:0", sync=False)
    assert run.code == 1
    assert "--no-resume" in run.err
    run = place.faulty("none:any:0", "--no-resume", sync=False)
    assert run.code == 0, run.err
    place.require_right()


@pytest.mark.parametrize("damage", ["shorter", "longer", "header", "gone"])
def test_finished_files_that_were_damaged_since_are_written_again(tmp_path: Path, damage: str) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("kill:_renameat2:1", sync=False).code == -signal.SIGKILL
    file = place.unfinished / SHARD
    if damage == "header":
        content = bytearray(file.read_bytes())
        content[20] ^= 1
        file.write_bytes(content)
    elif damage == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (-8 if damage == "shorter" else 8))
    run = place.faulty("none:any:0", sync=False)
    assert run.code == 0, run.err
    assert json.loads(run.out)["bytes_written"] == (place.out / SHARD).stat().st_size
    place.require_right()


def test_a_proof_that_fails_removes_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, megabytes=1)
    assert place.faulty("kill:_renameat2:1", sync=False).code == -signal.SIGKILL
    file = place.unfinished / SHARD
    content = bytearray(file.read_bytes())
    content[-100:] = bytes(b ^ 255 for b in content[-100:])
    file.write_bytes(content)
    before = contents(place.unfinished)
    run = place.faulty("none:any:0", sync=False)
    assert run.code == 1
    assert "the result does not prove right" in run.err
    assert str(place.unfinished) in run.err
    assert "--no-resume" in run.err
    assert contents(place.unfinished) == before
    assert place.faulty("none:any:0", "--no-resume", sync=False).code == 0
    place.require_right()


# Names that could meet each other.


def test_side_files_called_like_anything_of_ours_are_carried_over(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path, megabytes=1)
    names = ["journal", "lock", "checkpoint", "replaced", "eplb_lock", "eplb_journal.jsonl", f"{SHARD}.part"]
    for name in [*names, "out.partial/checkpoint/lock"]:
        (place.source / name).parent.mkdir(parents=True, exist_ok=True)
        (place.source / name).write_text(name)
    place.before = fingerprint(place.source)
    assert place.faulty("kill:_renameat2:1", sync=False).code == -signal.SIGKILL
    run = eplb(*place.arguments, "--format", "quiet")
    assert run.code == 0, run.err
    place.require_right()
    assert all((place.out / name).read_text() == name for name in [*names, "out.partial/checkpoint/lock"])


@pytest.mark.parametrize("name", ["eplb_plan.json/x", "eplb_provenance.json/x/y"])
def test_side_files_below_a_name_of_the_output_are_refused_before_the_first_byte(
    tmp_path: Path, eplb: Eplb, name: str
) -> None:
    place = Place(tmp_path, megabytes=1)
    (place.source / name).parent.mkdir(parents=True)
    (place.source / name).write_text("x")
    run = eplb(*place.arguments)
    assert run.code == 1
    assert f"{name}: cannot be carried over: the output has a file {name.split('/')[0]}" in run.err
    assert not place.partial.exists()


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9/notes.txt"])
def test_side_files_whose_names_are_no_text_are_refused_before_the_first_byte(
    tmp_path: Path, eplb: Eplb, name: bytes
) -> None:
    place = Place(tmp_path, megabytes=1)
    file = place.source / os.fsdecode(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text("x")
    run = eplb(*place.arguments)
    assert run.code == 1
    assert "caf\\udce9" in run.err
    assert "names must be UTF-8" in run.err
    assert not place.partial.exists()
    # Text beyond ASCII is no fault.
    file.rename(file.with_name("notes"))
    if file.parent != place.source:
        file.parent.rename(place.source / "café")
    assert eplb(*place.arguments, "--format", "quiet").code == 0


# Two runs at once.


def test_a_second_run_to_the_same_place_names_the_first(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path, megabytes=1)
    first_run = start("stop:pwritev:2", [*place.arguments, "--format", "quiet"])
    try:
        wait_for_stop(first_run.pid)
        for options in ([], ["--no-resume"], ["--force"]):
            run = eplb(*place.arguments, *options)
            assert run.code == 1
            assert f"process {first_run.pid} on " in run.err
            assert "is writing to it" in run.err
    finally:
        os.kill(first_run.pid, signal.SIGCONT)
        assert first_run.wait().code == 0
    place.require_right()


# Failing devices.


@pytest.mark.parametrize(
    ("fault", "said", "kept"),
    [
        ("EIO:pwritev:5", "the device reports an input/output error", True),
        ("EIO:fsync:4", "the device reports an input/output error", True),
        ("EIO:fsync:9", "the device reports an input/output error", True),
        ("EDQUOT:pwritev:5", "the disk quota is used up", True),
        ("EDQUOT:fsync:4", "the disk quota is used up", True),
        ("ENOSPC:pwritev:5", "no space left on the device", True),
        ("ENOSPC:_reserve:2", "no space left on the device", True),
        ("ENOSPC:write:4", "no space left on the device", True),
        ("EIO:_renameat2:1", "the device reports an input/output error", True),
        ("EROFS:pwritev:5", "the file system is read-only", True),
        ("EACCES:mkdir:1", "permission denied", False),
    ],
)
def test_a_failing_call_is_one_clear_line_and_the_run_can_go_on(
    tmp_path: Path, fault: str, said: str, kept: bool
) -> None:
    place = Place(tmp_path)
    failed = place.faulty(fault, sync=False)
    assert failed.code == 1
    assert failed.err.startswith("Error: ")
    assert failed.err.count("Error:") == 1
    assert said in failed.err
    assert place.partial.exists() == kept
    place.require_nothing_half_done()
    run = place.faulty("none:any:0", sync=False)
    assert run.code == 0, run.err
    place.require_right()


def test_writes_that_cannot_go_past_the_page_cache_go_through_it(tmp_path: Path) -> None:
    """As on a device with blocks larger than a page."""
    place = Place(tmp_path)
    run = place.faulty("EINVAL:pwritev:1", sync=False)
    assert run.code == 0, run.err
    place.require_right()


def test_an_error_while_blocks_are_shared_ends_the_run(tmp_path: Path) -> None:
    """The device failed; copying the same bytes another way could read stale ones."""
    with mounted(tmp_path, "mkfs.xfs", "-q", megabytes=400) as mount:
        place = Place(mount)
        os.sync()
        failed = place.faulty("EIO:ioctl:2")
        assert failed.code == 1
        assert "the device reports an input/output error" in failed.err
        run = place.faulty("EOPNOTSUPP:ioctl:2")
        assert run.code == 0, run.err
        place.require_right()


def test_too_little_space_is_seen_before_the_first_byte(tmp_path: Path, eplb: Eplb) -> None:
    with mounted(tmp_path, megabytes=8) as mount:
        place = Place(tmp_path, mount)
        run = eplb(*place.arguments)
        assert run.code == 1
        assert "bytes, and" in run.err
        assert "are missing" in run.err
        assert list(mount.iterdir()) == []
        dry = eplb(*place.arguments, "--dry-run", "--format", "json")
        assert dry.code == 0
        assert dry.json["estimate"]["bytes_free"] <= 8 << 20
        assert f"the target lacks {dry.json['estimate']['bytes_missing']:,} bytes" in dry.err


@pytest.mark.parametrize("make", [(), ("mkfs.ext4", "-q")], ids=["tmpfs", "ext4"])
def test_a_device_that_fills_up_meanwhile_keeps_finished_shards(
    tmp_path: Path, eplb: Eplb, make: tuple[str, ...]
) -> None:
    with mounted(tmp_path, *make) as mount:
        place = Place(tmp_path, mount)
        failed = place.faulty(f"fill:pwritev:4:{mount}")
        assert failed.code == 1
        assert "no space left on the device" in failed.err
        assert "run the same command again" in failed.err
        place.require_nothing_half_done()
        for name in ("filler", "crumbs"):
            (mount / name).unlink()
        run = eplb(*place.arguments, "--format", "quiet")
        assert run.code == 0, run.err
        place.require_right()


def test_a_full_inode_table_is_named(tmp_path: Path, eplb: Eplb) -> None:
    with mounted(tmp_path, "mkfs.ext4", "-q", "-N", "32") as mount:
        place = Place(tmp_path, mount)
        number = 0
        try:
            while True:
                (mount / f"file{number}").touch()
                number += 1
        except OSError:
            assert number > 0
        run = eplb(*place.arguments)
        assert run.code == 1
        assert "inodes" in run.err
        place.require_source()


def test_a_read_only_target(tmp_path: Path, eplb: Eplb) -> None:
    with mounted(tmp_path, "mkfs.ext4", "-q", options="loop,ro") as mount:
        place = Place(tmp_path, mount)
        run = eplb(*place.arguments)
        assert run.code == 1
        assert "the file system is read-only" in run.err


def test_a_read_only_source(tmp_path: Path, eplb: Eplb) -> None:
    with mounted(tmp_path, "mkfs.ext4", "-q") as mount:
        Place(mount)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        run = eplb("convert", mount / "source", mount / "plan.json", "-o", tmp_path / "out", "--format", "quiet")
        assert run.code == 0, run.err
        assert eplb("verify", mount / "source", tmp_path / "out", "--format", "quiet").code == 0


def test_the_file_size_limit_of_the_shell(tmp_path: Path) -> None:
    place = Place(tmp_path)
    command = f"ulimit -f 2048; exec {sys.executable} -m eplb_cli {' '.join(place.arguments)}"
    failed = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "ulimit -f" in failed.stderr
    place.require_nothing_half_done()


def test_links_across_file_systems_become_copies(tmp_path: Path, eplb: Eplb) -> None:
    with mounted(tmp_path) as mount:
        place = Place(tmp_path, mount)
        same = save_plan(tmp_path / "same.json", {layer: [*range(8)] for layer in place.model.moe_layers})
        run = eplb("convert", place.source, same, "-o", place.out, "--link", "--format", "json")
        assert run.code == 0, run.err
        assert run.json["bytes_cloned"] == 0
        assert read_checkpoint(place.out) == place.model.tensors()


# File systems that share blocks.


@pytest.mark.parametrize("make", [("mkfs.xfs", "-q"), ("mkfs.btrfs", "-q")], ids=["xfs", "btrfs"])
@pytest.mark.parametrize("layout", ["stock", "physical"])
def test_blocks_are_shared_where_the_file_system_can(
    tmp_path: Path, eplb: Eplb, monkeypatch: pytest.MonkeyPatch, make: tuple[str, ...], layout: str
) -> None:
    """In several calls, as a range of more than a GiB takes."""
    monkeypatch.setattr(copying, "_CLONE_AT_MOST", 5 << 20)
    with mounted(tmp_path, *make, megabytes=400) as mount:
        model = big_qwen3(megabytes=32)
        source = model.save(mount / "source")
        make_rows = random_rows if layout == "stock" else scattered_rows
        rows = make_rows(model.moe_layers, 4, seed=2)
        plan = save_plan(tmp_path / "plan.json", rows)
        os.sync()
        run = eplb("convert", source, plan, "-o", mount / "out", "--layout", layout, "--format", "json")
        assert run.code == 0, run.err
        # All of the large tensor but the edges of its range.
        assert run.json["bytes_cloned"] >= (32 << 20) - 2 * 4096
        assert run.json["bytes_written"] < 2 << 20
        assert read_checkpoint(mount / "out") == model.expected(rows, layout)


def test_rank_files_share_blocks_with_a_source_of_several_files(
    tmp_path: Path, eplb: Eplb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of the source has its own remainder modulo the block size; each gets files of its own."""
    from eplb_cli.checkpoint import layout

    monkeypatch.setattr(layout, "_WORTH_A_FILE", 1)
    with mounted(tmp_path, "mkfs.xfs", "-q", megabytes=400) as mount:
        model = skeleton("Qwen3MoeForCausalLM", num_experts=8, num_hidden_layers=4, moe_intermediate_size=256)
        for layer in range(4):
            model.logical(layer, f"model.layers.{layer}.mlp.gate.weight")
            for expert in range(8):
                for projection in ("gate_proj", "up_proj", "down_proj"):
                    template = f"model.layers.{layer}.mlp.experts.{{}}.{projection}.weight"
                    model.expert(layer, template, expert, (256, 512))
        source = model.save(mount / "source", shards=4)
        starts = {8 + int.from_bytes(file.read_bytes()[:8], "little") for file in source.glob("*.safetensors")}
        assert len({start % 4096 for start in starts}) > 1
        rows = scattered_rows(model.moe_layers, 4, seed=2)
        plan = save_plan(tmp_path / "plan.json", rows)
        os.sync()
        run = eplb("convert", source, plan, "-o", mount / "out", "--layout", "physical", "--format", "json")
        assert run.code == 0, run.err
        assert read_checkpoint(mount / "out") == model.expected(rows, "physical")
        weights = 4 * 12 * 3 * 256 * 512 * 2
        assert run.json["bytes_cloned"] > 0.95 * weights


def test_nothing_is_shared_where_the_file_system_cannot(tmp_path: Path, eplb: Eplb) -> None:
    with mounted(tmp_path, "mkfs.ext4", "-q") as mount:
        place = Place(mount)
        run = eplb(*place.arguments, "--format", "json")
        assert run.json["bytes_cloned"] == 0
        place.require_right()


# Sources that change.


@pytest.mark.parametrize(("fault", "name"), [("touch:fsync:6", "tokenizer.json"), ("touch:pwritev:1", "shard")])
def test_a_source_that_changes_meanwhile_stops_the_run(tmp_path: Path, fault: str, name: str) -> None:
    place = Place(tmp_path, megabytes=1)
    shard = max(place.source.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    failed = place.faulty(f"{fault}:{shard if name == 'shard' else place.source / name}")
    assert failed.code == 1
    assert "changed while it was being read" in failed.err
    assert not place.out.exists()
    run = place.faulty("none:any:0")
    assert run.code == 1
    assert "an unfinished run of another or since changed source" in run.err or "bytes" in run.err


def test_a_source_that_cannot_be_read_for_a_while_keeps_finished_shards(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = place.faulty("EIO:preadv:14")
    assert failed.code == 1
    assert "source" in failed.err
    assert "cannot be read at byte" in failed.err
    place.require_nothing_half_done()
    assert place.partial.exists()
    assert place.faulty("none:any:0").code == 0
    place.require_right()


# Memory.


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    place = Place(tmp_path)
    peaks = []
    for megabytes in (64, 400):  # both fill every buffer of the writer
        source = big_qwen3(megabytes).save(tmp_path / f"source-{megabytes}")
        command = [sys.executable, "-m", "tests.peak_memory", "convert", str(source), str(place.plan), "-o"]
        command += [str(tmp_path / f"out-{megabytes}"), "--format", "quiet"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert max(peaks) < 100 << 20
    # Runs differ by 0.3 MiB on two cores, and kernels count pages a core apart; 2 % kept would be 7 MB.
    assert peaks[1] - peaks[0] < 4 << 20
