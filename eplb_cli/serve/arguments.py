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
from eplb_cli.untrusted import parse_json, read_file, shown

__all__ = ["EngineArguments", "read_arguments"]

_MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineArguments:
    """Those of the user's `vllm serve` arguments that a plan depends on.

    Args:
        rest: the arguments to pass on, without `--eplb-config`, whose fields are merged with the plan's.
        eplb_config: fields of `--eplb-config`, in either of its spellings.
        given: names of the options that were given at all, in the file of `--config` too.
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
    """Read `vllm serve` arguments: underscores as dashes, `--flag=value`, `--no-flag`, dotted fields, `--config FILE`,
    which the command line overrides.

    Raises:
        UsageError: `--eplb-config` or the file of `--config` cannot be read, or a number is none.
    """
    rest, eplb_config, config_file = _split(arguments)
    tokens = rest
    if config_file is not None:
        # vLLM reads the file again: only it knows what `false` means for each of its flags.
        rest += ["--config", config_file]
        from_file, eplb_config_of_file, another = _split(_config_file(Path(config_file)))
        if another is not None:
            raise UsageError("names another `config`", file=config_file)
        tokens, eplb_config = [*from_file, *tokens], {**eplb_config_of_file, **eplb_config}
    parser = _options()
    try:
        known, _ = parser.parse_known_args(tokens)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from None
    given = {
        action.dest
        for action in parser._actions
        if any(token.partition("=")[0] in action.option_strings for token in tokens)
    }
    return EngineArguments(tuple(rest), eplb_config, frozenset(given), vars(known))


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], str | None]:
    """The arguments without `--eplb-config` and `--config`; the fields of the one and the file of the other."""
    rest: list[str] = []
    eplb_config: dict[str, Any] = {}
    config_file = None
    left = iter(arguments)
    for token in map(_dashes, left):
        name, equals, value = token.partition("=")
        if name == "--config":
            if config_file is not None:
                raise UsageError("--config is given twice", rule="vLLM reads one file")
            config_file = value if equals else next(left, "")
        elif name == "--eplb-config":
            eplb_config.update(_json_object(value if equals else next(left, "")))
        elif name.startswith("--eplb-config."):
            field = name.removeprefix("--eplb-config.").replace("-", "_")
            eplb_config[field] = _scalar(value if equals else next(left, ""))
        else:
            rest.append(token)
    return rest, eplb_config, config_file


def _dashes(token: str) -> str:
    """`--tensor_parallel_size=2` as `--tensor-parallel-size=2`; fields after a dot keep their underscores."""
    found = re.match(r"--[A-Za-z0-9_-]+", token)
    return token if found is None else found.group().replace("_", "-") + token[found.end() :]


def _config_file(file: Path) -> list[str]:
    """The arguments that a file of `--config` stands for."""
    tokens: list[str] = []
    for key, value in _read_yaml(file).items():
        name = f"--{key}"
        if value is True:
            tokens.append(name)
        elif value is False:
            tokens.append(f"--no-{key}")
        elif isinstance(value, list):
            tokens += [name, *map(str, value)]
        elif isinstance(value, dict):
            tokens += [name, json.dumps(value, default=str)]
        elif value is not None:
            tokens += [name, str(value)]
    return tokens


def _read_yaml(file: Path) -> dict[str, Any]:
    """A YAML mapping without repeated keys and without aliases, of which a few lines can expand to gigabytes."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it holds an alias; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key in (key.value for key, _ in node.value if isinstance(key.value, str)):
                if key in seen:
                    raise yaml.YAMLError(f"it has the key {shown(key)} twice")
                seen.add(key)
            return super().construct_mapping(node, deep)

    content = read_file(file, UsageError, most_bytes=_MOST_CONFIG_BYTES)
    try:
        document = yaml.load(content, Loader) or {}  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise UsageError("is nested too deep", file=file) from None
    except (yaml.YAMLError, ValueError, UnicodeError) as error:
        raise UsageError(f"is not a vLLM configuration: {' '.join(str(error).split())}", file=file) from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError("is not a vLLM configuration", file=file, rule="it must map names of options to values")
    return document


def _json_object(text: str) -> dict[str, Any]:
    try:
        document = parse_json(text, UsageError)
    except UsageError as error:
        raise UsageError(f"--eplb-config {error.problem}", rule=error.rule) from None
    if not isinstance(document, dict):
        raise UsageError("--eplb-config is not a JSON object")
    return document


def _scalar(text: str) -> Any:
    with contextlib.suppress(UsageError):
        return parse_json(text, UsageError)
    return {"True": True, "False": False, "None": None}.get(text, text)
