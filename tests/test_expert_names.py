"""Which side files name experts, and that what a conversion prepares is what its proof wants."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_cli.checkpoint.expert_names import MOST_SEARCHED_BYTES, may_name_experts, renamed_side_file
from eplb_cli.checkpoint.source import Checkpoint
from eplb_cli.checkpoint.verify_files import side_file_problems
from eplb_cli.checkpoint.verify_names import ExpertNames
from eplb_cli.errors import CheckpointError
from tests.checkpoints import FORMS, E, random_rows, scattered_rows

ROWS = {"stock": random_rows([1, 3], 4, seed=3), "physical": scattered_rows([1, 3], 4, seed=3)}


@dataclass
class Side:
    """A model whose side file is renamed and proven, without its weights."""

    source: Checkpoint
    folder: Path

    def prepare(self, name: str, content: bytes, layout: str) -> bytes | None:
        """What a conversion would write; None for the file as it is."""
        if not may_name_experts(name, len(content)):
            return None
        rows = ROWS[layout]
        used = E if layout == "stock" else E + 4
        slots = {layer: {e: [s for s in range(used) if row[s] == e] for e in range(E)} for layer, row in rows.items()}
        return renamed_side_file(self.source.config, name, content, slots)

    def problems(self, name: str, before: bytes, after: bytes, layout: str) -> list[str]:
        used = E if layout == "stock" else E + 4
        names = ExpertNames(
            {layer: row[:used] for layer, row in ROWS[layout].items()}, self.source.config.family.drafts
        )
        for folder, content in ((self.folder / "a", before), (self.folder / "b", after)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        one, two = (replace(self.source, folder=self.folder / side) for side in ("a", "b"))
        return list(side_file_problems(one, two, names, name))


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    folder = tmp_path_factory.mktemp("side")
    # MoE in layers 1 and 3 of 4, and a draft head `mtp` with experts.
    return Side(Checkpoint.open(FORMS["qwen3_next"]().save(folder / "model")), folder)


ids = st.sampled_from(["0", "1", "5", "7", "8", "11", "03", "99", "123456789012", "٣", "*", "[0-3]", "\\d+", "(1|2)"])
dots = st.sampled_from([".", ".", ".", "\\.", "", ".."])
prefixes = ["model.", "", "language_model.model.", "mtp.", "mtp.x.", "re:.*", "re:model.", "xmtp.", "é.", "a b.", "-:"]
modules = ["mlp.", "mlp.", "", "ffn.", "mlp.experts.1.", "mlp.shared_"]
projections = ["", "", "gate_proj.", "w1.", "Gate.", "1."]
tails = ["", ".up_proj", ".up_proj.weight", ".*", "$", ":", ".layers.1.mlp.experts.3", "|lm_head", " x", ".0"]
full_names = st.builds(
    "{}layers{}{}.{}experts{}{}{}{}".format,
    st.sampled_from(prefixes),
    dots,
    st.sampled_from(["1", "3", "0", "2", "9", "01"]),
    st.sampled_from(modules),
    dots,
    st.sampled_from(projections),
    ids,
    st.sampled_from(tails),
)
right_names = st.builds(
    "model.layers.{}.mlp.experts.{}{}".format,
    st.sampled_from([1, 3]),
    st.integers(0, E - 1),
    st.sampled_from(["", ".up_proj", ".up_proj.*"]),
)
loose = st.lists(
    st.sampled_from(
        ["experts", "layers", ".", "\\.", "1", "3", "mlp", "mtp", "re:", "[0-3]", "*", " ", "|", "(", "model"]
    ),
    max_size=9,
).map("".join)
texts = st.one_of(right_names, right_names, full_names, loose, st.text(max_size=5))
values = st.recursive(
    st.one_of(texts, st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**40)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


def hidden(text: str) -> str:
    """Names of experts behind JSON's escapes."""
    return text.replace("experts", "\\u0065xperts")


