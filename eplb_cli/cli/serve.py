"""`eplb serve`: start vLLM from a plan."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eplb_cli.cli.options import FormatOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eplb_cli.console import Console
    from eplb_cli.serve import Launch
    from eplb_cli.serve.requests import Answer

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "serve"]

EXAMPLES = (
    "eplb serve ./model-balanced --dry-run",
    "eplb serve Qwen/Qwen3-30B-A3B --plan plan.json --static -tp 4",
    "eplb serve ./model --plan plan.json -tp 2 -dp 4 -- --max-model-len 32768",
    "eplb serve ./model --plan plan.json -tp 8 --smoke prompts.txt",
    "eplb serve ./model --plan plan.json -tp 8 --dispatch balanced --copy-cost-tokens 90",
    "eplb serve ./model --record traces -tp 4 --enable-expert-parallel",
)

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}

SMOKE_TOKENS = 32
"""Tokens per prompt of the smoke comparison."""


class Dispatch(StrEnum):
    """Which copy of an expert serves a token."""

    hash = "hash"
    balanced = "balanced"


class RuntimePolicy(StrEnum):
    """Who rearranges experts at run time."""

    vllm = "vllm"
    eplb = "eplb"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, or a folder that `eplb convert` wrote.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The plan. Default: the one inside a converted folder.")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Never rebalance at run time.")] = False,
    runtime_policy: Annotated[
        RuntimePolicy | None,
        typer.Option(
            "--runtime-policy",
            help="vllm: vLLM's own policy, which does not keep the plan; eplb: the planner, from the live placement, "
            "in bounded steps.",
        ),
    ] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(
            "--max-moves", help="Slots that the eplb policy changes per rebalance. Default: a twentieth.", min=1
        ),
    ] = None,
    min_gain: Annotated[
        float, typer.Option("--min-gain", help="Gain in balancedness under which the eplb policy changes nothing.")
    ] = 0.02,
    dispatch: Annotated[
        Dispatch,
        typer.Option(
            metavar="hash|balanced",
            help="Which copy of an expert serves a token. hash: vLLM's own choice; balanced: by the step's load.",
        ),
    ] = Dispatch.hash,
    copy_cost_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens that take as long as reading one more expert's weights; balanced weighs it. Default: 0.",
            metavar="X",
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write expert loads per window to this folder.", metavar="DIR")
    ] = None,
    record_steps: Annotated[int, typer.Option("--record-steps", help="Engine steps per recorded window.", min=1)] = 100,
    smoke: Annotated[
        Path | None,
        typer.Option(
            "--smoke", help="First compare greedy answers to these prompts with and without EPLB.", metavar="PROMPTS"
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", help="The unconverted model for --smoke. Default: MODEL.", metavar="MODEL"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the exact command, start nothing.")
    ] = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Start `vllm serve` balanced from the first token; flags that eplb does not know go to vLLM unchanged."""
    from eplb_cli.console import Console
    from eplb_cli.errors import UsageError
    from eplb_cli.serve import prepare
    from eplb_cli.serve.requests import read_prompts

    console = Console(output_format)
    if model.startswith("-"):
        raise UsageError(f"{model} stands where the model should", rule="the model comes first: eplb serve MODEL ...")
    if static and runtime_policy is not None:
        raise UsageError("--static and --runtime-policy", rule="a static plan is never rebalanced")
    if runtime_policy is not RuntimePolicy.eplb and max_moves is not None:
        raise UsageError("--max-moves", rule="it bounds --runtime-policy eplb")
    if dispatch is Dispatch.hash and copy_cost_tokens is not None:
        raise UsageError("--copy-cost-tokens", rule="it is a price that --dispatch balanced weighs")
    if reference is not None and smoke is None:
        raise UsageError("--reference without --smoke")
    # A missing or empty file stops here, before anything takes time.
    prompts = None if smoke is None else read_prompts(smoke)
    launch = prepare(
        model,
        plan,
        context.args,
        policy="static" if static else None if runtime_policy is None else runtime_policy.value,
        record=record,
        record_steps=record_steps,
        max_moves=max_moves,
        min_gain=min_gain,
        dispatch=dispatch.value,
        copy_cost_tokens=copy_cost_tokens or 0,
        dry_run=dry_run,
    )
    for warning in launch.warnings:
        console.warn(warning)
    for note in launch.notes:
        console.note(note)
    if dry_run:
        console.result(launch.report(), launch.shell())
        return
    expected = None if prompts is None else _reference_answers(console, launch, model, reference, prompts)
    console.note(launch.shell())
    raise typer.Exit(_run(console, launch, smoke, prompts, expected))


def _reference_answers(
    console: Console, launch: Launch, model: str, reference: str | None, prompts: Sequence[dict[str, Any]]
) -> list[Answer]:
    """What the model answers without EPLB; its server has ended when this returns."""
    from eplb_cli.errors import ServeError, UsageError
    from eplb_cli.serve import Server, without_plan
    from eplb_cli.serve.requests import answer_all

    if launch.layout != "source" and reference is None:
        raise UsageError("--smoke with a converted model", rule="name the unconverted one with --reference MODEL")
    plain = without_plan(launch, reference or model)
    console.note(f"smoke: first without EPLB: {plain.shell()}")
    with Server(plain, output="inherit" if console.is_human else "stderr") as server:
        if not server.wait_until_healthy():
            raise ServeError(f"vLLM ended with exit code {server.wait()} before the comparison")
        return answer_all(server, prompts, max_tokens=SMOKE_TOKENS)


def _run(
    console: Console,
    launch: Launch,
    smoke: Path | None,
    prompts: Sequence[dict[str, Any]] | None,
    expected: Sequence[Answer] | None,
) -> int:
    """Run vLLM to its end; returns its exit code."""
    from eplb_cli.errors import ServeError
    from eplb_cli.serve import Server
    from eplb_cli.serve.requests import answer_all, compare

    with Server(launch, output="inherit" if console.is_human else "stderr") as server:
        proof = server.wait_for_proof() if launch.proven_by_plugin else None
        if proof is not None:
            slots = f"{proof.slots}/{proof.slots} slots verified"
            console.note(f"plan in force on {proof.ranks} ranks, {slots} (sha256 {launch.plan_sha256})")
        if not server.wait_until_healthy():
            console.warn("vLLM ended before it was ready")
            return server.wait()
        if prompts is not None and expected is not None:
            found = compare(expected, answer_all(server, prompts, max_tokens=SMOKE_TOKENS))
            if found.differing:
                raise ServeError(
                    f"smoke: {len(found.differing)} of {len(expected)} prompts are answered differently under EPLB",
                    file=smoke,
                    row=found.differing[0] + 1,
                    hint="vLLM was stopped. Compare with --dtype float32 to rule rounding out, and report it.",
                )
            ties = f", {found.near_ties} part at a near tie" if found.near_ties else ""
            console.note(f"smoke: {found.identical}/{len(expected)} prompts give the same tokens without EPLB{ties}")
        return server.wait()
