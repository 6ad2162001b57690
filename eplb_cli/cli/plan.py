"""`eplb plan`: loads to a placement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import ForceOption, FormatOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eplb_cli.advice import Advice
    from eplb_cli.console import Console
    from eplb_cli.loads import ExpertLoads, ModelShape
    from eplb_cli.planner import PlanRequest, PlanResult

__all__ = ["EXAMPLES", "plan"]

EXAMPLES = (
    "eplb plan loads.safetensors -tp 8 -o plan.json",
    "eplb plan loads.safetensors --ep-size 32 --num-redundant-experts 32 -o plan.json",
    "eplb plan loads.safetensors -tp 8 --strategy stock -o plan.json",
    "eplb plan prefill.safetensors decode.safetensors --ep-size 16 --format json -o plan.json",
    "eplb plan loads.safetensors --ep-size 8 --explain 3 --dry-run",
    "eplb plan --check plan.json",
)

DEFINITION = (
    "balancedness = sum of the mean rank load / sum of the max rank load, over windows and layers; 1 is perfect. "
    "max/mean is its reciprocal. held out: scored on windows that the plan was not made from. Ranks wait in a share "
    "1 - balancedness of the MoE time if a rank's time follows its tokens; a whole step gains less."
)


def plan(
    loads: Annotated[
        list[str] | None, typer.Argument(help="Profiles; several join along their windows.", metavar="LOADS...")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the plan.")] = None,
    ep_size: Annotated[int | None, typer.Option("--ep-size", help="EP ranks.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("-tp", "--tensor-parallel-size", help="With -dp, gives the EP ranks as their product.")
    ] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option("-dp", "--data-parallel-size", help="With -tp, gives the EP ranks as their product.")
    ] = None,
    num_redundant_experts: Annotated[
        str | None,
        typer.Option("--num-redundant-experts", help="R. Default: the smallest valid.", metavar="R"),
    ] = None,
    num_nodes: Annotated[int, typer.Option("--num-nodes", help="Nodes that the ranks are spread over.")] = 1,
    num_groups: Annotated[
        int | None, typer.Option("--num-groups", help="Expert groups of the router (n_group in config.json).")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            help="auto; windows: fewest waiting tokens over windows; mean: balance of the summed load; deepseek: the "
            "reference's result; stock: the best relabelling that an unmodified vLLM starts from.",
        ),
    ] = "auto",
    effort: Annotated[str, typer.Option("--effort", help="fast, normal or thorough search.")] = "normal",
    previous: Annotated[Path | None, typer.Option("--previous", help="The plan in force; moves are counted.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model: expert sizes, and which layers are MoE.")
    ] = None,
    max_extra_gib: Annotated[
        float | None, typer.Option("--max-extra-gib", help="Most GiB per rank that redundant experts may take.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search; recorded in the plan.")] = 0,
    folds: Annotated[int, typer.Option("--folds", help="Folds of the cross-validation; 0 leaves it out.", min=0)] = 5,
    explain: Annotated[
        int | None, typer.Option("--explain", help="Print how one layer (absolute id) was packed.", metavar="LAYER")
    ] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Validate a plan file and do nothing else.", metavar="PLAN")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compute and print, write nothing.")] = False,
    force: ForceOption = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Compute a placement of expert copies on ranks."""
    import time

    from eplb_cli.console import Console
    from eplb_cli.errors import UsageError
    from eplb_cli.files import refuse_existing
    from eplb_cli.planner import make_plan
    from eplb_cli.planner.explain import explain_layer

    console = Console(output_format)
    if check is not None:
        if loads or output is not None:
            raise UsageError("--check validates a file", rule="it takes no LOADS and no --output")
        _check(check, console)
        return
    if not loads:
        raise UsageError("no loads given", hint="eplb plan loads.safetensors --ep-size 8 -o plan.json")
    if output is None and not dry_run:
        raise UsageError("no --output given", hint="Pass -o plan.json, or --dry-run to write nothing.")
    if output is not None and not dry_run:
        refuse_existing(output, force=force)
    request = _request(
        ranks=_ranks(ep_size, tensor_parallel_size, data_parallel_size),
        redundant=num_redundant_experts,
        num_nodes=num_nodes,
        num_groups=num_groups,
        strategy=strategy,
        effort=effort,
        previous=previous,
        model=model,
        max_extra_gib=max_extra_gib,
        seed=seed,
        folds=folds,
    )
    joined, digest = _read_loads(loads)
    started = time.perf_counter()
    result = make_plan(joined, request, digest)
    seconds = round(time.perf_counter() - started, 3)
    advice = _advise(joined, result, request, model, tensor_parallel_size or 1, loads)
    explained = [] if explain is None else explain_layer(joined, result.placement, explain)
    if output is not None and not dry_run:
        result.placement.save(output)
    for warning in result.warnings:
        console.warn(warning)
    for note in result.notes:
        console.note(note)
    data = result.as_dict()
    data["seconds"] = seconds
    data["advice"] = advice.as_dict()
    if explain is not None:
        data["explanation"] = explained
    console.result(data, *_table(joined, result, advice, folds), *explained)
    if output is not None and not dry_run:
        console.note(f"Wrote {output}.")


