"""`eplb plan`: loads to a placement."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eplb_cli.cli.options import ForceOption, FormatOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from eplb_cli.advice import Advice
    from eplb_cli.checkpoint import KvCache, Model
    from eplb_cli.console import Console
    from eplb_cli.loads import ExpertLoads
    from eplb_cli.placement import Placement
    from eplb_cli.planner import PlanRequest, PlanResult

__all__ = ["EXAMPLES", "plan"]

EXAMPLES = (
    "eplb plan loads.safetensors -tp 8 -o plan.json",
    "eplb plan loads.safetensors --ep-size 32 --num-redundant-experts 32 -o plan.json",
    "eplb plan loads.safetensors -tp 8 --strategy stock -o plan.json",
    "eplb plan loads.safetensors -tp 8 --num-redundant-experts auto --model Qwen/Qwen3-235B-A22B -o plan.json",
    "eplb plan today.safetensors -tp 8 --previous plan.json --max-moves 15% -o plan2.json",
    "eplb plan 'chat.safetensors*0.7' 'code.safetensors*0.3' --ep-size 16 -o plan.json",
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
        list[str] | None,
        typer.Argument(
            help="Profiles; several join along their windows, or mix by weight: chat.safetensors*0.7.",
            metavar="LOADS...",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the plan.")] = None,
    ep_size: Annotated[int | None, typer.Option("--ep-size", help="EP ranks.")] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option("-tp", "--tensor-parallel-size", min=1, help="With -dp, gives the EP ranks as their product."),
    ] = None,
    data_parallel_size: Annotated[
        int | None,
        typer.Option("-dp", "--data-parallel-size", min=1, help="With -tp, gives the EP ranks as their product."),
    ] = None,
    num_redundant_experts: Annotated[
        str | None,
        typer.Option(
            "--num-redundant-experts",
            help="R, or auto to sweep R and take the knee. Default: the smallest valid.",
            metavar="R|auto",
        ),
    ] = None,
    num_nodes: Annotated[int, typer.Option("--num-nodes", help="Nodes that the ranks are spread over.")] = 1,
    num_groups: Annotated[
        int | None, typer.Option("--num-groups", help="Expert groups of the router (n_group in config.json).")
    ] = None,
    node_policy: Annotated[
        str,
        typer.Option(
            "--node-policy",
            help="With groups on several nodes. flat: ignore nodes; strict: whole groups stay on nodes; relaxed: a "
            "slot off its home node has a price.",
        ),
    ] = "flat",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            help="auto; windows: fewest waiting tokens over windows; mean: balance of the summed load; deepseek: the "
            "reference's result; stock: the best relabelling that an unmodified vLLM starts from.",
        ),
    ] = "auto",
    dispatch: Annotated[
        str,
        typer.Option(
            "--dispatch",
            help="The rule that will choose among an expert's copies. even: equal parts, as in vLLM; "
            "balanced: by the step's loads (eplb serve --dispatch balanced); sglang, vllm-ascend, tensorrt-llm: as "
            "those engines do.",
        ),
    ] = "even",
    effort: Annotated[str, typer.Option("--effort", help="fast, normal or thorough search.")] = "normal",
    previous: Annotated[
        Path | None,
        typer.Option("--previous", help="The plan in force; moves are counted and kept few.", metavar="PLAN"),
    ] = None,
    max_moves: Annotated[
        str | None,
        typer.Option(
            "--max-moves", help="Most slots whose expert may change rank: a number, or a share as 15%.", metavar="N|N%"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model: expert sizes, and which layers are MoE.")
    ] = None,
    max_extra_gib: Annotated[
        float | None, typer.Option("--max-extra-gib", help="Most GiB per rank that redundant experts may take.")
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option("--step-tokens", help="Tokens of an engine step over all ranks; tells what chance leaves.", min=1),
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

    from eplb_cli.checkpoint import Model
    from eplb_cli.cli.explain import explain_layer
    from eplb_cli.console import Console
    from eplb_cli.errors import UsageError
    from eplb_cli.files import refuse_existing
    from eplb_cli.planner import make_plan

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
    known = None if model is None else Model.open(model)
    request = _request(
        ranks=_ranks(ep_size, tensor_parallel_size, data_parallel_size),
        redundant=num_redundant_experts,
        num_nodes=num_nodes,
        num_groups=num_groups,
        node_policy=node_policy,
        strategy=strategy,
        dispatch=dispatch,
        effort=effort,
        previous=previous,
        max_moves=max_moves,
        step_tokens=step_tokens,
        model=known,
        max_extra_gib=max_extra_gib,
        seed=seed,
        folds=folds,
    )
    joined, digest = _read_loads(loads)
    started = time.perf_counter()
    result = make_plan(joined, request, digest)
    seconds = round(time.perf_counter() - started, 3)
    cache = None if known is None else known.kv_cache(tensor_parallel_size or 1)
    advice = _advise(joined, result, request, cache, loads)
    explained = [] if explain is None else explain_layer(joined, result.placement, explain)
    if output is not None and not dry_run:
        result.placement.save(output, replace=force)
    for warning in result.warnings:
        console.warn(warning)
    for note in result.notes:
        console.note(note)
    if known is not None and known.expert_bytes.note is not None:
        console.note(known.expert_bytes.note)
    data = result.as_dict()
    data["seconds"] = seconds
    data["advice"] = advice.as_dict()
    if explain is not None:
        data["explanation"] = explained
    console.result(data, *_table(joined, result, advice, folds, output), *explained)
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
    node_policy: str,
    strategy: str,
    dispatch: str,
    effort: str,
    previous: Path | None,
    max_moves: str | None,
    step_tokens: int | None,
    model: Model | None,
    max_extra_gib: float | None,
    seed: int,
    folds: int,
) -> PlanRequest:
    from eplb_cli.errors import UsageError
    from eplb_cli.placement import Placement
    from eplb_cli.planner import PlanRequest

    count: int | Literal["auto"] | None = None
    if redundant == "auto":
        count = "auto"
    elif redundant is not None:
        try:
            count = int(redundant)
        except ValueError:
            raise UsageError(f"--num-redundant-experts {redundant!r}", rule="it must be an integer or auto") from None
    in_force = None if previous is None else Placement.load(previous)
    model_groups = 1 if model is None else model.num_expert_groups
    return PlanRequest(
        ep_size=ranks,
        num_redundant_experts=count,
        num_nodes=num_nodes,
        # As in vLLM, a model's groups count only where they split over the nodes; groups asked for must.
        num_groups=num_groups or (model_groups if model_groups > 1 and model_groups % max(num_nodes, 1) == 0 else None),
        strategy=strategy,  # type: ignore[arg-type]  # the planner refuses what it does not know
        dispatch=dispatch,  # type: ignore[arg-type]
        effort=effort,  # type: ignore[arg-type]
        node_policy=node_policy,  # type: ignore[arg-type]
        seed=seed,
        folds=folds,
        previous=in_force,
        max_moves=None if max_moves is None else _most_moves(max_moves, in_force),
        step_tokens=step_tokens,
        expert_bytes=None if model is None else model.expert_bytes.by_layer,
        max_extra_gib=max_extra_gib,
        model=None if model is None else model.shape,
    )


def _most_moves(text: str, previous: Placement | None) -> int:
    from eplb_cli.errors import UsageError

    share = text.removesuffix("%")
    try:
        most = float(share) / 100 if share != text else int(text)
    except ValueError:
        most = -1
    if not 0 <= most < 2**31:
        raise UsageError(f"--max-moves {text!r}", rule="it must be a number of slots, or a share of them such as 15%")
    slots = 0 if previous is None else previous.num_slots * previous.num_layers
    return int(most * slots) if isinstance(most, float) else most


def _split_weight(name: str) -> tuple[Path, float | None]:
    """The file and weight of `chat.safetensors*0.7`; a file that is there by that very name has no weight."""
    import os

    from eplb_cli.errors import UsageError

    file, star, weight = name.rpartition("*")
    if not star or os.path.exists(name):  # noqa: PTH110 - Path.exists raises where a name is too long
        return Path(name), None
    try:
        return Path(file), float(weight)
    except ValueError:
        raise UsageError(f"{name}: the weight {weight!r} is not a number", hint="chat.safetensors*0.7") from None


def _read_loads(names: list[str]) -> tuple[ExpertLoads, str]:
    """The loads joined along windows, and the digest to record: the file's, or one of all digests and weights."""
    import hashlib

    from eplb_cli.errors import UsageError
    from eplb_cli.files import sha256_of_file
    from eplb_cli.loads import ExpertLoads, concatenate, mix

    named = [_split_weight(name) for name in names]
    weights = [weight for _, weight in named if weight is not None]
    if weights and len(weights) != len(named):
        raise UsageError("some loads have a weight and others none", rule="weigh all of them, or none")
    parts = [ExpertLoads.load(path) for path, _ in named]
    joined = mix(parts, weights) if weights else concatenate(parts)
    digests = [sha256_of_file(path) for path, _ in named]
    if len(digests) == 1:
        return joined, digests[0]
    recipe = [
        f"{digest} {'' if weight is None else weight}" for digest, (_, weight) in zip(digests, named, strict=True)
    ]
    return joined, hashlib.sha256("\n".join(recipe).encode()).hexdigest()


