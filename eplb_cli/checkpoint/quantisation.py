"""Quantisation: how a model says its weights are stored, in config.json or in a quantiser's own file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eplb_cli.checkpoint.fields import Fields
from eplb_cli.errors import CheckpointError
from eplb_cli.untrusted import read_json

__all__ = ["Quantisation"]

_KEYS = ("quantization_config", "compression_config")
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside a config.json that says nothing itself, and whose they are; vLLM reads them too."""
_MOST_BYTES = 32 << 20
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


def _method(fields: Fields) -> str | None:
    method = fields.text("quant_method")
    return None if method is None else method.lower()