def _ranks(ep_size: int | None, tensor: int | None, data: int | None) -> int:
    from eplb_cli.errors import UsageError

    product = None if tensor is None and data is None else (tensor or 1) * (data or 1)
    if ep_size is None and product is None:
        raise UsageError("the number of EP ranks is not given", hint="Pass --ep-size G, or -tp and -dp.")
    if ep_size is not None and product is not None and ep_size != product:
        raise UsageError(
            f"--ep-size {ep_size} is not -tp {tensor or 1} x -dp {data or 1} = {product}",
            rule="EP ranks are tensor-parallel x data-parallel ranks",
        )
    ranks = ep_size if ep_size is not None else product
    assert ranks is not None  # noqa: S101 - one of the two is given, as checked above
    return ranks


def _request(
    *,
    ranks: int,
    redundant: str | None,
    num_nodes: int,
    num_groups: int | None,
    strategy: str,
    effort: str,
    previous: Path | None,
    model: str | None,
    max_extra_gib: float | None,
    seed: int,
    folds: int,
) -> PlanRequest:
    from eplb_cli.errors import UsageError
    from eplb_cli.placement import Placement
    from eplb_cli.planner import EFFORTS, STRATEGIES, PlanRequest

    for name, value, known in (("--strategy", strategy, STRATEGIES), ("--effort", effort, EFFORTS)):
        if value not in known:
            raise UsageError(f"{name} {value!r} is not known", rule=f"use {', '.join(known[:-1])} or {known[-1]}")
    count: int | None = None
    if redundant is not None:
        try:
            count = int(redundant)
        except ValueError:
            raise UsageError(f"--num-redundant-experts {redundant!r}", rule="it must be an integer") from None
    shape, expert_bytes, model_groups = (None, None, None) if model is None else _read_model(model)
    return PlanRequest(
        ep_size=ranks,
        num_redundant_experts=count,
        num_nodes=num_nodes,
        # As in vLLM, a model's groups count only where they split over the nodes; groups asked for must.
        num_groups=num_groups or (model_groups if model_groups and model_groups % max(num_nodes, 1) == 0 else None),
        strategy=strategy,  # type: ignore[arg-type]  # checked against STRATEGIES above
        effort=effort,  # type: ignore[arg-type]
        seed=seed,
        folds=folds,
        previous=None if previous is None else Placement.load(previous),
        expert_bytes=expert_bytes,
        max_extra_gib=max_extra_gib,
        model=shape,
    )


