"""The parser, as far as eplb asks it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

__all__ = ["FlexibleArgumentParser", "ServeSubcommand"]

FlexibleArgumentParser = argparse.ArgumentParser


class ServeSubcommand:
    """`vllm serve`."""

    def subparser_init(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the options."""
        log = json.loads(os.environ.get("FAKE_VLLM", "{}")).get("log")
        if log:
            with Path(log).open("a") as stream:
                stream.write(f"parser sees {sorted(name for name in os.environ if name.startswith('EPLB_'))}\n")
        parser = subparsers.add_parser("serve")
        parser.add_argument("model")
        parser.add_argument("--eplb-config")
        parser.add_argument("--api-key", nargs="*")
        parser.add_argument("--host")
        parser.add_argument("--uds")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--config")
        for name in ("-tp", "--tensor-parallel-size"), ("-dp", "--data-parallel-size"), ("-pp", "--pipeline-size"):
            parser.add_argument(*name, type=int, default=1)
        for flag in "--enable-expert-parallel", "--enable-eplb":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
