"""Output: what goes to stdout, what to stderr, in each format; files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb_cli.cli import COMMANDS, main
from eplb_cli.console import Console, OutputFormat, print_error
from eplb_cli.errors import OutputError, PlacementError
from eplb_cli.files import atomic_write, refuse_existing, sha256_of_file


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
        with atomic_write(tmp_path / "x") as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "x") as stream:
        stream.write(b"new")
        raise RuntimeError
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_full_device_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left on device"), atomic_write(tmp_path / "x") as _:
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
