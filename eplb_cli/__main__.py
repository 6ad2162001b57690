"""`python -m eplb_cli` is `eplb`."""

from eplb_cli.cli import run

run()
