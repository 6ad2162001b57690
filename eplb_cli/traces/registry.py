"""Which reader reads which file: told by content, grouped into recordings, replicas kept once."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.traces.counts import RANK_IN_NAME, CountMatrixReader
from eplb_cli.traces.dlblas import DlblasCountsReader, DlblasLoadReader
from eplb_cli.traces.ds4_hits import Ds4HitsReader
from eplb_cli.traces.eplb_profile import EplbProfileReader
from eplb_cli.traces.eplb_recording import EplbRecordingReader
from eplb_cli.traces.files import Container, TraceFile, natural_key
from eplb_cli.traces.imatrix import ImatrixReader
from eplb_cli.traces.json_by_layer import HeatMapReader, PlumbMoeReader, SaliencyReader
from eplb_cli.traces.layer_files import EsftReader, StepReader
from eplb_cli.traces.mindie import MindieReader
from eplb_cli.traces.omni_infer import OmniInferReader
from eplb_cli.traces.pipeline import Profile, as_recorded, collect
from eplb_cli.traces.protocol import Match, RankDumps, Reader, ReadOptions, Recording
from eplb_cli.traces.sglang_csv import SglangCsvReader
from eplb_cli.traces.sglang_passes import SglangPassesReader
from eplb_cli.traces.sglang_responses import SglangResponseReader
from eplb_cli.traces.sglang_stat import SglangJsonReader, SglangStatReader
from eplb_cli.traces.tensorrt_llm import TensorrtLlmReader
from eplb_cli.traces.token_ids import TokenIdsReader
from eplb_cli.traces.vllm_load_stats import VllmLoadStatsReader
from eplb_cli.traces.vllm_responses import VllmResponseReader
from eplb_cli.traces.vllm_routes import VllmRoutesReader

__all__ = ["READERS", "open_recordings", "read_traces"]

READERS: tuple[Reader, ...] = (
    EplbRecordingReader(),
    EplbProfileReader(),
    TokenIdsReader(),
    VllmResponseReader(),
    VllmLoadStatsReader(),
    VllmRoutesReader(),
    SglangStatReader(),
    SglangPassesReader(),
    SglangJsonReader(),
    SglangCsvReader(),
    SglangResponseReader(),
    TensorrtLlmReader(),
    MindieReader(),
    OmniInferReader(),
    DlblasCountsReader(),
    DlblasLoadReader(),
    ImatrixReader(),
    Ds4HitsReader(),
    EsftReader(),
    StepReader(),
    SaliencyReader(),
    PlumbMoeReader(),
    HeatMapReader(),
    CountMatrixReader(),
)
"""All known recorders. A new one is a module and a line here."""


def read_traces(
    paths: Sequence[Path],
    options: ReadOptions,
    *,
    trace_format: str = "auto",
    advance: Callable[[int], None] = lambda _: None,
    expect: Callable[[int], None] = lambda _: None,
) -> Profile:
    """Read files and folders of recorders into one profile.

    Raises:
        TraceError: as `open_recordings`, or a file breaks a rule of its format or of all formats.
        UsageError: as `open_recordings`.
    """
    recordings = open_recordings(paths, options, trace_format=trace_format, advance=advance, expect=expect)
    return collect(recordings, options)


def open_recordings(
    paths: Sequence[Path],
    options: ReadOptions,
    *,
    trace_format: str = "auto",
    advance: Callable[[int], None] = lambda _: None,
    expect: Callable[[int], None] = lambda _: None,
) -> list[tuple[Reader, Recording]]:
    """Find the reader of every file, and put the files of one reader and folder together.

    Args:
        paths: in the order their windows are to have; a folder stands for its files in natural order.
        options: what the user says about them.
        trace_format: "auto", or the name of the one reader to use.
        advance: told of bytes read; expect: told once of the bytes there are.

    Raises:
        TraceError: a file cannot be read, or is of no known recorder.
        UsageError: an unknown format, or an option that contradicts the traces.
    """
    chosen = None if trace_format == "auto" else _reader_named(trace_format)
    recordings: list[tuple[Reader, Recording]] = []
    companions: list[tuple[Reader, TraceFile]] = []
    strays = []
    for file in _files(paths, advance):
        file.refuse_non_traces()
        if file.path not in paths and file.container is Container.text and not chosen and _is_stray(file, options):
            strays.append(f"{file.label} was left out: text of no known recorder")
            continue
        reader, match = (chosen, _forced(chosen, file, options)) if chosen else _recognise(file, options)
        recording = _recording(recordings, reader, file, options)
        if match.skip is not None:
            recording.notes.append(f"{file.label} was left out: {match.skip}")
        elif match.companion:
            companions.append((reader, file))
        else:
            recording.files = [*recording.files, file]
    if not any(recording.files for _, recording in recordings):
        raise TraceError("holds no trace", file=", ".join(map(str, paths)), hint=_looked_for())
    recordings[0][1].notes.extend(strays)
    for reader, recording in recordings:
        above = {recording.folder, *recording.folder.parents}
        recording.companions = [file for owner, file in companions if owner is reader and file.path.parent in above]
    _keep_replicas_once(recordings, options)
    recordings = [(reader, recording) for reader, recording in recordings if recording.files]
    expect(sum(recording.size for _, recording in recordings))
    return recordings


def _files(paths: Sequence[Path], advance: Callable[[int], None]) -> Iterator[TraceFile]:
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.rglob("*") if _is_visible(p, path)), key=natural_key)
            if not inside:
                raise TraceError("the folder holds no file", file=path)
            for file in inside:
                yield TraceFile(file, advance)
        elif path.exists():
            yield TraceFile(path, advance)
        else:
            raise TraceError("no such file", file=path)


def _is_visible(path: Path, folder: Path) -> bool:
    return not path.is_dir() and not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _recording(
    recordings: list[tuple[Reader, Recording]], reader: Reader, file: TraceFile, options: ReadOptions
) -> Recording:
    """The recording of the file's reader and folder, made when it is the first."""
    for known, recording in recordings:
        if known is reader and recording.folder == file.path.parent:
            return recording
    recording = Recording([], options, folder=file.path.parent)
    recordings.append((reader, recording))
    return recording


