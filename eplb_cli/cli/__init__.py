"""The command line: each module parses one command's arguments, calls, and prints. No logic lives here.

Command modules import nothing heavy at their top, so that `eplb --help` stays instant.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from eplb_cli import __version__
from eplb_cli.console import print_error
from eplb_cli.errors import EplbError
from eplb_cli.versions import installed_versions

__all__ = ["app", "main", "run"]

COMMANDS: tuple[str, ...] = (
    "profile",
    "plan",
    "score",
    "replay",
    "convert",
    "verify",
    "serve",
    "record",
    "export",
    "import_",
    "report",
    "doctor",
)
"""Module of each command, in the order of the help page. Each holds a function of its name and EXAMPLES."""

app = typer.Typer(
    name="eplb",
    help="Offline expert-parallel load balancing for Mixture-of-Experts models:\n"
    "profile routing, plan a placement, convert the checkpoint, serve it balanced from the first token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(value: bool) -> None:
    if value:
        beside = ", ".join(f"{name} {found}" for name, found in installed_versions("vllm", "torch").items())
        sys.stdout.write(f"eplb {__version__}{f' ({beside})' if beside else ''}\n")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for _name in COMMANDS:
    _module = importlib.import_module(f"eplb_cli.cli.{_name}")
    # The command's own first sentence is too long for the list at 80 columns; its module's first line is not.
    _short = (_module.__doc__ or "").partition("\n")[0].partition(": ")[2]
    app.command(
        name=_name.removesuffix("_"),
        short_help=_short[:1].upper() + _short[1:],
        epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in _module.EXAMPLES),
        context_settings=getattr(_module, "CONTEXT_SETTINGS", None),
    )(getattr(_module, _name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 usage."""
    try:
        app(args=None if argv is None else list(argv), prog_name="eplb")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except EplbError as error:
        if os.environ.get("EPLB_DEBUG") == "1":
            raise
        print_error(error)
        return error.exit_code
    except Exception as error:
        if os.environ.get("EPLB_DEBUG") == "1":
            raise
        print_error(
            EplbError(
                f"internal error: {type(error).__name__}: {error}",
                hint="This is a defect of eplb. Run again with EPLB_DEBUG=1 for the traceback, and report it.",
            )
        )
        return 1
    return 0


def run() -> None:
    """Entry point of the `eplb` script."""
    # For every Python that a command starts, and what that starts: the current folder, where a downloaded model may
    # hold a random.py, is not on its path.
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.exit(main())
