"""Small valid inputs of every kind, built in code: files by name."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from eplb_cli.checkpoint.convert import Layout, prepare
from eplb_cli.exports import ENGINES, export_placement, sidecar_of, sidecar_path
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.placement import Placement
from tests import checkpoints
from tests.test_traces_recorders import (
    TestDs4Hits,
    TestEplbRecording,
    TestImatrix,
    TestMindie,
    TestOmniInfer,
    TestSglangCsv,
    TestSglangPasses,
    TestSglangResponses,
    TestTensorrtLlm,
    TestVllmLoadStats,
    TestVllmRoutes,
    poisson,
)
from tests.test_traces_sglang import dump
from tests.test_traces_token_ids import random_ids
from tests.test_traces_vllm_responses import response

__all__ = ["MODEL", "PLAN", "Seed", "seeds"]

Seed = Mapping[str, bytes]
MODEL = ModelShape("DeepseekV3ForCausalLM", 8, 2, 4, (1, 2, 3))
PLAN = Placement(
    np.array([[1, 0, 2, 3, 4, 5, 6, 7, 3, 0], [7, 2, 0, 4, 3, 6, 1, 5, 7, 2]], np.int32),
    np.array([1, 3], np.int32),
    8,
    2,
)
LAYERS = np.array([1, 2, 3], np.int32)


def seeds(target: str) -> list[Seed]:
    """The valid inputs of a target."""
    return _BY_TARGET[target]()


def _written(write: Callable[[Path], object]) -> Seed:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _npz(**arrays: object) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _pt(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _pickle(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def _loads() -> ExpertLoads:
    return ExpertLoads(
        poisson(3, 3, 8), np.array([4, 5, 6]), LAYERS, np.array([7, 3, 9]), np.array([1, 0, 2], np.uint8), "M", 2
    )


def _traces() -> list[Seed]:
    ids, counts = random_ids(60, 3, 2, 8), poisson(2, 3, 8)
    routes, stats, bare = TestVllmRoutes(), TestVllmLoadStats(), TestSglangResponses()
    layers = {str(layer): {"cnt": row, "gate": []} for layer, row in zip((1, 2, 3), counts[0].tolist(), strict=True)}
    plumb = [
        {"layer_id": layer, "experts": [{"expert_id": e, "token_count": 200 + e} for e in range(8)]}
        for layer in (1, 2, 3)
    ]
    heat = {str(layer): {str(e): 20 + e for e in (0, 2, 3, 5, 6)} for layer in (1, 2, 3)}
    responses = [response(np.pad(ids[:20], ((0, 0), (1, 0), (0, 0))), prompt=15, completion=6)] * 2
    log = "hello\n" + "".join(
        f"[dump activation] decode step 7 in rank {rank} for layer {layer} get 4 experts data: 5 6 7 {rank}\n"
        for rank in range(2)
        for layer in range(3)
    )
    return [
        {"ids.npy": _npy(ids)},
        {"ids.npy": _npy(np.asfortranarray(ids.astype(np.uint8)))},
        {"ids.npy": _npy(ids.astype(">i4"))},
        {
            "ids.npz": _npz(
                topk_ids=ids, layer_ids=[1, 2, 3], seq_lens=[40, 20], prompt_lens=[30, 25], session_ids=[4, 4]
            )
        },
        {"counts.npy": _npy(counts)},
        {"counts.npy": _npy(counts[1].astype(np.float32))},
        {"counts.npz": _npz(counts=counts, layer_ids=[1, 2, 3], tokens=[7, 8], window_ids=[5, 3])},
        {"counts.pt": _pt({"counts": torch.from_numpy(counts), "tokens": torch.tensor([3, 4])})},
        {"view.pt": _pt(torch.from_numpy(counts[0]))},
        {"view.pt": _pickle(torch.from_numpy(counts[0]))},
        _written(lambda f: save_file({"counts": counts, "layer_ids": LAYERS}, f / "counts.safetensors")),
        {"counts.json": _json(counts.tolist())},
        {"counts.json": _json({"counts": counts.tolist(), "layer_ids": [1, 2, 3], "tokens": [3, 4]})},
        _written(lambda f: _loads().save(f / "loads.safetensors")),
        {"vllm.json": _json(responses[0])},
        {"vllm.jsonl": b"\n".join(map(_json, responses)) + b"\n"},
        {"stats.jsonl": "\n".join([stats.META, *(stats.record(s, poisson(3, 10)) for s in (4, 5))]).encode()},
        {"routes.jsonl": "\n".join([routes.META, *routes.lines(ids[:9])]).encode()},
        _written(lambda f: dump(f / "expert_distribution_recorder_1764400000.25.pt")),
        _written(lambda f: TestSglangPasses().write(f)),
        _written(lambda f: TestSglangPasses().write(f, forward_mode=2, positions=torch.arange(7))),
        {"ep.json": _json({"logical_count": np.pad(counts[0], ((1, 0), (0, 0))).tolist()})},
        _written(
            lambda f: [TestSglangCsv().write(f, r, [(1, 2, 3 + r), (1, 5, 1), (2, 0, 5), (3, 7, 4)]) for r in (1, 0)]
        ),
        {"sglang.json": _json(bare.record(bare.ids(14), prompt_tokens=10, completion_tokens=5, cached_tokens=3))},
        {"lmdeploy.jsonl": _json({"meta_info": {"routed_experts": bare.ids(6).tolist()}}) + b"\n{}\n"},
        _written(lambda f: TestTensorrtLlm().write(f)),
        _written(lambda f: TestMindie().write(f)),
        _written(lambda f: TestOmniInfer().write(f)),
        {"server.log": log.encode()},
        {f"rank0_step{s}_experts_counts.json": _json((counts[0] * s).tolist()) for s in (3, 10)},
        {f"expert_load_rank{r}.json": _json({f"layer_{n}": [3 + r] * 8 for n in (1, 2, 3)}) for r in range(2)},
        _written(lambda f: TestImatrix().write(f / "imatrix.gguf", counts[0])),
        _written(lambda f: TestDs4Hits().write(f / "hits.csv", counts[0], 1000)),
        {f"layer_{n}.txt": b"1\t2\t\t0.5\t0.5\n6\t4\t\t0.5\t0.5\n" for n in (1, 2, 3)},
        {f"routing_iter_0_layer_{n}.npz": _npz(data=ids[:9, n - 1].astype(np.int64)) for n in (1, 2, 3)},
        {"saliency.json": _json({"arch": "glm-dsa", "n_expert": 8, "tokens": 1000, "layers": layers})},
        {"plumb.json": _json({"layers": plumb})},
        {"heat.json": _json(heat)},
        _written(_recording),
    ]


def _recording(folder: Path) -> None:
    for rank in (1, 0):
        windows = [(0, "prefill", poisson(3, 8)), (0, "decode", poisson(3, 8, seed=1)), (2, "decode", poisson(3, 8))]
        TestEplbRecording().write(folder, windows, dp_rank=rank, dp_size=2)


def _headers() -> list[Seed]:
    model = checkpoints.qwen3_moe()
    whole = _written(lambda f: model.save(f))["model.safetensors"]
    few = {name: item.tensor for name, item in list(model.items.items())[:3]}
    return [
        {"model.safetensors": whole},
        _written(lambda f: checkpoints.write_safetensors(f / "model.safetensors", few)),
        _written(lambda f: save_file({"b": LAYERS, "a": poisson(2, 2)}, f / "model.safetensors", {"format": "pt"})),
    ]


def _imports() -> list[Seed]:
    found: list[Seed] = []
    for name, engine in ENGINES.items():
        exported = export_placement(PLAN, engine, MODEL)
        path = Path(f"{name}{engine.suffix or '.json'}")
        alone = {path.name: exported.content}
        found += [
            alone,
            alone | {sidecar_path(path).name: sidecar_of(exported.content, name, PLAN, exported.layer_ids)},
        ]
    return found


def _checkpoints() -> list[Seed]:
    return [
        _written(lambda f: checkpoints.qwen3_moe().save(f, shards=2, seed=1)),
        _written(lambda f: checkpoints.qwen3_moe("fp8-block").save(f)),
        _written(lambda f: checkpoints.llama4(multimodal=True).save(f)),
        _written(lambda f: checkpoints.deepseek_v4().save(f)),
        _written(lambda f: checkpoints.gpt_oss().save(f)),
    ]


def _configs() -> list[Seed]:
    models = (checkpoints.qwen3_moe("fp8-block"), checkpoints.qwen3_vl(modelopt=True), checkpoints.llama4())
    models += (checkpoints.deepseek(), checkpoints.deepseek_v4(), checkpoints.gemma4(), checkpoints.minimax_m3())
    return [{"config.json": _json(model.config)} for model in models]


def _converted() -> list[Seed]:
    found = []
    for layout, model in (("stock", checkpoints.qwen3_moe()), ("physical", checkpoints.qwen3_moe("fp8-block"))):

        def write(folder: Path, model: checkpoints.Synthetic = model, layout: str = layout) -> None:
            model.save(folder / "source", shards=2)
            rows = checkpoints.random_rows(model.moe_layers, 4, seed=3)
            plan = checkpoints.save_plan(folder / "plan.json", rows)
            prepare(str(folder / "source"), plan, folder / "out", Layout(layout)).run()

        found.append(_written(write))
    return found


_BY_TARGET: Mapping[str, Callable[[], list[Seed]]] = {
    "traces": _traces,
    "headers": _headers,
    "loads": lambda: [_written(lambda f: _loads().save(f / "loads.safetensors"))],
    "plans": lambda: [_written(lambda f: PLAN.save(f / "plan.json"))],
    "imports": _imports,
    "config": _configs,
    "checkpoint": _checkpoints,
    "verify": _converted,
}
