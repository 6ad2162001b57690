"""Tiny synthetic checkpoints of every family and quantisation, and the byte oracle.

Nothing here uses the product: files are written and read by code of its own, and each tensor carries, from the moment
it is made, what it is. What a conversion must produce follows from those labels and the plan, byte for byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eplb_cli.placement import Placement

H, W, E, K = 32, 32, 8, 2
"""Hidden size, expert width, experts, top-k; H equals W on purpose, so that shapes cannot tell axes apart."""

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}

Rows = Mapping[int, Sequence[int]]
"""Expert of each slot, by layer."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Item:
    """A tensor and what it is: expert (of `expert`, `template` names it with {}), fused, logical, ids or copy."""

    tensor: Tensor
    kind: str = "copy"
    layer: int = -1
    expert: int = -1
    template: str = ""


@dataclass
class Synthetic:
    """A checkpoint in memory."""

    config: dict[str, Any]
    items: dict[str, Item] = field(default_factory=dict)
    side_files: dict[str, bytes] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def random(self, dtype: str, shape: Sequence[int]) -> Tensor:
        return Tensor(dtype, tuple(shape), self.rng.bytes(math.prod(shape) * BYTES[dtype]))

    def copy(self, name: str, shape: Sequence[int] = (H,), dtype: str = "BF16") -> None:
        self.items[name] = Item(self.random(dtype, shape))

    def logical(self, layer: int, name: str, shape: Sequence[int] = (E, H), dtype: str = "BF16") -> None:
        self.items[name] = Item(self.random(dtype, shape), "logical", layer)

    def fused(self, layer: int, name: str, shape: Sequence[int], dtype: str = "BF16") -> None:
        self.items[name] = Item(self.random(dtype, (E, *shape)), "fused", layer)

    def expert(self, layer: int, template: str, expert: int, shape: Sequence[int], dtype: str = "BF16") -> None:
        item = Item(self.random(dtype, shape), "expert", layer, expert, template)
        self.items[template.format(expert)] = item

    def ids(self, layer: int, name: str, vocabulary: int = 40) -> None:
        values = self.rng.integers(0, E, (vocabulary, K)).astype("<i8")
        self.items[name] = Item(Tensor("I64", values.shape, values.tobytes()), "ids", layer)

    @property
    def moe_layers(self) -> list[int]:
        return sorted({item.layer for item in self.items.values() if item.layer >= 0})

    def tensors(self) -> dict[str, Tensor]:
        return {name: item.tensor for name, item in self.items.items()}

    def save(self, folder: Path, *, shards: int = 1, index: bool | None = None, seed: int | None = None) -> Path:
        """Write the folder. With a seed, tensors are thrown into the shards at random, so that experts straddle."""
        folder.mkdir(parents=True, exist_ok=True)
        names = list(self.items)
        if seed is not None:
            names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
        groups = [names[i::shards] for i in range(shards)] if seed is not None else _blocks(names, shards)
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        if shards == 1:
            files = ["model.safetensors"]
        for file, group in zip(files, groups, strict=True):
            write_safetensors(folder / file, {name: self.items[name].tensor for name in group})
        if index if index is not None else shards > 1:
            weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
            size = sum(len(item.tensor.data) for item in self.items.values())
            document = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(document))
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, content in {"tokenizer.json": b"{}", "LICENSE": b"text", **self.side_files}.items():
            (folder / name).write_bytes(content)
        return folder

    def expected(self, rows: Rows, layout: str) -> dict[str, Tensor]:
        """The oracle: every tensor of the converted checkpoint."""
        result = {}
        for name, item in self.items.items():
            tensor, row = item.tensor, list(rows.get(item.layer, ()))
            if item.kind == "copy" or (layout == "physical" and item.kind in ("logical", "ids")):
                result[name] = tensor
            elif item.kind == "fused":
                result[name] = _take(tensor, row)
            elif item.kind == "logical":
                result[name] = _take(tensor, row[:E])
            elif item.kind == "ids":
                values = np.frombuffer(tensor.data, "<i8")
                mapped = np.array([row[:E].index(int(value)) for value in values], "<i8")
                result[name] = Tensor(tensor.dtype, tensor.shape, mapped.tobytes())
            else:
                for slot, expert in enumerate(row if layout == "physical" else row[:E]):
                    if expert == item.expert:
                        result[item.template.format(slot)] = tensor
        return result


