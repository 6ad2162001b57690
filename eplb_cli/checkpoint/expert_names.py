"""config.json of the new checkpoint, and other config files that name single experts.

Quantisers list modules by name (`...layers.3.mlp.experts.12.w1`), as keys or values. Those names must follow the
experts, or an engine would read a weight with another one's precision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from eplb_cli.checkpoint.config import PLACEMENT_KEY, ModelConfig
from eplb_cli.checkpoint.rewrite import Layout
from eplb_cli.errors import CheckpointError
from eplb_cli.placement import PLAN_FILE, Placement

__all__ = ["config_json", "may_name_experts", "placement_record", "renamed_side_file"]

_MENTION = re.compile(r"(?<![A-Za-z0-9_])experts(?:\\?\.[a-z_0-9]+)?\\?\.[0-9]")
"""A single expert of any layer, also inside a regular expression where the dots are escaped."""

Slots = Mapping[int, Mapping[int, list[int]]]
"""Layer -> source expert -> its new ids."""


def placement_record(placement: Placement, layout: Layout, *, stored_experts: int) -> dict[str, Any]:
    """What config.json says of the conversion, under the key `eplb_placement`.

    Args:
        placement: the complete placement that was applied.
        layout: how experts are stored.
        stored_experts: experts that the expert tensors of a layer hold (the most, where layers differ).
    """
    return {
        "version": 1,
        "layout": layout.value,
        "num_logical_experts": placement.num_experts,
        "num_physical_experts": placement.num_slots,
        "num_stored_experts": stored_experts,
        "ep_size": placement.ep_size,
        "plan": PLAN_FILE,
        "plan_sha256": placement.map_sha256,
    }


def config_json(
    config: ModelConfig, placement: Placement, layout: Layout, *, stored_experts: int, slots: Slots
) -> bytes:
    """Content of the new config.json: the source's, with the placement's record, names of experts mapped, and in the
    physical layout the expert count set to the number of slots.

    Raises:
        CheckpointError: it names an expert in a way that cannot be mapped.
    """
    document = _renamed(config, config.file.name, dict(config.document), slots)
    if layout is Layout.physical:
        section = document if config.section is None else document[config.section]
        for key in config.count_keys:
            section[key] = placement.num_slots
    document[PLACEMENT_KEY] = placement_record(placement, layout, stored_experts=stored_experts)
    return _dump(document)


def may_name_experts(name: str) -> bool:
    """True for files that are searched for names of experts: JSON and YAML beside the weights, but no vocabularies."""
    return "/" not in name and name.endswith((".json", ".yaml", ".yml")) and not name.startswith(("tokenizer", "vocab"))


def renamed_side_file(config: ModelConfig, name: str, content: bytes, slots: Slots) -> bytes | None:
    """New content of a side file that names experts; None when it names none.

    Raises:
        CheckpointError: it names an expert in a way that cannot be mapped.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if not _MENTION.search(text):
        return None
    if not name.endswith(".json"):
        return _renamed_text(config, name, text, slots).encode()
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"names experts but is not JSON: {error}", file=config.file.parent / name) from None
    renamed = _renamed(config, name, document, slots)
    return None if renamed == document and list(_strings(renamed)) == list(_strings(document)) else _dump(renamed)


def _renamed(config: ModelConfig, name: str, value: Any, slots: Slots) -> Any:
    """A JSON value with every string mapped; one that names an expert of several slots becomes several."""

    def new_names(text: str) -> list[str]:
        return _new_names(config, name, text, slots)

    if isinstance(value, dict):
        renamed = {
            new_key: _renamed(config, name, item, slots) for key, item in value.items() for new_key in new_names(key)
        }
        if any(_MENTION.search(key) for key in value):
            return dict(sorted(renamed.items(), key=lambda pair: _order(pair[0])))
        return renamed
    if isinstance(value, list):
        items: list[Any] = []
        for item in value:
            items += new_names(item) if isinstance(item, str) else [_renamed(config, name, item, slots)]
        return items
    if isinstance(value, str):
        names = new_names(value)
        if len(names) == 1:
            return names[0]
        raise CheckpointError(
            f"holds the single value {value!r}, whose expert has {len(names)} slots",
            file=config.file.parent / name,
            rule="such a value cannot be expanded",
            hint="Use --layout stock.",
        )
    return value


def _new_names(config: ModelConfig, file: str, text: str, slots: Slots) -> list[str]:
    if not _MENTION.search(text):
        return [text]
    family = config.family
    modules = "|".join(re.escape(module) for module in family.experts)
    projections = "|".join(re.escape(projection) for projection in family.projections) or "(?!)"
    match = re.fullmatch(
        rf"(?P<before>(?P<layers>.*\.layers|layers)\.(?P<layer>\d+)\.(?:{modules})\.(?:(?:{projections})\.)?)"
        r"(?P<expert>\d+)(?P<after>(?:\..*)?)",
        text,
    )
    if match is None:
        raise CheckpointError(
            f"names single experts as {text!r}",
            file=config.file.parent / file,
            rule="only full module names can follow the experts",
            hint="Edit the entry to cover all experts alike, or to full names, then convert again.",
        )
    layer, expert = int(match["layer"]), int(match["expert"])
    draft = any(match["layers"] == d or match["layers"].startswith(f"{d}.") for d in family.drafts)
    if draft or layer not in slots:
        return [text]
    if expert not in slots[layer]:
        raise CheckpointError(f"names {text!r}", file=config.file.parent / file, layer=layer, expert=expert)
    return [f"{match['before']}{new}{match['after']}" for new in slots[layer][expert]]


def _renamed_text(config: ModelConfig, name: str, text: str, slots: Slots) -> str:
    """Map names in a text that is not parsed (YAML); each must stay one name."""

    def mapped(match: re.Match[str]) -> str:
        if not _MENTION.search(match[0]):
            return match[0]
        names = _new_names(config, name, match[0], slots)
        if len(names) != 1:
            raise CheckpointError(
                f"names {match[0]!r}, whose expert has {len(names)} slots",
                file=config.file.parent / name,
                rule="this file cannot be expanded",
                hint="Use --layout stock, or remove the file.",
            )
        return names[0]

    return re.sub(r"[^\s'\",\[\]{}:]+", mapped, text)


def _strings(value: Any) -> Any:
    """All strings of a JSON value in order; dictionaries compare equal in any order, files do not."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str):
        yield value


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _dump(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