def _check(path: Path, console: Console) -> None:
    from eplb_cli.placement import Placement

    placement = Placement.load(path)
    placement.require_distinct_copies(path)
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


def _advise(
    loads: ExpertLoads,
    result: PlanResult,
    request: PlanRequest,
    kv_cache: KvCache | None,
    files: list[str],
) -> Advice:
    import time
    from dataclasses import replace

    from eplb_cli.advice import advise, describe_situation

    figures = result.balancedness
    situation = describe_situation(
        loads,
        result.placement,
        before=figures.before,
        after=figures.after,
        held_out=figures.held_out,
        bound=figures.bound,
        expert_bytes=request.expert_bytes,
        kv_cache=kv_cache,
    )
    newest = max(_split_weight(file)[0].stat().st_mtime for file in files)
    return advise(
        replace(
            situation,
            interval=result.confidence.interval,
            step_tokens=request.step_tokens,
            profile_age_days=(time.time() - newest) / 86_400,
        )
    )


def _table(
    loads: ExpertLoads, result: PlanResult, advice: Advice, folds: int, plan: Path | None
) -> list[RenderableType]:
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
    if figures.even is not None:
        row("this plan, copies used evenly", figures.even)
    row(f"worst layer {worst.layer_id}, before", worst.before)
    row(f"worst layer {worst.layer_id}, after", worst.after)
    head = (
        f"{result.strategy} ({result.reason}): {placement.num_layers} layers, {placement.num_experts} experts + "
        f"{placement.num_redundant_experts} redundant on {placement.ep_size} ranks, "
        f"{placement.slots_per_rank} slots each; {loads.num_windows} windows."
    )
    if placement.provenance.dispatch is not None:
        head += f" Figures are for copies chosen by the rule {placement.provenance.dispatch}."
    lines = []
    if result.confidence.interval is not None:
        low, high = result.confidence.interval
        lines.append(f"held out, 90 % interval (blocks of windows resampled): {low:.4f} to {high:.4f}.")
    if result.moves is not None:
        slots = placement.num_slots * placement.num_layers
        lines.append(
            f"{result.moves} of {slots} slots ({result.moves / slots:.1%}) change rank against the previous plan."
        )
    # The bounds stand in the table; what they cost and what speaks against them does not.
    lines.extend(point.text for point in advice.points if point.kind != "bound")
    page: list[RenderableType] = [Text(head), table, Text(f"{DEFINITION}\n", style="dim")]
    page.extend(_further_tables(result))
    page.extend(Text(line) for line in lines)
    page.append(Text(advice.verdict, style="bold"))
    if advice.worth_it is not False:
        page.append(f"Next: {shlex.join(_next_step(placement, 'PLAN' if plan is None else str(plan)))}")
    return page


