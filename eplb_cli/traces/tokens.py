"""The expert ids of single tokens as they were recorded, for those who replay them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError, ranges
from eplb_cli.loads import PHASES
from eplb_cli.traces import checks
from eplb_cli.traces.layers import resolve_layers
from eplb_cli.traces.protocol import ALL, Reader, ReadOptions, Recording, TokenBlock

__all__ = ["RecordedTokens", "recorded_tokens"]


@dataclass(frozen=True, eq=False)
class RecordedTokens:
    """Consecutive tokens of one phase.

    Args:
        ids: int32 [n, L, k], logical experts; -1 where a token has none.
        layer_ids: int32 [L], decoder layers.
        phase: index into PHASES.
    """

    ids: npt.NDArray[np.int32]
    layer_ids: npt.NDArray[np.int32]
    phase: int


def recorded_tokens(recordings: Sequence[tuple[Reader, Recording]], options: ReadOptions) -> Iterator[RecordedTokens]:
    """The tokens of all recordings in order, a block at a time.

    Where a trace does not tell prefill from decode, its tokens are of the phase that is asked for.

    Raises:
        TraceError: a recording holds counts instead of single tokens, or other layers than the first; an id is not an
            expert's.
        UsageError: the number of experts is not known.
    """
    first: RecordedTokens | None = None
    for reader, recording in recordings:
        for block in reader.read(recording):
            if not isinstance(block, TokenBlock):
                raise TraceError(
                    f"holds counts of a whole window ({reader.name})",
                    file=block.file,
                    rule="single tokens are needed to put them into steps",
                    hint="Record the experts of every token: vLLM's --enable-return-routed-experts, for one.",
                )
            phase = options.phase if block.phase == ALL else block.phase
            if options.phase not in (ALL, phase):
                continue
            tokens = _tokens(block, phase, options)
            if first is None:
                first = tokens
            elif not np.array_equal(first.layer_ids, tokens.layer_ids):
                raise TraceError(
                    f"holds {ranges(tokens.layer_ids)}", file=block.file, rule=f"before came {ranges(first.layer_ids)}"
                )
            yield tokens
    if first is None:
        names = ", ".join(file.name for _, recording in recordings for file in recording.files[:3])
        raise TraceError(f"holds no token of the phase {PHASES[options.phase]}", file=names)


def _tokens(block: TokenBlock, phase: int, options: ReadOptions) -> RecordedTokens:
    rows = resolve_layers(block.axis, options.model, block.file)
    if not block.first_row:
        checks.refuse_zero_layers(block, rows, options.model)
    experts = options.need_num_experts(block.file)
    ids = block.ids[:, rows.positions].astype(np.int32)
    bad = np.argwhere((ids < -1) | (ids >= experts))
    if bad.size:
        token, layer, _ = (int(i) for i in bad[0])
        raise TraceError(
            f"id {ids[tuple(bad[0])]}",
            file=block.file,
            layer=int(rows.layer_ids[layer]),
            row=block.first_row + token,
            rule=f"ids are 0..{experts - 1}, and -1 is padding",
            hint="Are these physical ids? They can be profiled (--physical-to-logical), not replayed.",
        )
    return RecordedTokens(ids, rows.layer_ids, phase)
