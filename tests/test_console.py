"""Output: what goes to stdout, what to stderr, in each format; files that appear whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eplb_cli.cli import COMMANDS, main
from eplb_cli.console import Console, OutputFormat, print_error
from eplb_cli.errors import OutputError, PlacementError
from eplb_cli.files import atomic_write, refuse_existing, rename_exclusive, sha256_of_file
from tests.checkpoints import qwen3_moe, random_rows, save_plan


@pytest.mark.parametrize(
    ("output_format", "out", "err"),
    [
        (OutputFormat.human, "a table\n", "a note\nWarning: a warning\n"),
        (OutputFormat.json, '{\n  "x": 1\n}\n', "Warning: a warning\n"),
        (OutputFormat.quiet, "", "Warning: a warning\n"),
    ],
)
def test_each_format_prints_its_own(
    capsys: pytest.CaptureFixture[str], output_format: OutputFormat, out: str, err: str
) -> None:
    console = Console(output_format)
    console.note("a note")
    console.warn("a warning")
    console.result({"x": 1}, "a table")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (out, err)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_sees_every_byte_pass_and_nobody_else_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    model = qwen3_moe()
    source = model.save(tmp_path / "model", shards=2)
    plan = save_plan(tmp_path / "plan.json", random_rows([1, 2], 0))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["convert", str(source), str(plan), "-o", str(tmp_path / "out")]) == 0
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) / 1000
    shown = capsys.readouterr().err
    assert ("converting" in shown, f"{size:.1f}/{size:.1f} kB" in shown) == (terminal, terminal)
    assert main(["verify", str(source), str(tmp_path / "out"), "--level", "full"]) == 0
    shown = capsys.readouterr().err
    size = sum(len(tensor.data) for tensor in model.tensors().values()) / 1000
    assert ("comparing" in shown, f"{size:.1f}/{size:.1f} kB" in shown) == (terminal, terminal)


def test_the_help_page_cuts_no_command_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["-h"]) == 0
    commands = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in commands] == [name.removesuffix("_") for name in COMMANDS]
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("...") for line in commands)


def test_a_nan_among_the_figures_is_a_defect() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Console(OutputFormat.json).result({"x": float("nan")})


def test_an_error_names_place_value_rule_and_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(
        PlacementError("slot 3 holds expert 9", file="p.json", layer=2, rank=1, rule="experts are 0..7", hint="Do.")
    )
    assert (
        capsys.readouterr().err
        == "Error: p.json, layer 2, rank 1: slot 3 holds expert 9; experts are 0..7\nHint: Do.\n"
    )


def test_a_failed_write_leaves_neither_the_file_nor_its_part(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_write(tmp_path / "x", replace=True) as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "x", replace=True) as stream:
        stream.write(b"new")
        raise RuntimeError
    assert (tmp_path / "x").read_bytes() == b"old"


def test_an_output_that_appeared_meanwhile_stays_and_so_does_the_new_content(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="appeared while eplb was running") as caught:  # noqa: SIM117
        with atomic_write(tmp_path / "x", replace=False) as stream:
            stream.write(b"mine")
            (tmp_path / "x").write_bytes(b"theirs")
    assert (tmp_path / "x").read_bytes() == b"theirs"
    (kept,) = tmp_path.glob(".eplb-*.partial")
    assert kept.read_bytes() == b"mine"
    assert str(kept) in str(caught.value.hint)


def test_links_in_the_way_are_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("x", "x.partial"):
        (tmp_path / name).symlink_to(victim)
    with atomic_write(tmp_path / "x", replace=True) as stream:
        stream.write(b"new")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "x").is_symlink()
    with pytest.raises(OutputError, match="exists already"):
        refuse_existing(tmp_path / "x.partial", force=False)


def test_an_output_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "x", replace=False) as stream:
        stream.write(b"")
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_a_device_is_never_replaced() -> None:
    with pytest.raises(OutputError, match="is a device or a pipe"):
        refuse_existing(Path("/dev/null"), force=True)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_exclusive_rename_replaces_nothing(
    tmp_path: Path, kind: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:  # a file system or C library without the flag

        class Library:
            def __init__(self, *_: object, **__: object) -> None:
                pass

        monkeypatch.setattr("ctypes.CDLL", Library)
    for name in ("a", "b"):
        if kind == "file":
            (tmp_path / name).write_text(name)
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / name).touch()
    (tmp_path / "link").symlink_to("nowhere")
    for taken in ("b", "link"):
        with pytest.raises(FileExistsError):
            rename_exclusive(tmp_path / "a", tmp_path / taken)
    rename_exclusive(tmp_path / "a", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "link"]


def test_a_full_device_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left on device"), atomic_write(tmp_path / "x", replace=True) as _:
        Path("/dev/full").write_bytes(b"x" * 10_000)


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    refuse_existing(tmp_path / "x", force=True)
    with pytest.raises(OutputError, match="exists already"):
        refuse_existing(tmp_path / "x", force=False)


@pytest.mark.parametrize("name", ["", "no/x"])
def test_an_output_that_cannot_be_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError):
        refuse_existing(tmp_path / name, force=True)


def test_the_digest_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_command_to_paste_is_printed_on_one_line_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "run [bold] " + "x" * 300
    Console(OutputFormat.human).result({}, text)
    assert capsys.readouterr().out == text + "\n"


HOSTILE = "model\x1b]0;title\u202e\udcff"


@pytest.mark.parametrize("say", ["note", "warn", "result", "table", "error"])
def test_control_characters_never_reach_the_terminal(capsys: pytest.CaptureFixture[str], say: str) -> None:
    from rich.table import Table

    console = Console(OutputFormat.human)
    if say == "error":
        print_error(PlacementError("is bad", file=HOSTILE, hint=HOSTILE))
    elif say == "table":
        table = Table("name")
        table.add_row(HOSTILE)
        console.result({}, table)
    elif say == "result":
        console.result({}, HOSTILE)
    else:
        getattr(console, say)(HOSTILE)
    shown = "".join(capsys.readouterr())
    assert not set(shown) & {"\x1b", "\u202e", "\udcff"}
    assert "\\x1b]0;title\\u202e\\udcff" in shown.replace("\n", "")
