"""The ranks of one EP group start together, or every one of them stops and says why."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

from eplb_cli.errors import EplbError, ServeError

__all__ = ["Ranks"]

logger = logging.getLogger("vllm.eplb")

PATIENCE_SECONDS = 10.0
"""How long a rank may go on waiting for one that has failed, until its process is ended."""
_POLL_SECONDS = 0.25

T = TypeVar("T")
_starts = 0


class Ranks:
    """A context in which a failure of any rank becomes the refusal of all.

    A rank that fails while the others wait for it inside a collective cannot tell them by another collective. It tells
    the group's key-value store, which every rank looks at from a thread of its own.

    Args:
        group: vLLM's EP group.
        tell: called with the reason, just before a process that hangs in a collective is ended.
    """

    def __init__(self, group: Any, tell: Callable[[ServeError], None]) -> None:
        from torch.distributed import distributed_c10d

        global _starts
        _starts += 1
        self._group = group
        self._tell = tell
        store = distributed_c10d._get_default_store()
        # A connection of its own: the group's may be busy, waiting for the rank that failed.
        self._store = distributed_c10d.PrefixStore(
            f"eplb/{_starts}/{min(group.ranks)}", getattr(store, "clone", lambda: store)()
        )
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="eplb-ranks", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        import torch.distributed as dist

        values: list[Any] = [None] * self._group.world_size
        dist.all_gather_object(values, value, group=self._group.cpu_group)
        return values

    def agree(self, step: Callable[[], T]) -> T:
        """Run a step in which no rank waits for another; raises on all ranks alike when it fails on one.

        Raises:
            ServeError: the first failure, with its rank.
        """
        result, problem = None, None
        try:
            result = step()
        except Exception as error:  # whatever it is, the other ranks must learn of it
            problem = _text(error)
        failed = [(rank, text) for rank, text in enumerate(self.together(lambda: self.gather(problem))) if text]
        if failed:
            rank, text = failed[0]
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise ServeError(f"{text}{others}", rank=rank)
        return result  # type: ignore[return-value]  # without a problem there is one

    def together(self, step: Callable[[], T]) -> T:
        """Run a step in which ranks wait for each other.

        Raises:
            ServeError: the step failed on this rank, or the one that failed first took this rank's peer away.
        """
        try:
            return step()
        except Exception as error:  # out of memory, a broken connection: the others must learn of it
            known = self._failure()
            if known is None:
                known = ServeError(_text(error), rank=self._group.rank_in_group)
                with contextlib.suppress(Exception):
                    self._store.set("failed", f"{self._group.rank_in_group}:{_text(error)}")
            raise known from error

    def _failure(self) -> ServeError | None:
        try:
            if not self._store.check(["failed"]):
                return None
            rank, _, text = self._store.get("failed").decode().partition(":")
        except Exception:  # the process that holds the store has ended, and with it the whole group
            return ServeError("another rank has ended")
        return ServeError(text, rank=int(rank))

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            failure = self._failure()
            if failure is not None and not self._over.wait(PATIENCE_SECONDS):
                self._tell(failure)
                logger.critical("eplb: %s; this rank waits for it in vain and ends", failure)
                os._exit(1)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {error}"
