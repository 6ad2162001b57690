"""Killed runs, full and failing devices, sources that change, two runs at once: real processes, real file systems."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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

Eplb = Callable[..., Any]


def big_qwen3(megabytes: int = 6) -> Synthetic:
    """A Qwen3-MoE with embeddings of some size, so that files have more than one write."""
    model = qwen3_moe()
    model.copy("model.embed_tokens.weight", (megabytes << 14, 32))
    return model


class Place:
    """A source, a plan and an output."""

    def __init__(self, folder: Path, where: Path | None = None, *, layout: str = "stock") -> None:
        self.folder = folder
        self.model = big_qwen3()
        self.source = self.model.save(folder / "source", shards=3, seed=1)
        self.layout = layout
        make = random_rows if layout == "stock" else scattered_rows
        self.rows = make(self.model.moe_layers, 4, seed=2)
        self.plan = save_plan(folder / "plan.json", self.rows)
        self.out = (where or folder) / "out"
        self.partial = self.out.with_name("out.partial")
        self.before = fingerprint(self.source)

    @property
    def arguments(self) -> list[str]:
        return ["convert", str(self.source), str(self.plan), "-o", str(self.out), "--layout", self.layout]

    def faulty(self, fault: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.faulty_eplb", fault, *self.arguments, *options, "--format", "quiet"]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)

    def require_right(self) -> None:
        """The output is what the oracle says, nothing is left beside it, and the source is as it was."""
        assert read_checkpoint(self.out) == self.model.expected(self.rows, self.layout)
        assert not self.partial.exists()
        assert not (self.out / "eplb_lock").exists()
        assert not (self.out / "eplb_journal.jsonl").exists()
        assert not list(self.out.rglob("*.part"))
        self.require_source()

    def require_source(self) -> None:
        assert fingerprint(self.source) == self.before

    def require_nothing_half_done(self) -> None:
        """OUT is not there, and what has a final name in OUT.partial is complete."""
        assert not self.out.exists()
        wanted = self.model.expected(self.rows, self.layout)
        for file in self.partial.glob("*.safetensors"):
            # The reader fails on a file that is cut short; its tensors must be those of the finished checkpoint.
            for name, tensor in whole(file).items():
                assert wanted[name] == tensor


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


@pytest.mark.parametrize("layout", ["stock", "physical"])
@pytest.mark.slow
def test_a_run_killed_anywhere_goes_on_to_the_same_bytes(tmp_path: Path, eplb: Eplb, layout: str) -> None:
    place = Place(tmp_path, layout=layout)
    counted = place.faulty("count:any:0")
    assert counted.returncode == 0, counted.stderr
    place.require_right()
    wanted = fingerprint(place.out)
    calls = int(counted.stdout.split()[-1])
    assert calls > 50
    for number in range(1, calls + 1, max(1, calls // 14)):
        shutil.rmtree(place.out, ignore_errors=True)
        shutil.rmtree(place.partial, ignore_errors=True)
        killed = place.faulty(f"kill:any:{number}")
        assert killed.returncode == -signal.SIGKILL
        if place.out.exists():
            # Killed after the rename: nothing is left to do.
            place.require_right()
            continue
        place.require_nothing_half_done()
        finished = {file.name: file.stat().st_ino for file in place.partial.glob("*.safetensors")}
        journalled = journalled_files(place.partial)
        run = eplb(*place.arguments, "--format", "json")
        assert run.code == 0, run.err
        place.require_right()
        assert {name: data for name, (_, _, data) in fingerprint(place.out).items()} == {
            name: data for name, (_, _, data) in wanted.items()
        }
        for name in journalled:
            assert (place.out / name).stat().st_ino == finished[name], f"{name} was written again"


def journalled_files(partial: Path) -> list[str]:
    journal = partial / "eplb_journal.jsonl"
    if not journal.exists():
        return []
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    return [record["file"] for record in records if "file" in record]


def test_a_run_killed_inside_a_large_file_goes_on_from_its_last_step(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    calls = 0
    while True:
        calls += 1
        shutil.rmtree(place.partial, ignore_errors=True)
        assert place.faulty(f"kill:fdatasync:{calls + 3}").returncode == -signal.SIGKILL
        journal = (place.partial / "eplb_journal.jsonl").read_text()
        records = [json.loads(line) for line in journal.splitlines()]
        finished = {record["file"] for record in records if "file" in record}
        steps = [record for record in records if "part" in record and record["part"] not in finished]
        if steps and steps[-1]["offset"] >= 2 << 20:
            break
    run = eplb(*place.arguments, "--format", "json")
    assert run.code == 0, run.err
    place.require_right()
    done = sum((place.out / name).stat().st_size for name in finished) + steps[-1]["offset"]
    total = sum(file.stat().st_size for file in place.out.glob("*.safetensors"))
    assert run.json["bytes_written"] == total - done


def test_a_run_is_not_taken_up_with_another_plan_layout_or_source(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    assert place.faulty("kill:rename:2").returncode == -signal.SIGKILL
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
    assert read_checkpoint(place.out) == place.model.expected(place.rows, "stock")


def test_a_foreign_folder_of_the_same_name_is_not_touched(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    place.partial.mkdir()
    (place.partial / "mine.txt").write_text("keep")
    for options in ([], ["--no-resume"]):
        run = eplb(*place.arguments, *options)
        assert run.code == 1
        assert "was not left by eplb" in run.err
    assert [file.name for file in place.partial.iterdir()] == ["mine.txt"]


def test_finished_files_that_were_damaged_since_are_written_again(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    assert place.faulty("kill:write:12").returncode == -signal.SIGKILL
    finished = list(place.partial.glob("*.safetensors"))
    assert finished
    os.truncate(finished[0], 1000)
    run = eplb(*place.arguments, "--format", "quiet")
    assert run.code == 0, run.err
    place.require_right()


# Two runs at once.


def test_a_second_run_to_the_same_place_names_the_first(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    command = [sys.executable, "-m", "tests.faulty_eplb", "stop:pwritev:2", *place.arguments, "--format", "quiet"]
    first = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + 60
        while state_of(first.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for options in ([], ["--no-resume"], ["--force"]):
            run = eplb(*place.arguments, *options)
            assert run.code == 1
            assert f"process {first.pid} on " in run.err
            assert "is writing to it" in run.err
    finally:
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=60) == 0
    place.require_right()


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


# Failing devices.


@pytest.mark.parametrize(
    ("fault", "said", "kept"),
    [
        ("EIO:pwritev:9", "the device reports an input/output error", True),
        ("EIO:fsync:4", "the device reports an input/output error", True),
        ("EDQUOT:pwritev:9", "the disk quota is used up", True),
        ("EDQUOT:fsync:4", "the disk quota is used up", True),
        ("ENOSPC:pwritev:9", "no space left on the device", True),
        ("ENOSPC:rename:2", "no space left on the device", True),
        ("EROFS:pwritev:9", "the file system is read-only", True),
        ("EACCES:mkdir:1", "permission denied", False),
    ],
)
def test_a_failing_call_is_one_clear_line_and_the_run_can_go_on(
    tmp_path: Path, eplb: Eplb, fault: str, said: str, kept: bool
) -> None:
    place = Place(tmp_path)
    failed = place.faulty(fault)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: ")
    assert failed.stderr.count("Error:") == 1
    assert said in failed.stderr
    assert "Traceback" not in failed.stderr
    assert place.partial.exists() == kept
    if kept:
        place.require_nothing_half_done()
    place.require_source()
    run = eplb(*place.arguments, "--format", "quiet")
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
        assert failed.returncode == 1
        assert "no space left on the device" in failed.stderr
        assert "run the same command again" in failed.stderr
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
    tmp_path: Path, eplb: Eplb, make: tuple[str, ...], layout: str
) -> None:
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
    from eplb_cli.checkpoint import rewrite

    monkeypatch.setattr(rewrite, "_WORTH_A_FILE", 1)
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


def test_a_source_that_changes_meanwhile_stops_the_run_and_nothing_is_left(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = place.faulty(f"touch:fsync:6:{place.source / 'tokenizer.json'}")
    assert failed.returncode == 1
    assert "tokenizer.json: changed while it was being read" in failed.stderr
    assert not place.out.exists()
    assert not place.partial.exists()


def test_a_source_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    place = Place(tmp_path)
    shard = max(place.source.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    failed = place.faulty(f"touch:pwritev:1:{shard}")
    assert failed.returncode == 1
    assert "changed while it was being read" in failed.stderr
    assert not place.out.exists()


def test_a_source_that_cannot_be_read_for_a_while_keeps_finished_shards(tmp_path: Path, eplb: Eplb) -> None:
    place = Place(tmp_path)
    failed = place.faulty("EIO:preadv:14")
    assert failed.returncode == 1
    assert "source" in failed.stderr
    assert "cannot be read at byte" in failed.stderr
    place.require_nothing_half_done()
    assert place.partial.exists()
    assert eplb(*place.arguments, "--format", "quiet").code == 0
    place.require_right()


# Memory.


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    place = Place(tmp_path)
    peaks = []
    for megabytes in (8, 400):
        model = big_qwen3(megabytes)
        source = model.save(tmp_path / f"source-{megabytes}")
        command = [sys.executable, "-m", "tests.peak_memory", "convert", str(source), str(place.plan), "-o"]
        command += [str(tmp_path / f"out-{megabytes}"), "--format", "quiet"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert max(peaks) < 100 << 20
    assert peaks[1] - peaks[0] < 16 << 20
