"""What the installed vLLM makes of a command line: `python -m eplb_cli.vllm_plugin.arguments ARGS OF VLLM SERVE`.

Prints one JSON object: {"version": str, "values": {..}} with the values that a plan depends on, or {"version": str,
"error": str} with vLLM's own words when its parser refuses the arguments. Runs in a process of its own, because parsing
imports most of vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from typing import Any

__all__ = ["main"]

_VALUES = (
    "tensor_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "enable_elastic_ep",
    "load_format",
)


def main(arguments: list[str]) -> dict[str, Any]:
    """Parse `arguments`, what follows `vllm serve`, with vLLM's own parser."""
    import vllm
    from vllm.entrypoints.cli import serve

    answer: dict[str, Any] = {"version": vllm.__version__}
    parser = serve.FlexibleArgumentParser(prog="vllm")
    command = serve.ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = parser.parse_args(["serve", *arguments])
    except SystemExit:
        lines = [line for line in complaint.getvalue().splitlines() if "error:" in line]
        return {**answer, "error": lines[-1].partition("error:")[2].strip() if lines else "vLLM refuses the arguments"}
    except (ValueError, TypeError) as error:
        return {**answer, "error": str(error).splitlines()[0]}
    values = {name: getattr(parsed, name) for name in _VALUES if hasattr(parsed, name)}
    config = getattr(parsed, "eplb_config", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {**answer, "values": {**values, "eplb_config": config}}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        _result = main(sys.argv[1:])
    sys.stdout.write(json.dumps(_result, default=str) + "\n")
