"""Quantisation: how a model says its weights are stored, in config.json or in a quantiser's own file beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint.fields import Fields
from eplb_cli.errors import CheckpointError
from eplb_cli.untrusted import read_json

__all__ = ["Quantisation"]

_KEYS = ("quantization_config", "compression_config")
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside a config.json that says nothing itself, and whose they are; vLLM reads them too."""
_MOST_BYTES = 32 << 20
_PATTERN = re.compile(r"^(re|[+-]):|[*?\[\\(|^$+]")
_MOST_PATTERNS = 4096
_MOST_REPEATS = 4
"""Regular expressions of a config beyond these are not tried: their authors are unknown, and matching could take for
ever. Published ones stay well below."""
_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}


@dataclass(frozen=True)
class Quantisation:
    """A quantisation config.

    Args:
        method: vLLM's name of the method, in lower case; None when the config does not say.
        fields: its keys.
    """

    method: str | None
    fields: Fields

    @classmethod
    def find(cls, config_file: Path, sections: Sequence[Fields]) -> Quantisation | None:
        """What config.json's sections say, else a quantiser's file beside it; None where neither says anything.

        Raises:
            CheckpointError: it is no object, or a value that counts has a wrong type.
        """
        for section in sections:
            for key in _KEYS:
                fields = section.section(key)
                if fields is not None and fields.values:
                    return cls(_method(fields), fields)
        for name, method in _FILES.items():
            file = config_file.with_name(name)
            if not file.is_file():
                continue
            document = read_json(file, CheckpointError, most_bytes=_MOST_BYTES, finite=False)
            if not isinstance(document, dict):
                raise CheckpointError("is not a JSON object", file=file)
            try:
                fields = Fields(document)
                fields = fields.section("quantization") or fields
                return cls(_method(fields) or method, fields)
            except CheckpointError as error:
                error.file = str(file)
                raise
        return None

    def weight_bits(self) -> int:
        """Bits of a weight: by the method, by `bits`, or by the narrowest group; 4 for packed formats that say none.

        Raises:
            CheckpointError: a value has a wrong type.
        """
        if self.method in _BITS:
            return _BITS[self.method]
        bits = self.fields.integer_or("bits", None, most=64)
        if bits is not None:
            return bits
        groups = self.fields.section("config_groups")
        found = []
        for name in () if groups is None else groups.values:
            weights = group.section("weights") if (group := groups.section(name)) else None  # type: ignore[union-attr]
            found.append(None if weights is None else weights.integer_or("num_bits", None, most=64))
        known = [bits for bits in found if bits is not None]
        return min(known) if known else 8 if "8" in (self.fields.text("quant_algo") or "") else 4

    @property
    def weight_block(self) -> tuple[int, int] | None:
        """Rows and columns that share one scale, where the config says so.

        Raises:
            CheckpointError: the value has a wrong type.
        """
        block = self.fields.integers("weight_block_size", least=1)
        return (block[0], block[1]) if block is not None and len(block) == 2 else None

    def rules_for(self, module: str) -> frozenset[str]:
        """What the config says of one module in particular: the lists that name it, and what it is mapped to.

        Quantisers list modules under many keys (`ignore`, `modules_to_not_convert`, `quantized_layers`, `dynamic`,
        targets of groups); each string or key is tried as a name, a part of a name, a glob or a regular expression.
        """
        names, patterns = self._rules
        parts = module.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        found = {rule for run in runs for rule in names.get(run, ())}
        return frozenset(found | {rule for pattern, rule in patterns if _matches(pattern, module)})

    @cached_property
    def _rules(self) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
        """Rules by literal name, and (pattern, rule) for all other strings."""
        names: dict[str, set[str]] = {}
        patterns: list[tuple[str, str]] = []

        def note(text: str, rule: str) -> None:
            if _PATTERN.search(text):
                patterns.append((text, rule))
            else:
                names.setdefault(text.strip("."), set()).add(rule)

        def walk(value: Any, path: str) -> None:
            if isinstance(value, dict):
                for key, below in value.items():
                    note(key, f"{path}: {json.dumps(below, sort_keys=True)}")
                    walk(below, f"{path}.{key}")
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, str):
                        note(item, path)
                    else:
                        walk(item, path)

        walk(self.fields.values, "")
        return names, patterns[:_MOST_PATTERNS]


def _matches(pattern: str, module: str) -> bool:
    kind, _, rest = pattern.partition(":")
    text = rest if kind in ("re", "+", "-") else pattern
    if text == pattern and ".*" not in text and "\\" not in text:
        return fnmatchcase(module, text)
    simple = text.replace("(?:", "(")
    if len(text) > 1000 or len(re.findall(r"[*+?{]", simple)) > _MOST_REPEATS or simple.count("(") > _MOST_REPEATS:
        return False
    if re.search(r"\)[*+{]", simple):
        return False
    try:
        return re.match(text, module) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def _method(fields: Fields) -> str | None:
    method = fields.text("quant_method")
    return None if method is None else method.lower()