def _blocks(names: list[str], count: int) -> list[list[str]]:
    size = -(-len(names) // count)
    return [names[i * size : (i + 1) * size] for i in range(count)]


def _take(tensor: Tensor, row: Sequence[int]) -> Tensor:
    length = len(tensor.data) // tensor.shape[0]
    data = b"".join(tensor.data[expert * length : (expert + 1) * length] for expert in row)
    return Tensor(tensor.dtype, (len(row), *tensor.shape[1:]), data)


def write_safetensors(file: Path, tensors: Mapping[str, Tensor], *, padding: int = 0) -> None:
    """Write a file by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8 + padding)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensor.data for tensor in tensors.values()))


def read_safetensors(file: Path) -> dict[str, Tensor]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
    return tensors


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; none twice, and the index, where there is one, names exactly them."""
    tensors: dict[str, Tensor] = {}
    place = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_safetensors(file).items():
            assert name not in tensors, name
            tensors[name], place[name] = tensor, file.name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        document = json.loads(index.read_text())
        assert document["weight_map"] == place
        assert document["metadata"]["total_size"] == sum(len(tensor.data) for tensor in tensors.values())
    return tensors


def random_rows(layers: Iterable[int], redundant: int, *, seed: int = 0, groups: int = 1) -> dict[int, list[int]]:
    """A random plan of the stock form; with groups, whole groups map to whole groups."""
    rng = np.random.default_rng(seed)
    rows = {}
    for layer in layers:
        size = E // groups
        row = [int(g * size + i) for g in rng.permutation(groups) for i in rng.permutation(size)]
        rows[layer] = row + row[:redundant]
    return rows


def scattered_rows(layers: Iterable[int], redundant: int, *, seed: int = 0, ep_size: int = 4) -> dict[int, list[int]]:
    """A random plan of no form: every expert once, spares on any rank that does not hold the expert yet."""
    rng = np.random.default_rng(seed)
    rows = {}
    for layer in layers:
        while True:
            row = rng.permutation([*range(E), *rng.integers(0, E, redundant)])
            ranks = np.sort(row.reshape(ep_size, -1), 1)
            if (ranks[:, 1:] != ranks[:, :-1]).all():
                break
        rows[layer] = row.tolist()
    return rows


def save_plan(file: Path, rows: Rows, *, ep_size: int = 4, experts: int = E) -> Path:
    layers = sorted(rows)
    table = np.array([list(rows[layer]) for layer in layers], np.int32)
    Placement(table, np.array(layers, np.int32), experts, ep_size).save(file)
    return file


# Tensors of one matrix [out, in] in each quantisation: (suffix, dtype, shape).
Parts = Callable[[int, int], list[tuple[str, str, tuple[int, ...]]]]
QUANTISATIONS: dict[str, Parts] = {
    "bf16": lambda o, i: [("weight", "BF16", (o, i))],
    "fp8-block": lambda o, i: [("weight", "F8_E4M3", (o, i)), ("weight_scale_inv", "F32", (o // 16, i // 16))],
    "ct-fp8-dynamic": lambda o, i: [("weight", "F8_E4M3", (o, i)), ("weight_scale", "BF16", (o, 1))],
    "ct-fp8-static": lambda o, i: [
        ("weight", "F8_E4M3", (o, i)),
        ("weight_scale", "F32", (1,)),
        ("input_scale", "F32", (1,)),
    ],
    "ct-fp8-block": lambda o, i: [("weight", "F8_E4M3", (o, i)), ("weight_scale", "BF16", (o // 16, i // 16))],
    "ct-w4a16": lambda o, i: [
        ("weight_packed", "I32", (o, i // 8)),
        ("weight_scale", "BF16", (o, i // 16)),
        ("weight_shape", "I64", (2,)),
        ("weight_zero_point", "I32", (o // 8, i // 16)),
        ("weight_g_idx", "I32", (i,)),
    ],
    "ct-nvfp4": lambda o, i: [
        ("weight_packed", "U8", (o, i // 2)),
        ("weight_scale", "F8_E4M3", (o, i // 16)),
        ("weight_global_scale", "F32", (1,)),
        ("input_global_scale", "F32", (1,)),
    ],
    "ct-mxfp4": lambda o, i: [("weight_packed", "U8", (o, i // 2)), ("weight_scale", "U8", (o, i // 32))],
    "ct-int8": lambda o, i: [("weight", "I8", (o, i)), ("weight_scale", "F32", (o, 1))],
    "gptq": lambda o, i: [
        ("qweight", "I32", (i // 8, o)),
        ("qzeros", "I32", (i // 16, o // 8)),
        ("scales", "F16", (i // 16, o)),
        ("g_idx", "I32", (i,)),
    ],
    "awq": lambda o, i: [
        ("qweight", "I32", (i, o // 8)),
        ("qzeros", "I32", (i // 16, o // 8)),
        ("scales", "F16", (i // 16, o)),
    ],
    "modelopt-nvfp4": lambda o, i: [
        ("weight", "U8", (o, i // 2)),
        ("weight_scale", "F8_E4M3", (o, i // 16)),
        ("weight_scale_2", "F32", ()),
        ("input_scale", "F32", ()),
    ],
    "modelopt-fp8": lambda o, i: [
        ("weight", "F8_E4M3", (o, i)),
        ("weight_scale", "F32", ()),
        ("input_scale", "F32", ()),
    ],
}

GATED = {"gate_proj": (W, H), "up_proj": (W, H), "down_proj": (H, W)}
W123 = {"w1": (W, H), "w2": (H, W), "w3": (W, H)}


def add_experts(
    model: Synthetic,
    layer: int,
    module: str,
    projections: Mapping[str, tuple[int, int]] = GATED,
    quantisation: str = "bf16",
    *,
    swapped: bool = False,
) -> None:
    """Per-expert tensors, `module.<id>.<projection>.<suffix>`, or with projection and id swapped."""
    for expert in range(E):
        for projection, (out, width) in projections.items():
            for suffix, dtype, shape in QUANTISATIONS[quantisation](out, width):
                middle = f"{projection}.{{}}" if swapped else f"{{}}.{projection}"
                model.expert(layer, f"{module}.{middle}.{suffix}", expert, shape, dtype)


def skeleton(architecture: str, **config: Any) -> Synthetic:
    """A model without layers: config, embeddings and head."""
    values = {"architectures": [architecture], "hidden_size": H, "num_hidden_layers": 4, "num_experts_per_tok": K}
    model = Synthetic({**values, **config})
    model.copy("lm_head.weight", (16, H))
    return model


def nested(model: Synthetic) -> Synthetic:
    """The same with all sizes below text_config."""
    config = dict(model.config)
    architectures = config.pop("architectures")
    model.config = {"architectures": architectures, "text_config": config}
    return model


def add_attention(model: Synthetic, prefix: str) -> None:
    model.copy(f"{prefix}.self_attn.q_proj.weight", (H, H))
    model.copy(f"{prefix}.input_layernorm.weight")


def add_dense(model: Synthetic, block: str) -> None:
    for projection, shape in GATED.items():
        model.copy(f"{block}.{projection}.weight", shape)


def qwen3_moe(quantisation: str = "bf16", *, fused: bool = False) -> Synthetic:
    """MoE in layers 1 and 2 of 4."""
    model = skeleton(
        "Qwen3MoeForCausalLM",
        num_experts=E,
        moe_intermediate_size=W,
        decoder_sparse_step=1,
        mlp_only_layers=[0, 3],
    )
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        add_attention(model, prefix)
        if layer in (0, 3):
            add_dense(model, f"{prefix}.mlp")
            continue
        model.logical(layer, f"{prefix}.mlp.gate.weight")
        if fused:
            model.fused(layer, f"{prefix}.mlp.experts.gate_up_proj", (2 * W, H))
            model.fused(layer, f"{prefix}.mlp.experts.down_proj", (H, W))
        else:
            add_experts(model, layer, f"{prefix}.mlp.experts", quantisation=quantisation)
    return model


def qwen2_moe(architecture: str = "Qwen2MoeForCausalLM", draft: bool = False) -> Synthetic:
    """With a shared expert and its gate [1, H]; Qwen3-Next also has a draft head with experts."""
    model = skeleton(architecture, num_experts=E, moe_intermediate_size=W, decoder_sparse_step=2, mlp_only_layers=[])
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        add_attention(model, prefix)
        if layer % 2 == 0:
            add_dense(model, f"{prefix}.mlp")
            continue
        model.logical(layer, f"{prefix}.mlp.gate.weight")
        add_experts(model, layer, f"{prefix}.mlp.experts")
        add_dense(model, f"{prefix}.mlp.shared_expert")
        model.copy(f"{prefix}.mlp.shared_expert_gate.weight", (1, H))
    if draft:
        add_draft(model, "mtp.layers.0.mlp")
    return model


def add_draft(model: Synthetic, block: str) -> None:
    """Experts and router of a draft head; all are copies."""
    model.copy(f"{block}.gate.weight", (E, H))
    for expert in range(E):
        for projection, shape in GATED.items():
            model.copy(f"{block}.experts.{expert}.{projection}.weight", shape)


def qwen3_vl(*, modelopt: bool = False) -> Synthetic:
    model = nested(skeleton("Qwen3VLMoeForConditionalGeneration", num_experts=E, moe_intermediate_size=W))
    model.copy("model.visual.blocks.0.mlp.linear_fc1.weight", (H, H))
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}"
        add_attention(model, prefix)
        model.logical(layer, f"{prefix}.mlp.gate.weight")
        if modelopt:
            module = f"{prefix}.mlp.experts"
            add_experts(model, layer, module, quantisation="modelopt-nvfp4", swapped=True)
        else:
            model.fused(layer, f"{prefix}.mlp.experts.gate_up_proj", (H, 2 * W))
            model.fused(layer, f"{prefix}.mlp.experts.down_proj", (W, H))
    return model


def qwen3_5(*, fused: bool) -> Synthetic:
    model = nested(skeleton("Qwen3_5MoeForConditionalGeneration", num_experts=E, moe_intermediate_size=W))
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}"
        model.copy(f"{prefix}.linear_attn.in_proj_qkvz.weight", (H, H))
        model.logical(layer, f"{prefix}.mlp.gate.weight")
        if fused:
            model.fused(layer, f"{prefix}.mlp.experts.gate_up_proj", (2 * W, H))
            model.fused(layer, f"{prefix}.mlp.experts.down_proj", (H, W))
        else:
            add_experts(model, layer, f"{prefix}.mlp.experts", quantisation="fp8-block")
        add_dense(model, f"{prefix}.mlp.shared_expert")
        model.copy(f"{prefix}.mlp.shared_expert_gate.weight", (1, H))
    add_draft(model, "mtp.layers.0.mlp")
    return model


def llama4(form: str = "fused", *, multimodal: bool = False) -> Synthetic:
    """MoE in layers 1 and 3 of 5, shared experts, and the forms that releases use."""
    name = "Llama4ForConditionalGeneration" if multimodal else "Llama4ForCausalLM"
    model = skeleton(
        name,
        num_local_experts=E,
        intermediate_size=W,
        intermediate_size_mlp=2 * W,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        num_hidden_layers=5,
    )
    start = "language_model.model.layers" if multimodal else "model.layers"
    if multimodal:
        nested(model)
        model.copy("vision_model.model.layers.0.mlp.fc1.weight", (H, H))
    for layer in range(5):
        prefix = f"{start}.{layer}"
        block = f"{prefix}.feed_forward"
        add_attention(model, prefix)
        if layer % 2 == 0:
            add_dense(model, block)
            continue
        model.logical(layer, f"{block}.router.weight")
        add_dense(model, f"{block}.shared_expert")
        if form in QUANTISATIONS:
            add_experts(model, layer, f"{block}.experts", quantisation=form)
            continue
        dtype = "BF16" if form == "fused" else "U8" if form == "nvidia-nvfp4" else "F8_E4M3"
        for stem, shape in (("gate_up_proj", (H, 2 * W)), ("down_proj", (W, H))):
            stored = (shape[0] // 2, shape[1]) if form == "nvidia-nvfp4" else shape
            model.fused(layer, f"{block}.experts.{stem}", stored, dtype)
            if form.startswith("nvidia"):
                model.copy(f"{block}.experts.{stem}_input_scale", (), "F32")
            if form == "nvidia-fp8":
                model.copy(f"{block}.experts.{stem}_weight_scale", (), "F32")
            if form == "nvidia-nvfp4":
                model.fused(layer, f"{block}.experts.{stem}_weight_scale", (shape[0] // 16, shape[1]), "F8_E4M3")
                model.copy(f"{block}.experts.{stem}_weight_scale_2", (), "F32")
            if form == "fbgemm":
                scale = (1, shape[1]) if stem == "gate_up_proj" else (shape[1], 1)
                model.fused(layer, f"{block}.experts.{stem}_scale", scale, "F32")
    return model


def deepseek(
    architecture: str = "DeepseekV3ForCausalLM",
    quantisation: str = "fp8-block",
    *,
    prefix: str = "model.layers",
    groups: int = 1,
    draft: str | None = "model.layers.4.mlp",
    **config: Any,
) -> Synthetic:
    """First layer dense, correction bias, shared experts; a draft layer numbered num_hidden_layers."""
    values = {"n_routed_experts": E, "moe_intermediate_size": W, "first_k_dense_replace": 1, "n_group": groups}
    model = skeleton(architecture, **{**values, **config})
    for layer in range(4):
        add_attention(model, f"{prefix}.{layer}")
        block = f"{prefix}.{layer}.mlp"
        if layer == 0:
            add_dense(model, block)
            continue
        model.logical(layer, f"{block}.gate.weight")
        model.logical(layer, f"{block}.gate.e_score_correction_bias", (E,), "F32")
        add_experts(model, layer, f"{block}.experts", quantisation=quantisation)
        add_dense(model, f"{block}.shared_experts")
    if draft:
        add_draft(model, draft)
    return model


def deepseek_v4() -> Synthetic:
    """Layer 0 routes by a table of ids, the others by a biased gate."""
    model = skeleton("DeepseekV4ForCausalLM", n_routed_experts=E, moe_intermediate_size=W)
    for layer in range(4):
        block = f"layers.{layer}.ffn"
        model.copy(f"layers.{layer}.attn.wq_a.weight", (H, H))
        model.logical(layer, f"{block}.gate.weight")
        if layer == 0:
            model.ids(layer, f"{block}.gate.tid2eid")
        else:
            model.logical(layer, f"{block}.gate.bias", (E,), "F32")
        for expert in range(E):
            for projection, (out, width) in W123.items():
                model.expert(layer, f"{block}.experts.{{}}.{projection}.weight", expert, (out, width // 2), "I8")
                model.expert(layer, f"{block}.experts.{{}}.{projection}.scale", expert, (out, width // 32), "U8")
        model.copy(f"{block}.shared_experts.w1.weight", (W, H))
    model.copy("mtp.0.ffn.gate.weight", (E, H))
    model.copy("mtp.0.ffn.experts.0.w1.weight", (W, H))
    return model


def mixtral(*, fused: bool = False) -> Synthetic:
    model = skeleton("MixtralForCausalLM", num_local_experts=E, intermediate_size=W)
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        add_attention(model, prefix)
        if fused:
            model.logical(layer, f"{prefix}.mlp.gate.weight")
            model.fused(layer, f"{prefix}.mlp.experts.gate_up_proj", (2 * W, H))
            model.fused(layer, f"{prefix}.mlp.experts.down_proj", (H, W))
        else:
            model.logical(layer, f"{prefix}.block_sparse_moe.gate.weight")
            add_experts(model, layer, f"{prefix}.block_sparse_moe.experts", W123)
    return model


def olmoe() -> Synthetic:
    model = skeleton("OlmoeForCausalLM", num_experts=E, intermediate_size=W)
    for layer in range(4):
        add_attention(model, f"model.layers.{layer}")
        model.logical(layer, f"model.layers.{layer}.mlp.gate.weight")
        add_experts(model, layer, f"model.layers.{layer}.mlp.experts")
    return model


def minimax_m2() -> Synthetic:
    model = skeleton("MiniMaxM2ForCausalLM", num_local_experts=E, intermediate_size=W)
    for layer in range(4):
        block = f"model.layers.{layer}.block_sparse_moe"
        add_attention(model, f"model.layers.{layer}")
        model.logical(layer, f"{block}.gate.weight", dtype="F32")
        model.logical(layer, f"{block}.e_score_correction_bias", (E,), "F32")
        add_experts(model, layer, f"{block}.experts", W123, "fp8-block")
    return model


def minimax_m3() -> Synthetic:
    """Half the layers dense by list; single experts are named in the quantisation config."""
    model = nested(
        skeleton(
            "MiniMaxM3SparseForConditionalGeneration",
            num_local_experts=E,
            intermediate_size=W,
            moe_layer_freq=[0, 0, 1, 1],
        )
    )
    layers = {}
    for layer in range(4):
        prefix = f"language_model.model.layers.{layer}"
        add_attention(model, prefix)
        if layer < 2:
            add_dense(model, f"{prefix}.mlp")
            continue
        block = f"{prefix}.block_sparse_moe"
        model.logical(layer, f"{block}.gate.weight")
        model.logical(layer, f"{block}.e_score_correction_bias", (E,), "F32")
        add_dense(model, f"{block}.shared_experts")
        add_experts(model, layer, f"{block}.experts", W123, "modelopt-nvfp4")
        for expert in range(E):
            for projection in W123:
                # The algorithm differs by expert, so a name that does not follow its expert shows.
                layers[f"{block}.experts.{expert}.{projection}"] = {"quant_algo": f"ALGO{layer}_{expert}"}
    quantisation = {"quant_method": "modelopt", "exclude_modules": ["lm_head"], "quantized_layers": layers}
    model.config["quantization_config"] = quantisation
    model.side_files["hf_quant_config.json"] = json.dumps({"quantization": {"quantized_layers": layers}}).encode()
    return model


def gpt_oss(*, mxfp4: bool = True) -> Synthetic:
    """MXFP4 blocks and scales, biases of experts and of the router."""
    model = skeleton("GptOssForCausalLM", num_local_experts=E, intermediate_size=W)
    for layer in range(4):
        block = f"model.layers.{layer}.mlp"
        add_attention(model, f"model.layers.{layer}")
        model.logical(layer, f"{block}.router.weight")
        model.logical(layer, f"{block}.router.bias", (E,))
        for stem, out, width in (("gate_up_proj", 2 * W, H), ("down_proj", H, W)):
            if mxfp4:
                model.fused(layer, f"{block}.experts.{stem}_blocks", (out, width // 32, 16), "U8")
                model.fused(layer, f"{block}.experts.{stem}_scales", (out, width // 32), "U8")
            else:
                model.fused(layer, f"{block}.experts.{stem}", (width, out))
            model.fused(layer, f"{block}.experts.{stem}_bias", (out,))
    return model


def gemma4() -> Synthetic:
    """Experts beside a dense mlp; router.scale is [H], and H equals no expert count by chance only."""
    model = nested(
        skeleton(
            "Gemma4ForConditionalGeneration",
            num_experts=E,
            top_k_experts=K,
            moe_intermediate_size=W,
            enable_moe_block=True,
        )
    )
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}"
        add_attention(model, prefix)
        add_dense(model, f"{prefix}.mlp")
        model.logical(layer, f"{prefix}.router.proj.weight")
        model.logical(layer, f"{prefix}.router.per_expert_scale", (E,))
        model.copy(f"{prefix}.router.scale", (H,))
        model.fused(layer, f"{prefix}.experts.gate_up_proj", (2 * W, H))
        model.fused(layer, f"{prefix}.experts.down_proj", (H, W))
    return model


def mixed_layouts() -> Synthetic:
    """A Qwen3-MoE with one layer per expert and the other fused."""
    model = qwen3_moe()
    other = qwen3_moe(fused=True)
    for name in [name for name, item in model.items.items() if item.layer == 2 and item.kind == "expert"]:
        del model.items[name]
    model.items.update({name: item for name, item in other.items.items() if item.kind == "fused" and item.layer == 2})
    return model


FORMS: dict[str, Callable[[], Synthetic]] = {
    **{f"qwen3_moe-{name}": (lambda name=name: qwen3_moe(name)) for name in QUANTISATIONS},
    "qwen3_moe-fused": lambda: qwen3_moe(fused=True),
    "qwen3_moe-layouts-by-layer": mixed_layouts,
    "qwen2_moe": qwen2_moe,
    "qwen3_next": lambda: qwen2_moe("Qwen3NextForCausalLM", draft=True),
    "qwen3_vl-fused-transposed": qwen3_vl,
    "qwen3_vl-modelopt": lambda: qwen3_vl(modelopt=True),
    "qwen3_5-fused": lambda: qwen3_5(fused=True),
    "qwen3_5-fp8": lambda: qwen3_5(fused=False),
    "llama4-text": llama4,
    "llama4-multimodal": lambda: llama4(multimodal=True),
    "llama4-meta-fp8": lambda: llama4("ct-fp8-dynamic", multimodal=True),
    "llama4-w4a16": lambda: llama4("ct-w4a16", multimodal=True),
    "llama4-nvfp4": lambda: llama4("ct-nvfp4", multimodal=True),
    "llama4-nvidia-fp8": lambda: llama4("nvidia-fp8"),
    "llama4-nvidia-nvfp4": lambda: llama4("nvidia-nvfp4"),
    "llama4-fbgemm": lambda: llama4("fbgemm"),
    "deepseek_v3": deepseek,
    "deepseek_v32": lambda: deepseek("DeepseekV32ForCausalLM"),
    "kimi_k2": lambda: deepseek(draft=None),
    "kimi_k2.5-int4": lambda: nested(
        deepseek("KimiK25ForConditionalGeneration", "ct-w4a16", prefix="language_model.model.layers", draft=None)
    ),
    "glm4_moe": lambda: deepseek("Glm4MoeForCausalLM", "bf16"),
    "glm5": lambda: deepseek("GlmMoeDsaForCausalLM"),
    "mimo_v2": lambda: deepseek(
        "MiMoV2FlashForCausalLM",
        draft="model.mtp.layers.0.mlp",
        first_k_dense_replace=None,
        moe_layer_freq=[0, 1, 1, 1],
    ),
    "deepseek_v4": deepseek_v4,
    "mixtral": mixtral,
    "mixtral-fused": lambda: mixtral(fused=True),
    "olmoe": olmoe,
    "minimax_m2": minimax_m2,
    "minimax_m3": minimax_m3,
    "gpt_oss-mxfp4": gpt_oss,
    "gpt_oss-bf16": lambda: gpt_oss(mxfp4=False),
    "gemma4": gemma4,
}
"""Every on-disk form whose names are known."""
