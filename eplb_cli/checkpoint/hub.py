"""Where MODEL lies: a folder, a config.json, or a Hugging Face repository id in the local cache.

Weights are never downloaded from here: hundreds of gigabytes are the user's decision. A config.json is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eplb_cli.errors import CheckpointError

__all__ = ["locate", "locate_config"]

_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(model: str | Path) -> Path:
    """The folder of MODEL: itself, or the repository's snapshot in the local cache. Nothing is downloaded.

    Raises:
        CheckpointError: there is no such folder, or the repository is not in the local cache; the message then tells a
            gated, a forbidden and a missing repository from an unreachable hub.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError("is a file, a checkpoint's folder is needed", file=path)
    repository = _repository_id(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        raise _not_cached(repository, probe=True) from None


def locate_config(model: str | Path) -> Path:
    """The config.json of MODEL; of a repository that is not in the local cache, this one file is downloaded.

    Raises:
        CheckpointError: as `locate`.
    """
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.is_file():
        return path
    repository = _repository_id(model)
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE:
        raise _not_cached(repository, probe=False)
    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:
        raise _explain(repository, error) from error


def _repository_id(model: str | Path) -> str:
    text = str(model)
    # `models/qwen` where there is a folder `models` is a misspelt path, not a repository.
    if Path(text).parent.is_dir() or text.startswith(".") or not _REPOSITORY_ID.fullmatch(text):
        raise CheckpointError(
            "no such folder",
            file=text,
            rule="MODEL is a folder, a config.json, or a repository id like Qwen/Qwen3-30B-A3B",
        )
    return text


def _not_cached(repository: str, *, probe: bool) -> CheckpointError:
    """Why a repository that the cache lacks cannot be had, found by asking the hub for its config.json's header."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    download = f"hf download {repository}"
    if constants.HF_HUB_OFFLINE:
        return CheckpointError(
            f"{repository} is no folder here and not in the local cache, and HF_HUB_OFFLINE=1 forbids to look further",
            hint=f"On a machine with network: {download}",
        )
    if probe:
        try:
            get_hf_file_metadata(hf_hub_url(repository, "config.json"), timeout=10)
        except Exception as error:
            return _explain(repository, error)
    return CheckpointError(
        f"{repository} is no folder here and not in the local cache", hint=f"Fetch it first: {download}"
    )


def _explain(repository: str, error: Exception) -> CheckpointError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repository}"
    status = _status(error)
    if isinstance(error, GatedRepoError):
        if status == 401:
            return CheckpointError(
                f"{repository} is gated, and no valid login was sent (401)",
                hint=f"Request access at {page}, then: hf auth login",
            )
        return CheckpointError(
            f"{repository} is gated, and this login has no access to it ({status})",
            hint=f"Request access at {page}; your login is shown by: hf auth whoami",
        )
    # Without a login the hub answers 401 for what does not exist, so as not to tell what does.
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        if status == 401:
            return CheckpointError(
                f"{repository} does not exist, or is private and no valid login was sent (401)",
                hint="Check the spelling; for a private repository: hf auth login",
            )
        return CheckpointError(
            f"{repository} does not exist on the hub ({status})", hint="Check the spelling of the repository id."
        )
    if isinstance(error, LocalEntryNotFoundError):
        return _unreachable(repository)
    if isinstance(error, EntryNotFoundError):
        return CheckpointError(f"{repository} has no config.json ({status})", hint=f"Look at {page}")
    if isinstance(error, HfHubHTTPError):
        if status == 403:
            return CheckpointError(
                f"{repository}: access is forbidden to this login (403)", hint="Your login: hf auth whoami"
            )
        return CheckpointError(f"{repository}: the hub answered {status}", hint="Try again later.")
    return _unreachable(repository)


def _unreachable(repository: str) -> CheckpointError:
    return CheckpointError(
        f"{repository} is no folder here and not in the local cache, and the hub cannot be reached",
        hint=f"Check the network, then: hf download {repository}",
    )


def _status(error: Any) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)
