"""`eplb export`: a plan to another engine's placement file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import ForceOption, FormatOption, OutputOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from eplb_cli.loads import ModelShape
    from eplb_cli.planner.scoring import Reach

__all__ = ["EXAMPLES", "EngineName", "export", "read_shape"]

EXAMPLES = (
    "eplb export plan.json --to sglang --model Qwen/Qwen3-30B-A3B -o location.json",
    "eplb export plan.json --to tensorrt-llm -o moe_load_balancer.yaml",
    "eplb export plan.json --to vllm-ascend --loads loads.safetensors -o expert_map.json",
)


class EngineName(StrEnum):
    """Engines whose placement files are known."""

    sglang = "sglang"
    tensorrt_llm = "tensorrt-llm"
    vllm_ascend = "vllm-ascend"
    mindie = "mindie"
    vllm_jsonl = "vllm-jsonl"
    vllm_list = "vllm-list"
    omni_infer = "omni-infer"
    rtp_llm = "rtp-llm"
    deepseek = "deepseek"


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, or a converted folder that holds one.")],
    to: Annotated[EngineName, typer.Option("--to", help="The engine that is to read the file.")],
    output: OutputOption,
    model: Annotated[
        str | None, typer.Option(help="Needed where the engine wants all hidden layers; checks the plan's layers.")
    ] = None,
    loads: Annotated[
        list[Path] | None,
        typer.Option(
            "--loads", help="Profiles, to say what the engine's own choice of copies reaches.", metavar="LOADS"
        ),
    ] = None,
    force: ForceOption = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Write a plan as another engine's placement file, and a sidecar FILE.eplb.json with the plan."""
    import shlex

    from eplb_cli.console import Console
    from eplb_cli.errors import UsageError
    from eplb_cli.exports import ENGINES, export_placement, sidecar_of, sidecar_path
    from eplb_cli.files import atomic_write, refuse_existing
    from eplb_cli.loads import ExpertLoads, concatenate
    from eplb_cli.placement import Placement
    from eplb_cli.planner.scoring import reach

    console = Console(output_format)
    engine = ENGINES[to.value]
    if engine.suffix is not None and output.suffix != engine.suffix:
        raise UsageError(
            f"--output {output}",
            rule=f"{engine.name} tells the format by the suffix {engine.suffix}",
            hint=shlex.join(["-o", str(output.with_suffix(engine.suffix))]),
        )
    sidecar = sidecar_path(output)
    for path in (output, sidecar):
        refuse_existing(path, force=force)
    placement = Placement.load(plan)
    recorded = concatenate([ExpertLoads.load(path) for path in loads]) if loads else None
    reached = None if engine.dispatch is None else reach(placement, engine.dispatch, recorded)
    exported = export_placement(placement, engine, read_shape(model))
    beside = sidecar_of(exported.content, engine.name, placement, exported.layer_ids)
    for path, content in ((sidecar, beside), (output, exported.content)):
        with atomic_write(path, replace=force) as stream:
            stream.write(content)
    launch = engine.launch(placement, str(output))
    served, warnings = _served(engine.name, placement.num_nodes, reached), list(exported.warnings)
    if reached is not None and reached.falls_short:
        warnings.append(
            f"{engine.name} chooses among an expert's copies in its own way, and reaches a balancedness of "
            f"{reached.balancedness:.3f} with this plan, not {reached.promised:.3f}: plan with --dispatch "
            f"{reached.dispatch} --num-nodes {placement.num_nodes}"
        )
    for warning in warnings:
        console.warn(warning)
    data = {
        "engine": engine.name,
        "file": str(output),
        "sidecar": str(sidecar),
        "rows": exported.rows,
        "layers": placement.num_layers,
        "num_experts": placement.num_experts,
        "num_redundant_experts": placement.num_redundant_experts,
        "ep_size": placement.ep_size,
        "bytes": len(exported.content),
        "launch": launch,
        "reach": None if reached is None else reached.as_dict(),
        "warnings": warnings,
    }
    console.result(
        data,
        f"{output}: {exported.rows} layers ({engine.numbering} numbering) x {placement.num_slots} slots, read back "
        "and compared.",
        served,
        f"Use it with: {launch}",
    )


def _served(engine: str, nodes: int, reached: Reach | None) -> str:
    """A sentence on the balance that the engine reaches."""
    if reached is None:
        return f"How {engine} chooses among an expert's copies is not known, so neither is the balance that it reaches."
    where = f" on {nodes} nodes" if nodes > 1 else ""
    if reached.balancedness is None:
        return f"What {engine} reaches by its own choice of copies{where} is not known: pass --loads to see it."
    return (
        f"Balancedness under {engine}'s own choice of copies{where} ({reached.dispatch}): {reached.balancedness:.4f}."
    )


def read_shape(model: str | None) -> ModelShape | None:
    """What is known of MODEL; None when it was not given."""
    if model is None:
        return None
    from eplb_cli.checkpoint import Model

    return Model.open(model).shape