contents = st.one_of(
    values.map(lambda value: json.dumps(value)),
    values.map(lambda value: json.dumps(value, ensure_ascii=False)),
    values.map(lambda value: hidden(json.dumps(value))),
    values.map(lambda value: json.dumps(value) + "]"),
    st.lists(st.one_of(texts, texts.map(repr), texts.map("{}: 1".format), texts.map("- {} # it".format))).map(
        "\n".join
    ),
).map(lambda text: text.encode(errors="surrogatepass"))
names = st.sampled_from(
    [
        "hf_quant_config.json",
        "recipe.yaml",
        "x.yml",
        "sub/x.json",
        "tokenizer_config.json",
        "vocab.yaml",
        "x.txt",
        "x.JSON",
    ]
)


@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names, content=contents, layout=st.sampled_from(["stock", "physical"]))
def test_what_a_conversion_accepts_its_proof_accepts(side: Side, name: str, content: bytes, layout: str) -> None:
    try:
        after = side.prepare(name, content, layout)
    except CheckpointError as error:
        assert error.file is not None
        assert error.file.endswith(f"/{name}")
        return
    assert side.problems(name, content, content if after is None else after, layout) == []
    if after is not None:
        # What had to change is missed where it did not.
        assert side.problems(name, content, content, layout) != []


@pytest.mark.parametrize(
    "text",
    [
        "re:.*mlp\\.experts\\.3\\..*",
        "re:.*mlp.experts.[0-3].*",
        "re:.*experts\\.(1|2)\\.",
        "re:.*experts\\.\\d\\.",
        "re:.*experts\\.(?!7\\.).*",
        "re:.*experts.*5$",
        "re:.*experts.*|re:.*experts.[13].*",
        "re:model.layers.1.mlp.experts.3",
        "*.experts.3.*",
        "model.layers.1.mlp.experts.03",
        "model.layers.1.mlp.experts.8",
        "model.layers.1.ffn.experts.3",
        "model.layers.1.mlp.experts.3.layers.1.mlp.experts.2",
        "layers experts.3",
        "mtp.layers.0.mlp.experts.1|model.layers.1.mlp.experts.1",
    ],
)
def test_what_singles_out_experts_and_cannot_follow_is_refused(side: Side, text: str) -> None:
    for name, content in (
        ("x.json", json.dumps([text])),
        ("x.json", json.dumps({text: 1})),
        ("x.yaml", f"a: '{text}'"),
    ):
        if name == "x.yaml" and " " in text:
            continue
        with pytest.raises(CheckpointError) as caught:
            side.prepare(name, content.encode(), "stock")
        assert str(caught.value.file).endswith(f"/{name}")
    # Files that name no experts by rule may hold anything.
    assert side.prepare("sub/x.json", json.dumps([text]).encode(), "stock") is None
    assert side.prepare("tokenizer_config.json", json.dumps([text]).encode(), "stock") is None


@pytest.mark.parametrize(
    "text",
    [
        "re:.*mlp.experts.*",
        "re:.*mlp\\.experts\\.\\d+\\.gate_proj",
        "re:.*experts\\.[0-9]+\\.w1$",
        "re:.*mlp.experts.*|model.layers.45.eh_proj",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.3.w1",
        "model.layers.1.mlp.shared_experts.0.w1",
        "mtp.layers.1.mlp.experts.3",
        "mtp.0.mlp.experts.3",
        "128 experts with top-8 routing",
        "https://example.org/experts",
    ],
)
def test_what_names_no_single_expert_of_the_plan_stays(side: Side, text: str) -> None:
    for name, content in (("x.json", json.dumps([text])), ("x.yaml", f"a: {text}")):
        assert side.prepare(name, content.encode(), "physical") is None


