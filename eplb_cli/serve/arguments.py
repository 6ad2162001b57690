"""The user's `vllm serve` arguments, as far as a plan depends on them."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_cli.errors import UsageError

__all__ = ["EngineArguments", "read_arguments"]


@dataclass(frozen=True)
class EngineArguments:
    """Those of the user's `vllm serve` arguments that a plan depends on.

    Args:
        rest: the arguments to pass on, without `--eplb-config`, whose fields are merged with the plan's.
        eplb_config: fields of `--eplb-config`, in either of its spellings.
        given: names of the options that were given at all.
    """

    rest: tuple[str, ...]
    eplb_config: Mapping[str, Any]
    given: frozenset[str]
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


def _options() -> argparse.ArgumentParser:
    """A parser for the options that matter here; everything else stays as it is."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names, default in (
        (("-tp", "--tensor-parallel-size"), 1),
        (("-dp", "--data-parallel-size"), 1),
        (("-pcp", "--prefill-context-parallel-size"), 1),
        (("-pp", "--pipeline-parallel-size"), 1),
        (("-dpl", "--data-parallel-size-local"), None),
        (("-dpn", "--data-parallel-rank"), None),
        (("-n", "--nnodes"), 1),
        (("-r", "--node-rank"), 0),
        (("--port",), 8000),
    ):
        parser.add_argument(*names, type=int, default=default)
    for names, text in (
        (("--host",), None),
        (("--uds",), None),
        (("--ssl-certfile",), None),
        (("--api-key",), None),
        (("--load-format",), "auto"),
        (("--expert-placement-strategy",), "linear"),
        (("-dpb", "--data-parallel-backend"), None),
        (("--distributed-executor-backend",), None),
        (("--weight-transfer-config",), None),
        (("--root-path",), None),
    ):
        parser.add_argument(*names, default=text)
    for names in (
        ("-ep", "--enable-expert-parallel"),
        ("--enable-eplb",),
        ("--enable-elastic-ep",),
        ("--headless",),
        ("--enable-return-routed-experts",),
    ):
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=None)
    return parser


def read_arguments(arguments: Sequence[str]) -> EngineArguments:
    """Read `vllm serve` arguments: underscores as dashes, `--flag=value`, `--no-flag`, dotted fields, `--config FILE`.

    Raises:
        UsageError: `--eplb-config` or the file of `--config` cannot be read, or a number is none.
    """
    tokens = [_dashes(token) for token in _with_config_file(arguments)]
    rest: list[str] = []
    config: dict[str, Any] = {}
    tokens_left = iter(tokens)
    for token in tokens_left:
        name, equals, value = token.partition("=")
        if name == "--eplb-config":
            config.update(_json_object(value if equals else next(tokens_left, "")))
        elif name.startswith("--eplb-config."):
            config[name.removeprefix("--eplb-config.").replace("-", "_")] = _scalar(
                value if equals else next(tokens_left, "")
            )
        else:
            rest.append(token)
    parser = _options()
    try:
        known, _ = parser.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from None
    given = {
        action.dest
        for action in parser._actions
        if any(token.partition("=")[0] in action.option_strings for token in rest)
    }
    return EngineArguments(tuple(rest), config, frozenset(given), vars(known))


def _dashes(token: str) -> str:
    """`--tensor_parallel_size=2` as `--tensor-parallel-size=2`; fields after a dot keep their underscores."""
    found = re.match(r"--[A-Za-z0-9_-]+", token)
    return token if found is None else found.group().replace("_", "-") + token[found.end() :]


def _with_config_file(arguments: Sequence[str]) -> list[str]:
    """The arguments with those of `--config FILE` before them, which the command line overrides."""
    tokens = list(arguments)
    for index, word in enumerate(tokens):
        if word == "--config" or word.startswith("--config="):
            name = word.partition("=")[2] if "=" in word else (tokens[index + 1 : index + 2] or [""])[0]
            return [*_config_file(Path(name)), *tokens[:index], *tokens[index + (1 if "=" in word else 2) :]]
    return tokens


def _config_file(file: Path) -> list[str]:
    import yaml

    try:
        document = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise UsageError("no such file", file=file) from None
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"is not a vLLM configuration: {error}", file=file) from None
    tokens: list[str] = []
    for key, value in (document or {}).items():
        name = f"--{key}".replace("_", "-")
        if value is True:
            tokens.append(name)
        elif isinstance(value, list):
            tokens += [name, *(str(item) for item in value)]
        elif isinstance(value, dict):
            tokens += [name, json.dumps(value)]
        elif value is not False and value is not None:
            tokens += [name, str(value)]
    return tokens


def _json_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--eplb-config is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("--eplb-config is not a JSON object")
    return document


def _scalar(text: str) -> Any:
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    return {"True": True, "False": False, "None": None}.get(text, text)