def _reader_named(name: str) -> Reader:
    names = [reader.name for reader in READERS]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise UsageError(
            f"--trace-format {name} is not known",
            rule=f"did you mean {near[0]}?" if near else None,
            hint=f"Known: auto, {', '.join(names)}.",
        )
    return READERS[names.index(name)]


def _forced(reader: Reader, file: TraceFile, options: ReadOptions) -> Match:
    """A chosen reader takes every file, but may still know companions that hold nothing to count."""
    match = _match(reader, file, options)
    return match if match.skip is not None or match.companion else Match(100)


def _recognise(file: TraceFile, options: ReadOptions) -> tuple[Reader, Match]:
    found = [(reader, _match(reader, file, options)) for reader in READERS]
    best = max(match.confidence for _, match in found)
    winners = [(reader, match) for reader, match in found if match.confidence == best]
    if best < 50:
        reader, match = winners[0]
        raise TraceError(
            f"is of no known recorder ({file.container}; nearest: {reader.name}, but {match.reason})"
            if best
            else f"is of no known recorder ({file.container})",
            file=file.name,
            hint=f"{_looked_for()}\nName the format with --trace-format if you know it.",
        )
    if len(winners) > 1:
        raise TraceError(
            f"fits several recorders: {', '.join(reader.name for reader, _ in winners)}",
            file=file.name,
            hint="Choose one with --trace-format.",
        )
    return winners[0]


def _match(reader: Reader, file: TraceFile, options: ReadOptions) -> Match:
    with as_recorded(reader, file.name):
        return reader.recognise(file, options)


def _is_stray(file: TraceFile, options: ReadOptions) -> bool:
    """A text that no reader finds anything in: a log or a README in a folder of traces."""
    try:
        file.head[:1024].decode()
    except UnicodeDecodeError:
        return False
    return all(_match(reader, file, options).confidence == 0 for reader in READERS)


def _are_ranks(one: TraceFile, other: TraceFile) -> bool:
    """True for the dumps of two ranks, as their names tell, and for one file given twice."""
    ranks = [match[1] for file in (one, other) if (match := RANK_IN_NAME.search(file.path.name))]
    return len(set(ranks)) == 2 or one.path.samefile(other.path)


def _looked_for() -> str:
    return "Looked for:\n" + "\n".join(f"  {reader.name}: {reader.looks_for}" for reader in READERS)


def _keep_replicas_once(recordings: list[tuple[Reader, Recording]], options: ReadOptions) -> None:
    """Drop files that repeat another's bytes where their names tell ranks; two equal requests are two requests.

    The remark goes to this run's notes, so that four identical dumps make the profile that one makes.
    """
    for reader, recording in recordings:
        if options.rank_dumps is not RankDumps.auto and not reader.replicas_possible:
            raise UsageError(
                f"--rank-dumps {options.rank_dumps}",
                file=recording.files[0].name if recording.files else None,
                rule=f"the files of {reader.name} are neither added nor replicas: {reader.looks_for}",
            )
    if options.rank_dumps is RankDumps.sum:
        return
    for reader in READERS:
        own = [recording for known, recording in recordings if known is reader]
        files = [file for recording in own for file in recording.files]
        if not reader.replicas_possible or len(files) < 2:
            continue
        sizes = Counter(file.size for file in files)
        first_of: dict[str, TraceFile] = {}
        for recording in own:
            kept = []
            for file in recording.files:
                first = first_of.setdefault(file.identity, file) if sizes[file.size] > 1 else file
                if first is file:
                    kept.append(file)
                elif options.rank_dumps is RankDumps.auto and not _are_ranks(first, file):
                    kept.append(file)
                    recording.notes.append(
                        f"{file.label} holds the bytes of {first.label}; both were counted, for nothing names ranks"
                    )
                else:
                    recording.notes.append(f"{file.label} is a replica of {first.label}; kept once")
                    recording.replicas += 1
            recording.files = kept
        kept_files = [file for recording in own for file in recording.files]
        if options.rank_dumps is RankDumps.replicated and len(kept_files) > 1:
            raise TraceError(
                f"differs from {kept_files[0].name}",
                file=kept_files[1].name,
                rule="--rank-dumps replicated says that all files hold the same",
                hint="Partial dumps are added with --rank-dumps sum.",
            )
