"""config.json of the new checkpoint, and other config files that name single experts.

Quantisers list modules by name (`...layers.3.mlp.experts.12.w1`), as keys or values. Those names must follow the
experts, or an engine would read a weight with another one's precision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from eplb_cli.checkpoint.config import PLACEMENT_KEY, ModelConfig
from eplb_cli.checkpoint.family import Family
from eplb_cli.checkpoint.layout import Layout
from eplb_cli.errors import CheckpointError
from eplb_cli.placement import PLAN_FILE, Placement
from eplb_cli.untrusted import parse_json, shown

__all__ = ["MOST_SEARCHED_BYTES", "config_json", "may_name_experts", "placement_record", "renamed_side_file"]

MOST_SEARCHED_BYTES = 64 << 20
"""Side files above this are not searched for names of experts; configs are far smaller."""

_MENTION = re.compile(r"(?<![A-Za-z0-9_])experts(?:\\?\.[a-z_0-9]+)?\\?\.[0-9]")
"""A single expert of any layer, also inside a regular expression where the dots are escaped."""

_PATTERN = re.compile(r"(?<![A-Za-z0-9_])experts(?=[\\.*\[])(?P<tail>[^|(\s]*(?:\(\S*)?)")
_EVERY_ID = re.compile(r"(?:\\d|\[0-9\])[+*]")
_CHOICE = re.compile(r"(?<![A-Za-z0-9_])[0-9]|\\d")
"""A number that is no part of a word, or a single digit of a regular expression."""

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


def may_name_experts(name: str, size: int) -> bool:
    """True for the side files that are searched for names of experts, and rewritten where they hold some.

    They are the JSON and YAML files beside the weights, up to MOST_SEARCHED_BYTES, but no tokenizers and vocabularies,
    whose entries are text. All other side files are copied byte for byte.

    Args:
        name: path below the checkpoint's folder.
        size: bytes of the file.
    """
    return (
        "/" not in name
        and name.endswith((".json", ".yaml", ".yml"))
        and not name.startswith(("tokenizer", "vocab"))
        and size <= MOST_SEARCHED_BYTES
    )


def renamed_side_file(config: ModelConfig, name: str, content: bytes, slots: Slots) -> bytes | None:
    """New content of a side file that names experts; None when it names none, and is copied as it is.

    Raises:
        CheckpointError: it names an expert in a way that cannot be mapped.
    """
    is_json = name.endswith(".json")
    if b"experts" not in content and not (is_json and b"\\u" in content):
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if not is_json:
        renamed_text = _renamed_text(config, name, text, slots)
        return None if renamed_text == text else renamed_text.encode()
    try:
        document = parse_json(text, CheckpointError, file=config.file.parent / name, finite=False)
    except CheckpointError as error:
        if _MENTION.search(text):
            error.rule = "it names experts, which must follow the plan"
            raise
        # No reader takes it for JSON, and nothing in it has to follow the experts.
        return None
    renamed = _renamed(config, name, document, slots)
    return None if renamed == document else _dump(renamed)


def _renamed(config: ModelConfig, name: str, value: Any, slots: Slots) -> Any:
    """A JSON value with every string mapped; one that names an expert of several slots becomes several."""

    def new_names(text: str) -> list[str]:
        return _new_names(config, name, text, slots)

    if isinstance(value, dict):
        return {
            new_key: _renamed(config, name, item, slots) for key, item in value.items() for new_key in new_names(key)
        }
    if isinstance(value, list):
        items: list[Any] = []
        for item in value:
            items += new_names(item) if isinstance(item, str) else [_renamed(config, name, item, slots)]
        return items
    return _one_name(config, name, value, slots) if isinstance(value, str) else value


def _new_names(config: ModelConfig, file: str, text: str, slots: Slots) -> list[str]:
    mentions = len(_MENTION.findall(text))
    if not mentions and not _is_choice(text):
        return [text]
    if _is_draft(config.family, text):
        return [text]
    match = _name_of(config.family).fullmatch(text) if mentions == 1 else None
    if match is None:
        raise CheckpointError(
            f"names single experts as {shown(text)}",
            file=config.file.parent / file,
            rule="only full module names can follow the experts",
            hint="Edit the entry to cover all experts alike, or to full names, then convert again.",
        )
    layer, expert = int(match["layer"]), int(match["expert"])
    if layer not in slots:
        return [text]
    if expert not in slots[layer]:
        raise CheckpointError(f"names {shown(text)}", file=config.file.parent / file, layer=layer, expert=expert)
    return [f"{match['before']}{new}{match['after']}" for new in slots[layer][expert]]


@cache
def _name_of(family: Family) -> re.Pattern[str]:
    """Full names of an expert's modules or tensors."""
    modules = "|".join(re.escape(module) for module in family.experts)
    projections = "|".join(re.escape(projection) for projection in family.projections) or "(?!)"
    number = "(?:0|[1-9][0-9]{0,8})"
    return re.compile(
        rf"(?P<before>(?:[A-Za-z0-9_]+\.)*layers\.(?P<layer>{number})\.(?:{modules})\.(?:(?:{projections})\.)?)"
        rf"(?P<expert>{number})(?P<after>(?:\.[A-Za-z0-9_.*]*)?)"
    )


def _is_draft(family: Family, text: str) -> bool:
    """Whether a name lies in a draft head, whose experts stay."""
    return re.fullmatch(r"[A-Za-z0-9_.*]+", text) is not None and any(
        text.startswith(f"{draft}.") for draft in family.drafts
    )


def _is_choice(text: str) -> bool:
    """Whether a pattern may pick out some of a layer's experts: what follows the module holds numbers, other than as
    parts of words or of a construct that takes every id."""
    return any(_CHOICE.search(_EVERY_ID.sub("", match["tail"])) for match in _PATTERN.finditer(text))


def _renamed_text(config: ModelConfig, name: str, text: str, slots: Slots) -> str:
    """Map names in a text that is not parsed (YAML); each must stay one name."""

    def mapped(match: re.Match[str]) -> str:
        token = match[0]
        if "experts" not in token:
            return token
        # A key's colon is no part of its name; one inside is, as in "re:...".
        stem = token.rstrip(":")
        return _one_name(config, name, stem, slots) + token[len(stem) :]

    # Brackets and commas end a word of a list, but not right behind the experts, where they belong to a pattern.
    word = r"[^\s'\"\[\]{},]"
    return re.sub(rf"{word}*experts[\\.*]*[\[{{]\S*|{word}+", mapped, text)


def _one_name(config: ModelConfig, name: str, text: str, slots: Slots) -> str:
    names = _new_names(config, name, text, slots)
    if len(names) != 1:
        raise CheckpointError(
            f"holds the single value {shown(text)}, whose expert has {len(names)} slots",
            file=config.file.parent / name,
            rule="such a value cannot be expanded",
            hint="Use --layout stock.",
        )
    return names[0]


def _dump(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
