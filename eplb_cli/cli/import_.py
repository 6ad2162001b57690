"""`eplb import`: another engine's placement file to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eplb_cli.cli.export import EngineName, read_shape
from eplb_cli.cli.options import ForceOption, FormatOption, OutputOption
from eplb_cli.console import OutputFormat

__all__ = ["EXAMPLES", "import_"]

EXAMPLES = (
    "eplb import expert_map.json --from vllm-ascend --layer-ids 3-60 -o plan.json",
    "eplb import location.json --from sglang --ep-size 16 --model Qwen/Qwen3-30B-A3B -o plan.json",
    "eplb import moe_load_balancer.yaml --from tensorrt-llm --ep-size 36 -o plan.json",
)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An engine's placement file.")],
    source: Annotated[EngineName, typer.Option("--from", help="The engine whose format it is.")],
    output: OutputOption,
    model: Annotated[str | None, typer.Option(help="Tells experts and which decoder layers are MoE.")] = None,
    ep_size: Annotated[
        int | None, typer.Option("--ep-size", min=1, help="EP ranks, where the format does not say.")
    ] = None,
    num_experts: Annotated[int | None, typer.Option("--num-experts", min=1, help="Logical experts.")] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option("--layer-ids", metavar="IDS", help="Decoder layers of the rows, such as 3-60 or 1,3,5."),
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num-nodes", min=1, help="Nodes that the ranks are spread over.")
    ] = None,
    force: ForceOption = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Read another engine's placement file into a plan."""
    from eplb_cli.console import Console
    from eplb_cli.exports import ENGINES, Facts, import_file
    from eplb_cli.files import refuse_existing

    console = Console(output_format)
    refuse_existing(output, force=force)
    facts = Facts(read_shape(model), _layers(layer_ids), num_experts, ep_size, num_nodes)
    imported = import_file(file, ENGINES[source.value], facts)
    placement = imported.placement
    placement.save(output, replace=force)
    for warning in imported.warnings:
        console.warn(warning)
    data = {
        "engine": source.value,
        "layers": placement.num_layers,
        "layer_ids": placement.layer_ids.tolist(),
        "num_experts": placement.num_experts,
        "num_redundant_experts": placement.num_redundant_experts,
        "ep_size": placement.ep_size,
        "num_nodes": placement.num_nodes,
        "map_sha256": placement.map_sha256,
        "warnings": list(imported.warnings),
    }
    console.result(
        data,
        f"{output}: {placement.num_layers} layers x {placement.num_slots} slots, {placement.num_experts} experts on "
        f"{placement.ep_size} ranks.",
    )


def _layers(text: str | None) -> tuple[int, ...] | None:
    """`3-5,9` as (3, 4, 5, 9)."""
    import re

    from eplb_cli.errors import UsageError

    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if found is None:
            raise UsageError(f"--layer-ids {text}", rule="numbers and ranges are expected, such as 3-60 or 1,3,5")
        layers += range(int(found[1]), int(found[2] or found[1]) + 1)
    if not layers or sorted(set(layers)) != layers:
        raise UsageError(f"--layer-ids {text}", rule="each layer appears once, in ascending order")
    return tuple(layers)
