"""Write docs/reference from the code: the command line from its own parser, the file formats from their definitions.

    python docs/generate_reference.py

tests/test_docs.py fails when the pages are not what this writes.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import typing
from pathlib import Path
from typing import Any

import typer

import eplb_cli
from eplb_cli import loads, placement
from eplb_cli.cli import COMMANDS

FOLDER = Path(__file__).parent / "reference"
NOTICE = "<!-- Written by docs/generate_reference.py; edit the code, not this page. -->\n"


def pages() -> dict[str, str]:
    """File name below docs/reference -> content."""
    return {
        "cli.md": command_line(),
        "python.md": python(),
        "formats.md": formats(),
        "plan.schema.json": _json(plan_schema()),
        "profile.schema.json": _json(profile_schema()),
    }


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def command_line() -> str:
    """One section a command: what it does, its arguments and options, and its examples."""
    parts = [
        NOTICE,
        "# Command line\n",
        "Every command takes `--format human|json|quiet` and `-h`. With `json`, stdout holds one object and nothing "
        "else; notes, warnings, progress and errors go to stderr. Exit codes: 0 done, 1 failed (bad input, failed "
        "check, failed run), 2 wrong usage. `EPLB_DEBUG=1` shows tracebacks. An existing output is replaced only with "
        "`--force`.\n",
        "Shell completion: `eplb --install-completion`. Versions: `eplb --version`.\n",
    ]
    for module_name in COMMANDS:
        module = importlib.import_module(f"eplb_cli.cli.{module_name}")
        function = getattr(module, module_name)
        name = module_name.removesuffix("_")
        arguments, options = _parameters(function)
        usage = " ".join(["eplb", name, *(spelling for spelling, _ in arguments), "[OPTIONS]"])
        parts.append(f"## eplb {name}\n")
        parts.append(inspect.cleandoc(function.__doc__) + "\n")
        parts.append(f"```text\n{usage}\n```\n")
        parts.append("| argument | meaning |\n| --- | --- |")
        parts.extend(f"| `{spelling}` | {meaning} |" for spelling, meaning in arguments)
        parts.extend(f"| {spelling} | {meaning} |" for spelling, meaning in options)
        parts.append("\n```bash\n" + "\n".join(module.EXAMPLES) + "\n```\n")
    return "\n".join(parts)


def _parameters(function: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(spelling, meaning) of a command's arguments and options, from its signature."""
    arguments, options = [], []
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if typing.get_origin(hints[name]) is not typing.Annotated:
            continue  # the context, which is no parameter of the command line
        kind, info, *_ = typing.get_args(hints[name])
        meaning = _meaning(info.help, parameter.default)
        if isinstance(info, typer.models.ArgumentInfo):
            arguments.append((info.metavar or name.upper(), meaning))
        else:
            options.append((_spelling(name, kind, info), meaning))
    return arguments, options


def _spelling(name: str, kind: Any, info: Any) -> str:
    # In an annotation, typer keeps the first spelling where the default would stand.
    first = (info.default,) if isinstance(info.default, str) else ()
    given = (*first, *(info.param_decls or ())) or (f"--{name.replace('_', '-')}",)
    names = ", ".join(f"`{part}`" for word in given for part in word.split("/"))
    kinds = [inner for inner in typing.get_args(kind) if inner is not type(None)] or [kind]
    if kinds == [bool]:
        return names
    if isinstance(kinds[0], type) and issubclass(kinds[0], enum.Enum):
        return f"{names} {' or '.join(str(choice.value) for choice in kinds[0])}"
    words = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    return f"{names} {info.metavar or words[kinds[0]]}".replace("|", "\\|")


def _meaning(text: str | None, default: Any) -> str:
    meaning = " ".join((text or "").split()).replace("|", "\\|")
    default = getattr(default, "value", default)
    if default is inspect.Parameter.empty:
        return f"{meaning} Required."
    if default is None or default is False or "Default:" in meaning:
        return meaning
    return f"{meaning} Default: `{'on' if default is True else default}`."


def python() -> str:
    """The public names by the module that defines them."""
    # The package's docstring ends with an indented example.
    example = inspect.cleandoc("\n" + (eplb_cli.__doc__ or "").partition("numpy nor torch.\n")[2])
    parts = [
        NOTICE,
        "# Python API\n",
        "The command line is made of these. `from eplb_cli import ...` offers them all; they are imported when first "
        "used, so that `import eplb_cli` is instant.\n",
        f"```python\n{example}\n```\n",
    ]
    for module, names in eplb_cli._HOMES.items():
        parts.append(f"## eplb_cli.{module}\n")
        for name in names:
            at_home = eplb_cli._NAMES_AT_HOME.get(name, name)
            if at_home != name:
                parts.append(f"`from eplb_cli import {name}` is this function:\n")
            parts.append(f"::: eplb_cli.{module}.{at_home}\n")
    return "\n".join(parts)


