"""The one place that prints: results to stdout; notes, warnings, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from eplb_cli.errors import EplbError

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.progress import Progress

__all__ = ["Console", "OutputFormat", "print_error", "printable"]


_UNPRINTABLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories: control, format, surrogate, private use, line and paragraph separators."""


class OutputFormat(StrEnum):
    """What a command writes to stdout."""

    human = "human"
    json = "json"
    quiet = "quiet"


def printable(text: str) -> str:
    """`text` without what could steer a terminal or deceive a reader: control and format characters (escape sequences,
    right-to-left overrides) and lone surrogates become backslash escapes. Newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _UNPRINTABLE else ascii(char)[1:-1] for char in text
    )


def print_error(error: EplbError) -> None:
    """Write an error, and its next step when there is one, to stderr as plain lines."""
    _to_stderr(f"Error: {error}")
    if error.hint:
        _to_stderr(f"Hint: {error.hint}")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")


class Console:
    """Output of one command run.

    `human` prints tables and text, `json` one object and nothing else on stdout, `quiet` nothing on stdout.
    Notes go to stderr in human mode only; warnings always do.
    """

    def __init__(self, output_format: OutputFormat) -> None:
        self.output_format = output_format

    @property
    def is_human(self) -> bool:
        """True when people, not programs, read stdout."""
        return self.output_format is OutputFormat.human

    def result(self, data: Mapping[str, Any], *renderables: RenderableType) -> None:
        """Print the command's result: `data` as one JSON object, or `renderables` for people."""
        if self.output_format is OutputFormat.json:
            # allow_nan=False: a NaN among the figures is a defect, not a value.
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
        elif self.is_human:
            rich_console = _rich(stderr=False)
            for renderable in renderables:
                # A plain string is printed as it is: a command to paste must not be wrapped, nor a bracket be markup.
                plain = isinstance(renderable, str)
                rich_console.print(renderable, soft_wrap=plain, markup=not plain)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A remark for people, to stderr."""
        if self.is_human:
            _to_stderr(text)

    def warn(self, text: str) -> None:
        """A warning, to stderr in every mode."""
        _to_stderr(f"Warning: {text}")

    @contextmanager
    def progress(self, *columns: Any) -> Iterator[Progress]:
        """A rich progress display on stderr, shown only to people on a terminal."""
        from rich.progress import Progress

        show = self.is_human and sys.stderr.isatty()
        default = Progress.get_default_columns()
        progress = Progress(*(columns or default), console=_rich(stderr=True), transient=True, disable=not show)
        with progress if show else nullcontext():  # a disabled one ends with an empty line in versions before 14.3
            yield progress

    @contextmanager
    def transfer(self, what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """A progress line with bytes, rate and time left; yields the function that counts bytes done."""
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with self.progress(*columns) as progress:
            task = progress.add_task(what, total=total_bytes)
            yield lambda count: progress.advance(task, count)


def _rich(*, stderr: bool) -> RichConsole:
    from rich.console import Console as RichConsole
    from rich.segment import Segment
    from rich.text import Text

    class Printable(RichConsole):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        # Colours are added after this; here, what looks like an escape sequence came with a name.
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return Printable(stderr=stderr, highlight=False)
