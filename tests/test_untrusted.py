"""Files that others made are read with care: no hang, no endless memory, one kind of error."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from eplb_cli.errors import PlacementError, TraceError
from eplb_cli.untrusted import MOST_DEPTH, open_file, parse_json, read_file, read_json, shown


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    assert read_file(tmp_path / "link", TraceError, most_bytes=3) == b"abc"


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is a named pipe; a regular file is needed"):
        open_file(tmp_path / "pipe", TraceError)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/stdin"])
def test_a_device_is_refused(name: str) -> None:
    with pytest.raises(PlacementError, match=r"is (a device|a named pipe|no regular file)|cannot be read"):
        read_file(name, PlacementError, most_bytes=1 << 20)


def test_a_folder_a_missing_and_a_large_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"abcd")
    with pytest.raises(TraceError, match="is a folder"):
        open_file(tmp_path, TraceError)
    with pytest.raises(TraceError, match="no such file"):
        open_file(tmp_path / "none", TraceError)
    with pytest.raises(TraceError, match="has 4 bytes; a file of this kind has at most 3"):
        open_file(tmp_path / "large", TraceError, most_bytes=3)
    with pytest.raises(TraceError, match="cannot be read"):
        open_file("nul\0byte", TraceError)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 20_000 + b"]" * 20_000, "is nested too deep"),
        (b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1), "is nested too deep"),
        (b'{"a": ' * (MOST_DEPTH + 1) + b"1" + b"}" * (MOST_DEPTH + 1), "is nested too deep"),
        (b"1" * 5_000, "holds a number of 5,000 digits"),
        (b"-" + b"1" * 64, "holds a number of 65 digits"),
        (b'"\\ud800"', "holds '\\\\ud800'"),
        (b'{"\\udfff": 1}', "holds '\\\\udfff'"),
        (b'[{"a": 1, "b": 2, "a": 1}]', "has the key 'a' twice"),
        (b"[NaN]", "holds NaN"),
        (b"[-Infinity]", "holds -Infinity"),
        (b"[1e999]", "holds Infinity"),
    ],
)
def test_json_that_would_do_harm_later_is_refused_with_its_file(content: bytes, problem: str) -> None:
    with pytest.raises(PlacementError, match=problem) as caught:
        parse_json(content, PlacementError, file="p.json")
    assert caught.value.file == "p.json"


def test_json_that_is_sound_is_read_as_it_is(tmp_path: Path) -> None:
    text = '{"a": [1, -2.5, "\\u00e9\\ud83d\\ude00", null], "b": 1000000000000000019884624838656}'
    (tmp_path / "x.json").write_text(text)
    read = read_json(tmp_path / "x.json", TraceError, most_bytes=1000)
    assert read == {"a": [1, -2.5, "é😀", None], "b": 1000000000000000019884624838656}
    deepest = b"[" * MOST_DEPTH + b"]" * MOST_DEPTH
    assert parse_json(deepest, TraceError)
    assert parse_json(b"[Infinity]", TraceError, finite=False) == [float("inf")]


def test_many_names_with_one_repeated_take_no_time_to_refuse() -> None:
    names = ",".join(f'"{index}": 0' for index in range(60_000))
    with pytest.raises(TraceError, match="has the key '59999' twice"):
        parse_json("{" + names + ', "59999": 0}', TraceError)


def test_a_value_in_a_message_is_short_and_plain() -> None:
    assert shown("a\x1b[2J\u202e") == "'a\\x1b[2J\\u202e'"
    assert shown(10**5_000) == "<int>"
    assert len(shown("x" * 1_000)) == 80


def test_reading_takes_the_memory_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    tracemalloc.start()
    try:
        assert read_file(tmp_path / "a", TraceError, most_bytes=4 << 30) == b"abc"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