def _read_loads(names: list[str]) -> tuple[ExpertLoads, str]:
    """The loads joined along windows, and the digest to record: the file's, or that of all files' digests."""
    import hashlib

    from eplb_cli.files import sha256_of_file
    from eplb_cli.loads import ExpertLoads, concatenate

    paths = [Path(name) for name in names]
    joined = concatenate([ExpertLoads.load(path) for path in paths])
    digests = [sha256_of_file(path) for path in paths]
    return joined, digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _check(path: Path, console: Console) -> None:
    from eplb_cli.placement import Placement

    placement = Placement.load(path)
    twins = placement.twins()
    for layer, rank, expert in twins[:3]:
        console.warn(f"layer {layer}, rank {rank}: expert {expert} is there more than once")
    data = {
        "ok": True,
        "layers": placement.num_layers,
        "num_experts": placement.num_experts,
        "num_redundant_experts": placement.num_redundant_experts,
        "ep_size": placement.ep_size,
        "num_nodes": placement.num_nodes,
        "slots_per_rank": placement.slots_per_rank,
        "stock_form": placement.is_stock_form(),
        "twins": len(twins),
        "strategy": placement.provenance.strategy,
    }
    console.result(
        data,
        f"{path} is a valid plan: {placement.num_layers} layers, {placement.num_experts} experts + "
        f"{placement.num_redundant_experts} redundant on {placement.ep_size} ranks "
        f"({placement.slots_per_rank} slots each), "
        + ("of the stock form." if placement.is_stock_form() else "not of the stock form."),
    )


def _read_model(model: str) -> tuple[ModelShape, dict[int, int], int | None]:
    """Sizes, bytes of an expert in each layer, and the router's expert groups (None when it has none)."""
    from eplb_cli.checkpoint import read_expert_bytes
    from eplb_cli.checkpoint.config import ModelConfig
    from eplb_cli.checkpoint.hub import locate_config

    config = ModelConfig.load(locate_config(model))
    return config.shape, read_expert_bytes(model), config.num_expert_groups if config.num_expert_groups > 1 else None


def _advise(
    loads: ExpertLoads,
    result: PlanResult,
    request: PlanRequest,
    model: str | None,
    tensor_parallel_size: int,
    files: list[str],
) -> Advice:
    import time
    from dataclasses import replace

    from eplb_cli.advice import advise, describe_situation
    from eplb_cli.checkpoint.config import ModelConfig
    from eplb_cli.checkpoint.hub import locate_config

    figures = result.balancedness
    situation = describe_situation(
        loads,
        result.placement,
        before=figures.before,
        after=figures.after,
        held_out=figures.held_out,
        bound=figures.bound,
        expert_bytes=request.expert_bytes,
        config=None if model is None else ModelConfig.load(locate_config(model)).document,
        tensor_parallel_size=tensor_parallel_size,
    )
    newest = max(Path(file).stat().st_mtime for file in files)
    return advise(replace(situation, profile_age_days=(time.time() - newest) / 86_400))


def _table(loads: ExpertLoads, result: PlanResult, advice: Advice, folds: int) -> list[RenderableType]:
    """What a person reads in ten seconds, at 80 columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    placement, figures, worst = result.placement, result.balancedness, result.worst_layer
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("balancedness", justify="right")
    table.add_column("max/mean", justify="right")

    def row(name: str, value: float | None, absent: str = "") -> None:
        table.add_row(name, absent if value is None else f"{value:.4f}", "" if value is None else f"{1 / value:.3f}")

    row("vLLM's initial layout, same R", figures.before)
    row("this plan", figures.after)
    row(f"this plan, held out ({min(folds, loads.num_windows)} folds)", figures.held_out, "not known")
    row("upper bound, proven", figures.bound)
    row(f"worst layer {worst.layer_id}, before", worst.before)
    row(f"worst layer {worst.layer_id}, after", worst.after)
    head = (
        f"{result.strategy} ({result.reason}): {placement.num_layers} layers, {placement.num_experts} experts + "
        f"{placement.num_redundant_experts} redundant on {placement.ep_size} ranks, "
        f"{placement.slots_per_rank} slots each; {loads.num_windows} windows."
    )
    lines = []
    if result.moves is not None:
        slots = placement.num_slots * placement.num_layers
        lines.append(
            f"{result.moves} of {slots} slots ({result.moves / slots:.1%}) change rank against the previous plan."
        )
    # The bounds stand in the table; what they cost and what speaks against them does not.
    lines.extend(point.text for point in advice.points if point.kind != "bound")
    page: list[RenderableType] = [Text(head), table, Text(f"{DEFINITION}\n", style="dim")]
    page.extend(Text(line) for line in lines)
    page.append(Text(advice.verdict, style="bold"))
    if advice.worth_it is not False:
        layout = "stock" if result.strategy == "stock" else "physical"
        page.append(Text(f"Next: eplb convert MODEL PLAN --layout {layout} -o OUT"))
    return page
