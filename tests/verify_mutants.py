"""Every way in which a converted checkpoint may differ from what it must be, and what `eplb verify` says of it.

A row is one change to a right checkpoint. `said` is what a problem must name, the file or the field; None where the
change is none that any reader could notice, and the proof must still hold. docs/proofs.md lists the same rows.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints import E, Tensor, read_safetensors, write_safetensors

__all__ = ["MUTANTS", "Broken", "Mutant", "NotApplicableError", "as_markdown", "put_notes"]

INDEX = "model.safetensors.index.json"
PLAN = "eplb_plan.json"
PROVENANCE = "eplb_provenance.json"
QUANT = "quantization_config"


class NotApplicableError(Exception):
    """The case has nothing that this row could change."""


@dataclass
class Broken:
    """A copy of a converted checkpoint, to be broken.

    Args:
        folder: the copy.
        source: the source's folder.
        layout: `stock` or `physical`.
        rows: expert of each slot, by layer.
        name: full name of an expert's module, with {} for the id, by layer.
    """

    folder: Path
    source: Path
    layout: str
    rows: dict[int, list[int]]
    names: dict[int, str]

    def require(self, condition: object) -> None:
        if not condition:
            raise NotApplicableError

    def json(self, name: str, change: Callable[[Any], None]) -> None:
        """Change a JSON file's document in place."""
        file = self.folder / name
        self.require(file.exists())
        document = json.loads(file.read_text())
        before = json.dumps(document)
        change(document)
        assert json.dumps(document) != before
        file.write_text(json.dumps(document))

    def text(self, name: str, old: str, new: str) -> None:
        file = self.folder / name
        self.require(file.exists())
        content = file.read_text()
        assert old in content
        file.write_text(content.replace(old, new, 1))

    def add(self, name: str, content: bytes = b"{}") -> None:
        file = self.folder / name
        assert not file.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def shard_of(self, name: str) -> Path:
        return next(file for file in sorted(self.folder.glob("*.safetensors")) if name in read_safetensors(file))

    def tensors(self, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Rewrite the shard that holds a tensor, its notes kept."""
        file = self.shard_of(name)
        notes = header(file)[0].get("__metadata__")
        tensors = read_safetensors(file)
        change(tensors)
        write_safetensors(file, tensors)
        put_notes(file, lambda _: notes)

    def listed(self, change: Callable[[dict[str, str]], None]) -> None:
        """Change the index's map along with the files, where there is an index."""
        if (self.folder / INDEX).exists():
            document = json.loads((self.folder / INDEX).read_text())
            change(document["weight_map"])
            (self.folder / INDEX).write_text(json.dumps(document))


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def put_notes(file: Path, change: Callable[[Any], Any]) -> None:
    """Change a shard's __metadata__, and nothing else."""
    document, data = header(file)
    notes = change(document.pop("__metadata__", None))
    if notes is not None:
        document = {"__metadata__": notes, **document}
    raw = json.dumps(document).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@dataclass(frozen=True)
class Mutant:
    """One row.

    Args:
        group: the part of the checkpoint.
        name: what was changed.
        change: does it.
        said: what a problem must name; None when the proof must hold.
    """

    group: str
    name: str
    change: Callable[[Broken], None]
    said: str | None


MUTANTS: list[Mutant] = []


def row(group: str, name: str, change: Callable[[Broken], Any], said: str | None) -> None:
    assert all(mutant.name != name or mutant.group != group for mutant in MUTANTS), name
    MUTANTS.append(Mutant(group, name, change, said))


def put(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document[key]
    assert last in document, path
    document[last] = value


def drop(document: Any, path: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document[key]
    del document[last]


def new(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document[key]
    assert last not in document, path
    document[last] = value


def edit(group: str, file: str, name: str, change: Callable[[Any], Any], said: str) -> None:
    row(group, name, lambda made: made.json(file, change), said)


# config.json: values and their types. The quantisation config of every case holds these keys, see `rich`.
G = "config.json"
for path, value, what in [
    ("flag", "true", 'true as the text "true"'),
    ("flag", 1, "true as 1"),
    ("flag", False, "true as false"),
    ("off", "false", 'false as the text "false"'),
    ("off", 0, "false as 0"),
    ("off", None, "false as null"),
    ("none", "null", 'null as the text "null"'),
    ("none", False, "null as false"),
    ("none", "", "null as an empty text"),
    ("none", {}, "null as an empty object"),
    ("width", "32", '32 as the text "32"'),
    ("width", 32.0, "32 as 32.0"),
    ("width", [32], "32 in a list"),
    ("one", True, "1 as true"),
    ("one", 1.0, "1 as 1.0"),
    ("ratio", 1, "1.0 as 1"),
    ("ratio", 1.0000000000000002, "1.0 by the last bit"),
    ("ratio", -1.0, "1.0 negated"),
    ("zero", -0.0, "0.0 as -0.0"),
    ("empty", {}, "an empty list as an empty object"),
    ("empty", None, "an empty list as null"),
    ("empty", [[]], "an empty list in a list"),
    ("blocks", [64, 128], "two numbers of a list exchanged"),
    ("blocks", [128, 64, 64], "a number of a list repeated"),
    ("blocks", [128], "a number of a list lost"),
    ("blocks", [128, "64"], "a number of a list as text"),
    ("blocks", "[128, 64]", "a list as its text"),
    ("nested.deep.value", 4, "a value three levels down"),
    ("nested.deep", None, "an object as null"),
    ("nested", [{"deep": {"value": 3}}], "an object in a list"),
    ("modules_to_not_convert", ["lm_head", "model.norm"], "all names but two lost from modules_to_not_convert"),
    ("modules_to_not_convert", [], "modules_to_not_convert emptied"),
    ("modules_to_not_convert", None, "modules_to_not_convert as null"),
]:
    edit(G, "config.json", what, lambda d, p=path, v=value: put(d, f"{QUANT}.{p}", v), f"{QUANT}.{path.split('.')[0]}")
edit(G, "config.json", "a key lost", lambda d: drop(d, f"{QUANT}.flag"), f"{QUANT}.flag is missing")
edit(G, "config.json", "a key that was null lost", lambda d: drop(d, f"{QUANT}.none"), f"{QUANT}.none is missing")
edit(G, "config.json", "the quantisation config lost", lambda d: drop(d, QUANT), f"{QUANT} is missing")
edit(G, "config.json", "a key added", lambda d: new(d, f"{QUANT}.more", 1), f"{QUANT}.more must not be there")
edit(G, "config.json", "a key added as null", lambda d: new(d, "more", None), "more must not be there")
edit(G, "config.json", "a key in other letters", lambda d: new(d, "Hidden_size", 32), "Hidden_size must not be there")
edit(G, "config.json", "code named in auto_map", lambda d: new(d, "auto_map", {"AutoConfig": "x.X"}), "auto_map")
edit(G, "config.json", "a second architecture", lambda d: d["architectures"].append("Other"), "architectures")


def count_key(document: Any) -> tuple[Any, str]:
    section = document.get("text_config", document)
    return section, next(k for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in section)


def set_count(change: Callable[[int], Any]) -> Callable[[Any], None]:
    def apply(document: Any) -> None:
        section, key = count_key(document)
        section[key] = change(section[key])

    return apply


edit(G, "config.json", "the expert count one more", set_count(lambda count: count + 1), "experts")
edit(G, "config.json", "the expert count as text", set_count(str), "experts")
edit(G, "config.json", "the expert count as a float", set_count(float), "experts")
edit(G, "config.json", "the expert count of the other layout", set_count(lambda count: 12 if count == E else E), "exp")
edit(G, "config.json", "another hidden size", lambda d: put(d.get("text_config", d), "hidden_size", 64), "hidden_size")
edit(G, "config.json", "another top-k", lambda d: put(d.get("text_config", d), "num_experts_per_tok", 3), "_per_tok")

# config.json: lists and keys that name experts.
NAMES = "names of experts"


def expert_entries(made: Broken, document: Any) -> tuple[list[str], int, int]:
    """The list of names, and where the entries of its first expert begin and end."""
    names = document[QUANT]["modules_to_not_convert"]
    layer = min(made.names)
    first = names.index("lm_head") + 1
    copies = made.rows[layer][: None if made.layout == "physical" else E].count(5)
    return names, first, first + copies


def on_entries(change: Callable[[Broken, list[str], int, int], Any]) -> Callable[[Broken], None]:
    return lambda made: made.json("config.json", lambda d: change(made, *expert_entries(made, d)))


def swap_copies(made: Broken, names: list[str], first: int, end: int) -> None:
    made.require(end - first > 1)
    names[first], names[first + 1] = names[first + 1], names[first]


def lose_copy(made: Broken, names: list[str], first: int, end: int) -> None:
    made.require(end - first > 1)
    del names[first]


def copy_as_other(made: Broken, names: list[str], first: int, end: int) -> None:
    made.require(end - first > 1)
    names[first] = names[first + 1]


def another_id(made: Broken, names: list[str], first: int, _: int) -> None:
    layer = min(made.names)
    current = next(i for i in range(12) if names[first] == made.names[layer].format(i))
    names[first] = made.names[layer].format((current + 1) % E)


LIST = f"{QUANT}.modules_to_not_convert"
for what, change in [
    ("an expert's entry lost", lambda m, n, a, z: n.__delitem__(slice(a, z))),
    ("an expert's entry repeated", lambda m, n, a, z: n.insert(a, n[a])),
    ("an expert's entry repeated at the end", lambda m, n, a, z: n.append(n[a])),
    ("an expert's entry that names another", another_id),
    ("an expert's entry by an id that is none", lambda m, n, a, z: n.__setitem__(a, m.names[min(m.names)].format(99))),
    (
        "an expert's entry with a leading zero",
        lambda m, n, a, z: n.__setitem__(a, n[a].replace("experts.", "experts.0")),
    ),
    ("an expert's entry in a list of its own", lambda m, n, a, z: n.__setitem__(a, [n[a]])),
    ("one of the entries of an expert's copies lost", lose_copy),
    ("the entries of an expert's copies exchanged", swap_copies),
    ("one copy's entry twice, the other's not", copy_as_other),
    ("an entry moved to the front", lambda m, n, a, z: n.insert(0, n.pop())),
    ("an entry of no expert lost", lambda m, n, a, z: n.remove("lm_head")),
    ("an entry of no expert repeated", lambda m, n, a, z: n.append("lm_head")),
    ("an entry of no expert, once more where it was twice", lambda m, n, a, z: n.append("model.norm")),
    ("an entry of no expert, once less where it was twice", lambda m, n, a, z: n.remove("model.norm")),
    ("an entry of no expert added", lambda m, n, a, z: n.append("model.embed_tokens")),
]:
    row(NAMES, what, on_entries(change), LIST)


def lose_last(made: Broken) -> None:
    def change(document: Any) -> None:
        made.require(len(document[QUANT]["ignore"]) > 1)
        document[QUANT]["ignore"].pop()

    made.json("config.json", change)


row(NAMES, "the last entry of a list lost, one of a copy", lose_last, f"{QUANT}.ignore")


def layers_of(document: Any) -> Any:
    return document[QUANT]["layers"]


def swap_values(document: Any) -> None:
    layers = layers_of(document)
    one, two = next((a, b) for a in layers for b in layers if layers[a] != layers[b])
    layers[one], layers[two] = layers[two], layers[one]


def rename_key(document: Any) -> None:
    layers = layers_of(document)
    key = next(iter(layers))
    layers[key.replace("experts.", "experts.9")] = layers.pop(key)


edit(NAMES, "config.json", "the values of two experts exchanged", swap_values, f"{QUANT}.layers")
edit(
    NAMES,
    "config.json",
    "an expert's key lost",
    lambda d: layers_of(d).pop(next(iter(layers_of(d)))),
    f"{QUANT}.layers",
)
edit(NAMES, "config.json", "an expert's key by another id", rename_key, f"{QUANT}.layers")


def source_names(made: Broken) -> None:
    document = json.loads((made.source / "config.json").read_text())
    made.json("config.json", lambda d: put(d, f"{QUANT}.layers", document[QUANT]["layers"]))


row(NAMES, "names left as they were in config.json", source_names, f"{QUANT}.layers")
for side in ("hf_quant_config.json", "recipe.yaml"):
    row(
        NAMES,
        f"names left as they were in {side}",
        lambda made, side=side: shutil.copy(made.source / side, made.folder / side),
        side,
    )
edit(NAMES, "hf_quant_config.json", "a value in hf_quant_config.json as text", lambda d: put(d, "bits", "8"), "bits")
row(NAMES, "a comment lost from recipe.yaml", lambda m: m.text("recipe.yaml", "# made by hand\n", ""), "recipe.yaml")

# config.json: the record.
G = "record"
for key, value, what in [
    ("version", 2, "version 2"),
    ("version", "1", 'version "1"'),
    ("version", True, "version true"),
    ("num_logical_experts", E + 1, "another number of experts"),
    ("num_physical_experts", 99, "another number of slots"),
    ("num_stored_experts", 7, "another number of stored experts"),
    ("num_stored_experts", None, "no number of stored experts"),
    ("ep_size", 2, "another ep_size"),
    ("ep_size", "4", "ep_size as text"),
    ("plan", "plan.json", "another file as the plan"),
    ("plan", "../eplb_plan.json", "a plan outside"),
    ("plan_sha256", "0" * 64, "another digest"),
    ("plan_sha256", None, "no digest"),
]:
    edit(G, "config.json", what, lambda d, k=key, v=value: put(d, f"eplb_placement.{k}", v), key)
for key in ("version", "num_logical_experts", "num_physical_experts", "num_stored_experts", "ep_size", "plan_sha256"):
    edit(G, "config.json", f"{key} lost", lambda d, k=key: drop(d, f"eplb_placement.{k}"), key)
edit(G, "config.json", "an unknown key", lambda d: new(d, "eplb_placement.more", 1), "eplb_placement.more")
edit(
    G,
    "config.json",
    "a digest in capitals",
    lambda d: d["eplb_placement"].update(plan_sha256=d["eplb_placement"]["plan_sha256"].upper() + ""),
    "plan_sha256",
)
edit(G, "config.json", "no layout", lambda d: drop(d, "eplb_placement.layout"), "config.json")
edit(G, "config.json", "an unknown layout", lambda d: put(d, "eplb_placement.layout", "Stock"), "config.json")
edit(G, "config.json", "layout a list", lambda d: put(d, "eplb_placement.layout", ["stock"]), "config.json")
edit(
    G,
    "config.json",
    "the other layout",
    lambda d: d["eplb_placement"].update(layout="stock" if d["eplb_placement"]["layout"] == "physical" else "physical"),
    "layout",
)
edit(G, "config.json", "no record", lambda d: drop(d, "eplb_placement"), "eplb_placement")
edit(G, "config.json", "a list as the record", lambda d: put(d, "eplb_placement", [1]), "eplb_placement")

# The plan inside.
G = "plan"
for path, value, what in [
    ("topology.nodes", 1, "other nodes"),
    ("topology.nodes", 4, "more nodes"),
    ("topology.ep_size", 2, "another ep_size"),
    ("strategy", "deepseek", "another strategy"),
    ("strategy", None, "no strategy"),
    ("objective", "other", "another objective"),
    ("seed", 8, "another seed"),
    ("seed", None, "no seed"),
    ("profile_sha256", "1" * 64, "other loads"),
    ("model.architecture", "Other", "another architecture"),
    ("model.architecture", None, "no architecture"),
    ("model.top_k", 1, "another top-k"),
    ("balancedness.before", 0.4, "another figure before"),
    ("balancedness.after", 0.9999, "another figure after"),
    ("balancedness.held_out", None, "no held-out figure"),
    ("balancedness.bound", 1, "a bound as a whole number"),
    ("balancedness", {}, "no figures"),
    ("model.experts", 9, "another number of experts"),
    ("num_redundant_experts", 1, "another number of redundant experts"),
    ("version", 2, "a newer version"),
    ("format", "plan", "another format"),
]:
    edit(G, PLAN, what, lambda d, p=path, v=value: put(d, p, v), PLAN)
for key in ("strategy", "seed", "balancedness", "topology.nodes", "model.architecture"):
    edit(G, PLAN, f"{key} lost", lambda d, k=key: drop(d, k), PLAN)
edit(G, PLAN, "an unknown key", lambda d: new(d, "more", 1), "more")


def swap_slots(document: Any) -> None:
    layer = document["layers"][0]["physical_to_logical"]
    layer[0], layer[1] = layer[1], layer[0]


def swap_rows(document: Any) -> None:
    one, two = document["layers"][:2]
    one["physical_to_logical"], two["physical_to_logical"] = two["physical_to_logical"], one["physical_to_logical"]


edit(G, PLAN, "two slots of a layer exchanged", swap_slots, PLAN)
edit(G, PLAN, "the rows of two layers exchanged", swap_rows, PLAN)
edit(G, PLAN, "a layer lost", lambda d: d["layers"].pop(), PLAN)
edit(G, PLAN, "a layer twice", lambda d: d["layers"].append(d["layers"][0]), "layer")
edit(G, PLAN, "a layer of another id", lambda d: d["layers"][-1].update(layer_id=77), "layer")
edit(G, PLAN, "moe_index lost", lambda d: d["layers"][0].pop("moe_index"), "moe_index")
edit(G, PLAN, "an expert that there is not", lambda d: d["layers"][0]["physical_to_logical"].__setitem__(0, 99), PLAN)
row(G, "a key twice", lambda m: m.text(PLAN, '"seed": 7', '"seed": 7, "seed": 7'), "seed")
row(G, "no JSON", lambda m: (m.folder / PLAN).write_bytes(b"{"), PLAN)
row(G, "missing", lambda m: (m.folder / PLAN).unlink(), PLAN)
row(G, "nested 20,000 deep", lambda m: (m.folder / PLAN).write_text("[" * 20_000), PLAN)

# The provenance.
G = "provenance"
for path, value, what in [
    ("format", "provenance", "another format"),
    ("version", 2, "another version"),
    ("version", "1", "version as text"),
    ("tool_version", 1, "tool_version a number"),
    ("tool_version", None, "no tool_version"),
    ("tool_version", "", "an empty tool_version"),
    ("layout", "other", "another layout"),
    ("source.folder", 1, "the source's folder a number"),
    ("source.revision", 1, "the source's revision a number"),
    ("source.config_sha256", "0" * 64, "another digest of the source's config.json"),
    ("source.earlier_placement", {"layout": "stock"}, "an earlier placement that was none"),
    ("source.shards", {}, "no shards of the source"),
    ("plan_sha256", "0" * 64, "another digest of the plan"),
    ("plan_file_sha256", "0" * 64, "another digest of the plan's file"),
    ("identity_layers", [0, 1, 2, 3, 4], "other layers that the plan lacked"),
    ("identity_layers", None, "layers that the plan lacked, as null"),
    ("unchanged_drafts", ["model"], "other draft heads"),
    ("side_files", [], "no side files"),
    ("left_out", ["x"], "another file left out"),
    ("tensors", {}, "no tensors"),
    ("source", None, "no source"),
]:
    edit(G, PROVENANCE, what, lambda d, p=path, v=value: put(d, p, v), PROVENANCE if path == "source" else path)
for path in ("tool_version", "layout", "source.shards", "source.revision", "plan_file_sha256", "side_files", "tensors"):
    edit(G, PROVENANCE, f"{path} lost", lambda d, p=path: drop(d, p), path.split(".")[-1])
row(
    G,
    "a planned layer among those that the plan lacked",
    lambda m: m.json(PROVENANCE, lambda d: d["identity_layers"].insert(0, min(m.names))),
    "identity_layers",
)
edit(G, PROVENANCE, "an unknown key", lambda d: new(d, "more", 1), "more must not be there")
edit(G, PROVENANCE, "an unknown key of the source", lambda d: new(d, "source.more", 1), "source.more")


def first_shard(document: Any) -> Any:
    return next(iter(document["source"]["shards"].values()))


edit(G, PROVENANCE, "another size of a shard", lambda d: put(first_shard(d), "size", 1), "size")
edit(
    G,
    PROVENANCE,
    "another digest of a shard's header",
    lambda d: put(first_shard(d), "header_sha256", "0"),
    "header_sha256",
)
edit(G, PROVENANCE, "a side file lost", lambda d: d["side_files"].pop(), "side_files")
edit(G, PROVENANCE, "side files in another order", lambda d: d["side_files"].reverse(), "side_files")


def moved(document: Any) -> tuple[Any, list[str]]:
    return document["tensors"], [name for name, origin in document["tensors"].items() if origin is not None]


def swap_origins(made: Broken) -> None:
    def change(document: Any) -> None:
        tensors, names = moved(document)
        made.require(len(names) > 1)
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

    made.json(PROVENANCE, change)


row(G, "two tensors' origins exchanged", swap_origins, "tensors.")
edit(G, PROVENANCE, "a tensor lost", lambda d: d["tensors"].popitem(), "tensors.")
edit(
    G,
    PROVENANCE,
    "a tensor added",
    lambda d: new(d, "tensors", {}) if False else d["tensors"].update(x=None),
    "tensors.x",
)
edit(
    G,
    PROVENANCE,
    "an origin named where it is the same",
    lambda d: d["tensors"].update({"lm_head.weight": "lm_head.weight"}),
    "lm_head.weight",
)
row(G, "missing", lambda m: (m.folder / PROVENANCE).unlink(), PROVENANCE)
row(G, "no JSON", lambda m: (m.folder / PROVENANCE).write_text("{]"), PROVENANCE)
row(G, "no text", lambda m: (m.folder / PROVENANCE).write_bytes(b"\xff\xfe"), PROVENANCE)
row(G, "empty", lambda m: (m.folder / PROVENANCE).write_bytes(b""), PROVENANCE)
row(G, "a list", lambda m: (m.folder / PROVENANCE).write_text("[]"), PROVENANCE)
row(G, "an empty object", lambda m: (m.folder / PROVENANCE).write_text("{}"), PROVENANCE)
row(G, "a key twice", lambda m: m.text(PROVENANCE, '"version": 1', '"version": 1, "version": 1'), PROVENANCE)
row(G, "nested 20,000 deep", lambda m: (m.folder / PROVENANCE).write_text("[" * 20_000), PROVENANCE)

# The index.
G = "index"
edit(G, INDEX, "another total", lambda d: put(d, "metadata.total_size", 1), "total_size")
edit(
    G,
    INDEX,
    "the total as text",
    lambda d: put(d, "metadata.total_size", str(d["metadata"]["total_size"])),
    "total_size",
)
edit(
    G,
    INDEX,
    "the total as a float",
    lambda d: put(d, "metadata.total_size", float(d["metadata"]["total_size"])),
    "total_size",
)
edit(G, INDEX, "no total", lambda d: drop(d, "metadata.total_size"), "total_size")
edit(G, INDEX, "a note changed", lambda d: put(d, "metadata.made_by", "somebody"), "made_by")
edit(G, INDEX, "a note lost", lambda d: drop(d, "metadata.made_by"), "made_by")
edit(G, INDEX, "a note added", lambda d: new(d, "metadata.more", 1), "more")
edit(G, INDEX, "no notes", lambda d: drop(d, "metadata"), "metadata")
edit(G, INDEX, "a list as the notes", lambda d: put(d, "metadata", []), "metadata")
edit(G, INDEX, "an unknown key", lambda d: new(d, "more", 1), "more")


def other_total_parameters(document: Any) -> None:
    document["metadata"]["total_parameters"] = document["metadata"].get("total_parameters", 0) + 1


edit(G, INDEX, "another number of parameters", other_total_parameters, "total_parameters")


def point_elsewhere(made: Broken, document: Any) -> None:
    made.require(len(set(document["weight_map"].values())) > 1)
    shards = sorted(set(document["weight_map"].values()))
    name = next(iter(document["weight_map"]))
    document["weight_map"][name] = next(shard for shard in shards if shard != document["weight_map"][name])


row(
    G,
    "a tensor in another shard than the index says",
    lambda m: m.json(INDEX, lambda d: point_elsewhere(m, d)),
    INDEX,
)
edit(G, INDEX, "a tensor that the index lacks", lambda d: d["weight_map"].popitem(), INDEX)
edit(
    G,
    INDEX,
    "a tensor that only the index has",
    lambda d: d["weight_map"].update(x="model-x.safetensors"),
    "model-x.safetensors",
)
row(
    G,
    "a tensor twice",
    lambda m: m.text(INDEX, '"weight_map": {', '"weight_map": {"lm_head.weight": "x", '),
    "lm_head.weight",
)
row(G, "missing", lambda m: (m.folder / INDEX).unlink(), "index")
row(G, "no JSON", lambda m: (m.folder / INDEX).write_text("{"), INDEX)
row(
    G,
    "a second index",
    lambda m: shutil.copy(m.folder / INDEX, m.folder / "other.safetensors.index.json"),
    "other.safetensors.index.json",
)

row(
    G, "under another name", lambda m: (m.folder / INDEX).rename(m.folder / "x.safetensors.index.json"), "x.safetensors"
)

# The shards.
G = "shards"


def notes(what: str, change: Callable[[Any], Any]) -> None:
    row(G, what, lambda m: put_notes(m.shard_of("lm_head.weight"), change), "__metadata__")


notes("a note added", lambda d: {**d, "more": "1"})
notes("a note changed", lambda d: {**d, "format": "tf"})
notes("a note lost", lambda d: {key: value for key, value in d.items() if key != "made_by"})
notes("no notes", lambda _: None)
notes("empty notes", lambda _: {})


def swap_experts(made: Broken) -> None:
    layer = min(made.names)
    tensors = {name: t for file in made.folder.glob("*.safetensors") for name, t in read_safetensors(file).items()}
    pairs = [
        (n, n.replace("experts.0.", "experts.1.")) for n in tensors if f"layers.{layer}." in n and "experts.0." in n
    ]
    made.require(pairs)
    for one, two in pairs:
        for name, other in ((one, two), (two, one)):
            made.tensors(name, lambda found, name=name, other=other: found.update({name: tensors[other]}))


def fused_name(made: Broken) -> str:
    for file in sorted(made.folder.glob("*.safetensors")):
        for name, tensor in read_safetensors(file).items():
            if "experts.down_proj" in name and len(tensor.shape) > 1:
                return name
    raise NotApplicableError


def swap_fused_rows(made: Broken) -> None:
    name = fused_name(made)

    def change(found: dict[str, Tensor]) -> None:
        tensor = found[name]
        length = len(tensor.data) // tensor.shape[0]
        data = tensor.data[length : 2 * length] + tensor.data[:length] + tensor.data[2 * length :]
        found[name] = Tensor(tensor.dtype, tensor.shape, data)

    made.tensors(name, change)


def fewer_rows(made: Broken) -> None:
    name = fused_name(made)

    def change(found: dict[str, Tensor]) -> None:
        tensor = found[name]
        length = len(tensor.data) // tensor.shape[0]
        found[name] = Tensor(tensor.dtype, (tensor.shape[0] - 1, *tensor.shape[1:]), tensor.data[:-length])

    made.tensors(name, change)


def change_head(change: Callable[[Tensor], Tensor]) -> Callable[[Broken], None]:
    return lambda m: m.tensors("lm_head.weight", lambda d: d.update({"lm_head.weight": change(d["lm_head.weight"])}))


def lose(made: Broken, name: str) -> None:
    made.tensors(name, lambda d: d.__delitem__(name))
    made.listed(lambda d: d.__delitem__(name))


def expert_tensor(made: Broken, suffix: str = "") -> str:
    for file in sorted(made.folder.glob("*.safetensors")):
        for name in read_safetensors(file):
            if "experts.3." in name and name.endswith(suffix) and "mtp" not in name:
                return name
    raise NotApplicableError


def retyped(made: Broken) -> None:
    name = expert_tensor(made)

    def change(found: dict[str, Tensor]) -> None:
        tensor = found[name]
        found[name] = Tensor(
            {"BF16": "F16", "F16": "BF16", "I32": "F32", "F32": "I32", "I8": "U8", "U8": "I8", "F8_E4M3": "U8"}[
                tensor.dtype
            ],
            tensor.shape,
            tensor.data,
        )

    made.tensors(name, change)


def stale_twin(made: Broken) -> None:
    others = [f for f in sorted(made.folder.glob("*.safetensors")) if "lm_head.weight" not in read_safetensors(f)]
    made.require(others)
    made.tensors(
        next(iter(read_safetensors(others[0]))), lambda d: d.update({"lm_head.weight": Tensor("BF16", (1,), b"ab")})
    )


def extra_tensor(made: Broken) -> None:
    name = "model.layers.1.mlp.experts.99.up_proj.weight"
    file = made.shard_of("lm_head.weight").name
    made.tensors("lm_head.weight", lambda d: d.update({name: Tensor("BF16", (1,), b"ab")}))
    made.listed(lambda d: d.update({name: file}))


row(G, "two experts exchanged", swap_experts, "experts.0.")
row(G, "two rows of a fused tensor exchanged", swap_fused_rows, "experts.down_proj")
row(G, "a row of a fused tensor lost", fewer_rows, "experts.down_proj")
row(
    G,
    "one bit",
    change_head(lambda t: Tensor(t.dtype, t.shape, t.data[:-1] + bytes([t.data[-1] ^ 1]))),
    "lm_head.weight",
)
row(G, "another dtype of the same size", change_head(lambda t: Tensor("F16", t.shape, t.data)), "lm_head.weight")
row(
    G, "another shape of the same size", change_head(lambda t: Tensor(t.dtype, t.shape[::-1], t.data)), "lm_head.weight"
)
row(G, "an expert's tensor of another dtype", retyped, "experts.3.")
row(G, "a tensor lost", lambda m: lose(m, "lm_head.weight"), "lm_head.weight is missing")
row(G, "an expert's tensor lost", lambda m: lose(m, expert_tensor(m)), "is missing")
row(G, "an expert's scale lost", lambda m: lose(m, expert_tensor(m, "_scale_inv")), "expert 3: lacks")
row(G, "a tensor added", extra_tensor, "experts.99.up_proj.weight")
row(G, "a stale tensor in a second shard", stale_twin, "lm_head.weight")
row(
    G,
    "a shard cut short",
    lambda m: os.truncate(m.shard_of("lm_head.weight"), m.shard_of("lm_head.weight").stat().st_size - 8),
    ".safetensors",
)
row(G, "bytes after the data", lambda m: m.shard_of("lm_head.weight").open("ab").write(b"\0" * 8), ".safetensors")
row(G, "a shard missing", lambda m: m.shard_of("lm_head.weight").unlink(), "safetensors")
row(
    G,
    "a shard that holds nothing",
    lambda m: m.add("model-z.safetensors", (2).to_bytes(8, "little") + b"{}"),
    "model-z.safetensors",
)


def another_ranks_file(made: Broken) -> None:
    made.require(made.layout == "physical")
    files = sorted(made.folder.glob("model-ep*.safetensors"))
    made.require(len(files) > 1)
    name = next(iter(read_safetensors(files[0])))
    tensor = read_safetensors(files[0])[name]
    made.tensors(name, lambda d: d.__delitem__(name))
    made.tensors(next(iter(read_safetensors(files[1]))), lambda d: d.update({name: tensor}))
    made.listed(lambda d: d.update({name: files[1].name}))


row(G, "an expert in another rank's file", another_ranks_file, "model-ep")


def shared_in_a_ranks_file(made: Broken) -> None:
    made.require(made.layout == "physical")
    name, files = "lm_head.weight", sorted(made.folder.glob("model-ep*.safetensors"))
    made.require(files)
    tensor = read_safetensors(made.shard_of(name))[name]
    lose(made, name)
    made.tensors(next(iter(read_safetensors(files[0]))), lambda d: d.update({name: tensor}))
    made.listed(lambda d: d.update({name: files[0].name}))


row(G, "a shared tensor in a rank's file", shared_in_a_ranks_file, "model-shared-")

# Files that do not belong there.
G = "files added"
for name in [
    "modeling_other.py",
    "configuration_other.py",
    "tokenization_other.py",
    "__init__.py",
    "sub/modeling_other.py",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "generation_config.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "preprocessor_config.json",
    "chat_template.json",
    "quantize_config.json",
    "compression_config.json",
    "params.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "more.safetensors",
    "sub/model.safetensors",
    "original/params.json",
    "original/consolidated.safetensors",
    "model.safetensors.part",
    "tokenizer.json.part",
    "eplb_journal.jsonl",
    "eplb_lock",
    "config.json.bak",
    "sub/config.json",
    ".cache/other",
    ".cache/huggingface.json",
    ".hidden",
    "sub/README.md",
    "readme.md",
]:
    row(G, name, lambda m, name=name: m.add(name), name)
row(G, "a name that is not UTF-8", lambda m: m.add(os.fsdecode(b"na\xffme.json")), "me.json")

G = "side files"
for name in [
    "tokenizer.json",
    "LICENSE",
    "chat_template.jinja",
    "tokenizer_config.json",
    "sub/notes.json",
    "modeling_rich.py",
    "recipe.yaml",
    "hf_quant_config.json",
    "broken.json",
]:
    row(G, f"{name} missing", lambda m, name=name: (m.folder / name).unlink(), name)
    row(G, f"{name} with a line more", lambda m, name=name: (m.folder / name).open("ab").write(b"\nx\n"), name)
row(
    G,
    "tokenizer_config.json laid out anew",
    lambda m: (m.folder / "tokenizer_config.json").write_text(
        json.dumps(json.loads((m.folder / "tokenizer_config.json").read_text()), indent=1)
    ),
    "tokenizer_config.json",
)
row(G, "a script one byte longer", lambda m: (m.folder / "modeling_rich.py").open("ab").write(b" "), "modeling_rich.py")
row(G, "a template in other case", lambda m: m.text("chat_template.jinja", "user", "User"), "chat_template.jinja")

G = "no regular files"


def replaced(name: str, make: Callable[[Broken, Path], Any]) -> Callable[[Broken], None]:
    def change(made: Broken) -> None:
        file = made.folder / name
        if file.exists():
            file.unlink()
        make(made, file)

    return change


def bound(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(file.name)
    finally:
        os.chdir(here)


for name in ("LICENSE", "config.json", PLAN, PROVENANCE, "recipe.yaml", "more.json"):
    row(G, f"a named pipe as {name}", replaced(name, lambda m, f: os.mkfifo(f)), name)
    row(G, f"a link out of the folder as {name}", replaced(name, lambda m, f: f.symlink_to(m.source / "LICENSE")), name)
row(
    G,
    "a named pipe as a shard",
    lambda m: replaced(m.shard_of("lm_head.weight").name, lambda m, f: os.mkfifo(f))(m),
    ".safetensors",
)
row(
    G,
    "a link to the same bytes outside",
    replaced("LICENSE", lambda m, f: f.symlink_to(m.source / "LICENSE") or None),
    "LICENSE",
)
row(G, "a link to a device", replaced("LICENSE", lambda m, f: f.symlink_to("/dev/zero")), "LICENSE")
row(G, "a link to nothing", replaced("LICENSE", lambda m, f: f.symlink_to("nothing")), "LICENSE")
row(G, "a link to itself", replaced("LICENSE", lambda m, f: f.symlink_to("LICENSE")), "LICENSE")
row(G, "a link to a folder", replaced("more", lambda m, f: f.symlink_to(m.source)), "more")
row(G, "a link to the folder itself", replaced("more", lambda m, f: f.symlink_to(".")), "more")
row(G, "a folder as a file", replaced("LICENSE", lambda m, f: f.mkdir()), "LICENSE")
row(G, "a socket", replaced("LICENSE", lambda m, f: bound(f)), "LICENSE")

G = "config.json as a file"
for what, content in [
    ("nested 20,000 deep", "[" * 20_000 + "]" * 20_000),
    ("no JSON", "{"),
    ("empty", ""),
    ("a list", "[]"),
]:
    row(G, what, lambda m, content=content: (m.folder / "config.json").write_text(content), "config.json")
row(G, "no text", lambda m: (m.folder / "config.json").write_bytes(b"\xff{}"), "config.json")
row(G, "missing", lambda m: (m.folder / "config.json").unlink(), "config.json")
row(G, "a key twice, alike", lambda m: m.text("config.json", '"width": 32', '"width": 32, "width": 32'), "width")
row(
    G,
    "a key twice, the right one last",
    lambda m: m.text("config.json", '"width": 32', '"width": 64, "width": 32'),
    "width",
)
row(
    G,
    "a number of 5,000 digits",
    lambda m: m.text("config.json", '"width": 32', f'"width": {"3" * 5000}'),
    "config.json",
)
row(G, "a lone surrogate", lambda m: m.text("config.json", '"width": 32', '"width": "\\ud800"'), "config.json")
row(G, "NaN for a number", lambda m: m.text("config.json", '"width": 32', '"width": NaN'), "width")

# What no reader can notice.
G = "no difference"


def reordered(made: Broken, name: str) -> None:
    def sorted_anew(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sorted_anew(value[key]) for key in sorted(value, reverse=True)}
        return [sorted_anew(item) for item in value] if isinstance(value, list) else value

    file = made.folder / name
    made.require(file.exists())
    file.write_text(json.dumps(sorted_anew(json.loads(file.read_text())), indent=7))


for name in ("config.json", PLAN, PROVENANCE, INDEX, "hf_quant_config.json"):
    row(G, f"keys in another order and other spaces in {name}", lambda m, name=name: reordered(m, name), None)


def tensor_order(made: Broken) -> None:
    file = made.shard_of("lm_head.weight")
    kept = header(file)[0].get("__metadata__")
    tensors = read_safetensors(file)
    write_safetensors(file, dict(reversed(tensors.items())), padding=512)
    put_notes(file, lambda _: kept)


def moved_tensor(made: Broken) -> None:
    made.require(made.layout == "stock")
    name = "lm_head.weight"
    files = sorted(made.folder.glob("*.safetensors"))
    tensor = read_safetensors(made.shard_of(name))[name]
    other = next(file for file in files if file != made.shard_of(name))
    lose(made, name)
    made.tensors(next(iter(read_safetensors(other))), lambda d: d.update({name: tensor}))
    made.listed(lambda d: d.update({name: other.name}))


def hub_links(made: Broken) -> None:
    """The folder as the Hub's cache lays it out: links to blobs beside the snapshots."""
    home = made.folder.parent / "hub"
    snapshot = home / "snapshots" / "0123abcd"
    blobs = home / "blobs"
    blobs.mkdir(parents=True)
    for index, file in enumerate(sorted(made.folder.rglob("*"))):
        if file.is_file():
            link = snapshot / file.relative_to(made.folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            file.rename(blobs / str(index))
            link.symlink_to(os.path.relpath(blobs / str(index), link.parent))
    made.folder = snapshot


row(G, "nothing changed", lambda m: None, None)
row(G, "tensors of a shard in another order, more padding", tensor_order, None)
row(G, "a tensor in another shard, with the index (stock)", moved_tensor, None)
row(G, "file modes", lambda m: (m.folder / "LICENSE").chmod(0o600), None)
row(G, "an empty folder", lambda m: (m.folder / "empty" / "deep").mkdir(parents=True), None)
row(
    G,
    "a side file that is a link within the folder",
    replaced(
        "LICENSE",
        lambda m, f: (
            (m.folder / "sub" / "notes.json").exists() and shutil.copy(m.source / "LICENSE", m.folder / "README.md"),
            f.symlink_to("README.md"),
        ),
    ),
    None,
)
row(G, "the Hub's .cache/huggingface", lambda m: m.add(".cache/huggingface/download/config.json.metadata", b"x"), None)
row(G, "the Hub's .gitattributes", lambda m: m.add(".gitattributes", b"*.safetensors filter=lfs"), None)
row(G, "the Hub's README.md", lambda m: m.add("README.md", b"# model"), None)
row(G, "a clone's .git", lambda m: m.add(".git/config", b"[core]"), None)
row(G, "a snapshot of links in the Hub's cache", hub_links, None)
row(
    G,
    "another folder name and tool version in the provenance",
    lambda m: m.json(PROVENANCE, lambda d: (put(d, "tool_version", "9.9"), put(d, "source.folder", "elsewhere"))),
    None,
)


def as_markdown() -> str:
    """The table as docs/proofs.md has it."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for mutant in MUTANTS:
        groups.setdefault((mutant.group, mutant.said is None), []).append(mutant.name)
    parts = [
        f"**{group[0].upper() + group[1:] if ' ' in group else group}** ({len(names)}, "
        f"{'all accepted' if accepted else 'all refused'}): {'; '.join(names)}."
        for (group, accepted), names in groups.items()
    ]
    return "\n\n".join(
        textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) for part in parts
    ).replace("__init__.py", "`__init__.py`")


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "proofs.md"
    before, _, rest = page.read_text().partition("<!-- mutants -->\n")
    page.write_text(f"{before}<!-- mutants -->\n{as_markdown()}\n{rest[rest.index('<!-- end of mutants -->') :]}")