def test_a_list_and_an_object_grow_with_the_copies_in_order(side: Side) -> None:
    row = ROWS["physical"][3]
    twice = next(expert for expert in range(E) if row.count(expert) == 2)
    first, second = (slot for slot in range(E + 4) if row[slot] == twice)
    name = "model.layers.3.mlp.experts.{}.up_proj"
    before = {"a": [name.format(twice), "x", "x"], "b": {name.format(twice): [1]}}
    after = side.prepare("x.json", json.dumps(before).encode(), "physical")
    assert after is not None
    assert json.loads(after) == {
        "a": [name.format(first), name.format(second), "x", "x"],
        "b": {name.format(first): [1], name.format(second): [1]},
    }
    for single in ({"a": name.format(twice)}, [[{"a": name.format(twice)}]]):
        with pytest.raises(CheckpointError, match="cannot be expanded"):
            side.prepare("x.json", json.dumps(single).encode(), "physical")
    with pytest.raises(CheckpointError, match="cannot be expanded"):
        side.prepare("x.yaml", name.format(twice).encode(), "physical")


def test_a_key_of_yaml_follows_and_keeps_its_colon(side: Side) -> None:
    row = ROWS["stock"][1]
    expert = next(expert for expert in range(E) if row.index(expert) != expert)
    after = side.prepare("x.yaml", f"model.layers.1.mlp.experts.{expert}: [1]\n".encode(), "stock")
    assert after == f"model.layers.1.mlp.experts.{row.index(expert)}: [1]\n".encode()


def test_json_that_no_reader_takes_is_copied_unless_it_names_experts(side: Side) -> None:
    assert side.prepare("x.json", b"{'experts': 1}", "stock") is None
    with pytest.raises(CheckpointError, match="is not JSON") as caught:
        side.prepare("x.json", b'{"model.layers.1.mlp.experts.3": 1,}', "stock")
    assert "it names experts, which must follow the plan" in str(caught.value)


def test_a_text_that_names_one_of_two_copies_is_none_of_the_source(side: Side) -> None:
    """No conversion writes it; a hand may have."""
    row = ROWS["physical"][3]
    twice = next(expert for expert in range(E) if row.count(expert) == 2)
    lone = next(expert for expert in range(E) if row.count(expert) == 1)
    name = "- model.layers.3.mlp.experts.{}.up_proj"
    for expert, right in ((twice, False), (lone, True)):
        before, after = (name.format(index) for index in (expert, row.index(expert)))
        assert (side.problems("x.yaml", before.encode(), after.encode(), "physical") == []) is right
        values = (json.dumps({"a": text.removeprefix("- ")}).encode() for text in (before, after))
        assert (side.problems("x.json", *values, "physical") == []) is right


@pytest.mark.parametrize(
    ("name", "size", "searched"),
    [
        ("hf_quant_config.json", 10, True),
        ("recipe.yaml", MOST_SEARCHED_BYTES, True),
        ("x.yml", 0, True),
        ("recipe.yaml", MOST_SEARCHED_BYTES + 1, False),
        ("sub/x.json", 10, False),
        ("tokenizer.json", 10, False),
        ("tokenizer_config.json", 10, False),
        ("vocab.json", 10, False),
        ("x.txt", 10, False),
        ("x.json.bak", 10, False),
    ],
)
def test_the_files_that_are_searched(name: str, size: int, searched: bool) -> None:
    assert may_name_experts(name, size) is searched


@pytest.mark.parametrize(
    "text",
    [
        "experts." * 20_000,
        "layers.1." * 20_000 + "mlp.experts.3",
        "experts.a" + "a" * 200_000,
        "experts.(" * 20_000,
        "." * 200_000 + "experts.3",
        "[" * 100_000 + "experts.3",
        "experts.*|" * 20_000,
        "mtp." * 50_000 + "experts.1",
        "experts...." * 20_000,
    ],
    ids=lambda text: text[:12],
)
def test_long_names_take_no_longer_than_their_length(side: Side, text: str) -> None:
    """A search that goes back to the start of the text at every word would not end here."""
    for name, content in (("x.json", json.dumps([text])), ("x.yaml", text), ("x.json", text)):
        try:
            after = side.prepare(name, content.encode(), "stock")
        except CheckpointError as error:
            assert len(str(error)) < 1000
            continue
        assert side.problems(name, content.encode(), content.encode() if after is None else after, "stock") == []
