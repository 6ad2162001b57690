"""What the installed vLLM makes of a command line and of a model, asked before anything is loaded.

Reads a JSON object from standard input: `arguments`, what follows `vllm serve`; `architecture`, the class that the
model's config.json names; `quantisation`, vLLM's name of the method; both may be null. Prints one JSON object:
{"version": str, "values": {..}, "eplb": {..}} with the values that a plan depends on and what can run under EPLB, or
{"version": str, "error": str} with vLLM's own words when its parser refuses the arguments. Runs in a process of its
own, because parsing imports most of vLLM.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import sys
import textwrap
from typing import Any

__all__ = ["main", "method_runs_eplb", "model_runs_eplb"]

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


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments with vLLM's own parser, and look the model up in its registries."""
    import vllm
    from vllm.entrypoints.cli import serve

    answer: dict[str, Any] = {"version": vllm.__version__}
    parser = serve.FlexibleArgumentParser(prog="vllm")
    command = serve.ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = parser.parse_args(["serve", *question["arguments"]])
    except SystemExit:
        lines = [line for line in complaint.getvalue().splitlines() if "error:" in line]
        return {**answer, "error": lines[-1].partition("error:")[2].strip() if lines else "vLLM refuses the arguments"}
    except (ValueError, TypeError, AssertionError, OSError) as error:
        return {**answer, "error": (str(error).splitlines() or [type(error).__name__])[0]}
    values = {name: getattr(parsed, name) for name in _VALUES if hasattr(parsed, name)}
    config = getattr(parsed, "eplb_config", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        **answer,
        "values": {**values, "eplb_config": config},
        "eplb": _under_eplb(parsed, question) if values.get("enable_eplb") else {},
    }


def _under_eplb(parsed: Any, question: dict[str, Any]) -> dict[str, bool]:
    """What of the question runs under EPLB; True also for what only the loaded model can tell."""
    overrides = getattr(parsed, "hf_overrides", None)
    own_class = getattr(parsed, "model_impl", "auto") != "transformers" and not (
        isinstance(overrides, dict) and "architectures" in overrides
    )
    architecture, method = question["architecture"], getattr(parsed, "quantization", None) or question["quantisation"]
    return {
        "architecture": not own_class or architecture is None or model_runs_eplb(architecture),
        "quantisation": method is None or method_runs_eplb(method),
    }


def model_runs_eplb(architecture: str) -> bool:
    """Whether vLLM's class for the architecture, or the language model inside it, is a `MixtureOfExperts`.

    True for an architecture that vLLM has no class for: it may run it through transformers, or refuse it itself.
    """
    from vllm.model_executor.models.interfaces import MixtureOfExperts, SupportsMultiModal
    from vllm.model_executor.models.registry import ModelRegistry

    def inner(model: type) -> list[str]:
        """Architectures and classes that the constructor names."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(model.__init__)))  # type: ignore[misc]
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return sorted(word for word in words if isinstance(word, str) and word in ModelRegistry.models)

    entry = ModelRegistry.models.get(architecture)
    if entry is None:
        return True
    model = entry.load_model_cls()
    # The protocol is fulfilled by members; some classes have them without naming it.
    if MixtureOfExperts in model.__mro__ or hasattr(model, "set_eplb_state"):
        return True
    if SupportsMultiModal not in model.__mro__:
        return False
    named = [name for name in inner(model) if name != architecture]
    return not named or any(model_runs_eplb(name) for name in named)


def method_runs_eplb(method: str) -> bool:
    """Whether a quantisation can run experts under EPLB; True for a method that vLLM does not know."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    def below(kind: type) -> set[type]:
        children: list[type] = kind.__subclasses__()
        return {kind}.union(*map(below, children))

    if method not in QUANTIZATION_METHODS:
        return True
    module = get_quantization_config(method).__module__
    ways = [way for way in below(FusedMoEMethodBase) if way.__module__ == module]
    default = inspect.getattr_static(FusedMoEMethodBase, "supports_eplb")
    return not ways or any(inspect.getattr_static(way, "supports_eplb") is not default for way in ways)


if __name__ == "__main__":
    # vLLM logs to stdout while it is imported; the answer stands alone.
    with contextlib.redirect_stdout(sys.stderr):
        _answer = main(json.loads(sys.stdin.read()))
    sys.stdout.write(json.dumps(_answer, default=str) + "\n")