def _next_step(placement: Placement, plan: str) -> list[str]:
    """The command that brings the plan to an engine whose rule it is made for."""
    rule = placement.provenance.dispatch
    if rule in (None, "even", "hash"):
        layout = "stock" if placement.is_stock_form() else "physical"
        return ["eplb", "convert", "MODEL", plan, "--layout", layout, "-o", "OUT"]
    if rule == "balanced":
        return ["eplb", "serve", "MODEL", "--plan", plan, "--dispatch", rule]
    return ["eplb", "export", plan, "--to", rule, "-o", "OUT"]


def _further_tables(result: PlanResult) -> list[RenderableType]:
    """The R that were tried, the ways to treat nodes, the price of moves: whichever the request asked for."""
    slots = result.placement.num_slots * result.placement.num_layers

    def figure(value: float | None, form: str = ".4f") -> str:
        return "" if value is None else format(value, form)

    tables: list[RenderableType] = []
    if result.sweep:
        table = _small_table("R", "this plan", "held out", "GiB per rank")
        for point in result.sweep:
            table.add_row(
                f"{point.num_redundant_experts}",
                figure(point.after),
                figure(point.held_out),
                figure(point.extra_gib_per_rank, ".2f"),
            )
        tables.append(table)
    if result.nodes:
        table = _small_table("expert groups on nodes", "balancedness", "bound", "off-home load")
        for option in result.nodes:
            table.add_row(
                option.policy, figure(option.balancedness), figure(option.bound), figure(option.off_home_share, ".1%")
            )
        tables.append(table)
    if result.curve is not None:
        table = _small_table("moved slots", "share", "balancedness")
        moves, values = result.curve.moves, result.curve.balancedness
        every = max(1, -(-(len(moves) - 1) // 8))
        for index in sorted({*range(0, len(moves), every), len(moves) - 1}):
            table.add_row(f"{moves[index]}", f"{moves[index] / slots:.1%}", figure(values[index]))
        tables.append(table)
    return tables


def _small_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table