def plan_schema() -> dict[str, Any]:
    """JSON Schema of the plan file."""
    count: dict[str, Any] = {"type": "integer", "minimum": 0}
    figure = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
    text = {"type": ["string", "null"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "eplb plan",
        "type": "object",
        "additionalProperties": False,
        "required": ["format", "version", "model", "topology", "num_redundant_experts", "layers"],
        "properties": {
            "balancedness": {
                "description": "Figures by name: before, after, held_out, bound; even, where the rule is another.",
                "type": "object",
                "additionalProperties": figure,
            },
            "dispatch": {
                **text,
                "description": "The rule for choosing copies it is made for; absent for an even split.",
            },
            "format": {"const": placement.FORMAT},
            "layers": {
                "description": "MoE layers, ascending by layer_id.",
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["layer_id", "physical_to_logical"],
                    "properties": {
                        "layer_id": {**count, "description": "The decoder layer's absolute index."},
                        "moe_index": {**count, "description": "Its ordinal among the layers listed."},
                        "physical_to_logical": {
                            "description": "The logical expert that each slot holds; E + R entries, every expert at "
                            "least once. Slot p is on rank p // ((E + R) / ep_size).",
                            "type": "array",
                            "items": count,
                        },
                    },
                },
            },
            "model": {
                "type": "object",
                "additionalProperties": False,
                "required": ["experts"],
                "properties": {
                    "architecture": text,
                    "experts": {**count, "minimum": 1, "description": "Logical experts E of a layer."},
                    "top_k": {"type": ["integer", "null"], "minimum": 1},
                },
            },
            "num_redundant_experts": {**count, "description": "R."},
            "objective": {**text, "description": "What the planner minimised."},
            "profile_sha256": {**text, "description": "Digest of the loads it was planned from."},
            "seed": {"type": ["integer", "null"]},
            "strategy": text,
            "topology": {
                "type": "object",
                "additionalProperties": False,
                "required": ["ep_size"],
                "properties": {
                    "ep_size": {**count, "minimum": 1, "description": "EP ranks G."},
                    "nodes": {**count, "minimum": 1, "description": "Nodes, in equal consecutive blocks of ranks."},
                },
            },
            "version": {"const": placement.VERSION},
        },
    }


def profile_schema() -> dict[str, Any]:
    """JSON Schema of the metadata of a profile file."""
    text = {"type": "string"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"the safetensors metadata `{loads.METADATA_KEY}` of an eplb profile",
        "type": "object",
        "additionalProperties": False,
        "required": ["format", "version"],
        "properties": {
            "dropped": {
                "description": "Reason -> assignments or rows that were left out.",
                "type": "object",
                "additionalProperties": {"type": "integer", "minimum": 0},
            },
            "format": {"const": loads.FORMAT},
            "model": {"type": ["string", "null"], "description": "The architecture in config.json."},
            "phase": {"enum": list(loads.PHASES)},
            "sources": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "sha256", "reader"],
                    "properties": {"name": text, "sha256": text, "reader": text},
                },
            },
            "top_k": {"type": ["integer", "null"], "minimum": 1},
            "version": {"const": loads.VERSION},
            "warnings": {"type": "array", "items": {"type": "string"}},
        },
    }


def formats() -> str:
    """The files, with the schemas' fields as tables."""
    return "\n".join(
        [
            NOTICE,
            "# File formats\n",
            "Unknown keys are errors, and a newer version is refused with both versions named. Files appear whole or "
            "not at all.\n",
            "## Plan\n",
            "JSON with sorted keys, one line a layer, the same bytes for the same plan. Inside a converted checkpoint "
            f"it is called `{placement.PLAN_FILE}`. JSON Schema: [plan.schema.json](plan.schema.json).\n",
            _fields(plan_schema()),
            "Derived from it, and never stored: replica counts, `logical_to_physical`, the rank of a slot.\n",
            "## Profile\n",
            "A safetensors file with these tensors:\n",
            "| tensor | dtype and shape | meaning |\n| --- | --- | --- |\n"
            "| `counts` | int64 [W, L, E] | tokens routed to each logical expert, per window and MoE layer |\n"
            "| `tokens` | int64 [W] | tokens of each window; 0 where the recorder did not tell |\n"
            "| `layer_ids` | int32 [L] | absolute decoder layer of each row |\n"
            "| `window_ids` | int64 [W] | the recorder's own step or pass number |\n"
            "| `window_phase` | uint8 [W] | "
            + ", ".join(f"{code}: {'mixed or unknown' if not code else name}" for code, name in enumerate(loads.PHASES))
            + " |\n",
            f"Its metadata key `{loads.METADATA_KEY}` holds one JSON object. JSON Schema: "
            "[profile.schema.json](profile.schema.json).\n",
            _fields(profile_schema()),
            "## Converted checkpoint\n",
            "An ordinary Hugging Face folder with two more files; see [converted checkpoints](../checkpoints.md).\n",
        ]
    )


def _fields(schema: dict[str, Any]) -> str:
    rows = ["| field | type | meaning |", "| --- | --- | --- |"]

    def walk(prefix: str, properties: dict[str, Any]) -> None:
        for name, field in properties.items():
            kind = field.get("type")
            if "const" in field:
                kind = json.dumps(field["const"])
            elif "enum" in field:
                kind = " or ".join(map(json.dumps, field["enum"]))
            elif isinstance(kind, list):
                kind = " or ".join(kind)
            rows.append(f"| `{prefix}{name}` | {kind} | {field.get('description', '')} |")
            inner = field if field.get("type") == "object" else field.get("items", {})
            suffix = "." if field.get("type") == "object" else "[]."
            walk(f"{prefix}{name}{suffix}", inner.get("properties", {}))

    walk("", schema["properties"])
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in pages().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
