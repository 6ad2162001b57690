"""`physical` checkpoints in the plugin: what config.json counts as slots is the number of experts again, by any key."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eplb_cli.errors import PlacementError
from eplb_cli.placement import Placement
from eplb_cli.vllm_plugin.loading import _restore_expert_count
from tests.checkpoints import FORMS, E, qwen3_moe

SLOTS = E + 4
PLACEMENT = Placement(np.array([[*range(E), 3, 1, 6, 2]], np.int32), np.array([1], np.int32), E, 4)


def physical(folder: Path, config: dict[str, Any], *, key: str | None = None) -> None:
    """config.json as convert writes it: the expert count is that of the slots."""
    section = config.get("text_config", config)
    found = next(name for name in ("n_routed_experts", "num_experts", "num_local_experts") if name in section)
    changed = {**{name: value for name, value in section.items() if name != found}, key or found: SLOTS}
    record = {"layout": "physical", "num_logical_experts": E}
    whole = {**config, "text_config": changed} if "text_config" in config else changed
    (folder / "config.json").write_text(json.dumps({**whole, "eplb_placement": record}))


def read_by_engine(folder: Path, config_of: Any) -> Any:
    """What the engine reads with the plugin in place; `config_of` is its own reader."""
    module = ModuleType("engine")
    vars(module)["get_config"] = config_of
    _restore_expert_count(folder.resolve(), PLACEMENT, module)
    return module.get_config(str(folder))  # type: ignore[attr-defined]


def plain(folder: str) -> Any:
    """An engine's config class that knows the file's own keys alone."""
    document = json.loads((Path(folder) / "config.json").read_text())
    nested = document.pop("text_config", None)
    return SimpleNamespace(**document, text_config=None if nested is None else SimpleNamespace(**nested))


@pytest.mark.parametrize("form", FORMS)
def test_every_familys_own_key_is_known(tmp_path: Path, form: str) -> None:
    physical(tmp_path, FORMS[form]().config)
    config = read_by_engine(tmp_path, plain)
    section = vars(config.text_config or config)
    assert [value for key, value in section.items() if key.endswith("experts") and value in (E, SLOTS)] == [E]


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v4", "qwen3_moe", "mixtral", "glm4_moe", "olmoe"])
def test_second_names_in_config_classes_follow(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    form = kind if kind in FORMS else "qwen3_moe-bf16"
    physical(tmp_path, {**FORMS[form]().config, "model_type": kind})
    config = read_by_engine(tmp_path, transformers.AutoConfig.from_pretrained)
    counts = [getattr(config, key, None) for key in ("n_routed_experts", "num_experts", "num_local_experts")]
    assert {count for count in counts if count is not None} == {E}


def test_each_count_of_slots_follows_and_another_number_stays(tmp_path: Path) -> None:
    """A config class may keep copies of the count that no alias ties to the first."""
    physical(tmp_path, FORMS["deepseek_v3"]().config)
    read = SimpleNamespace(n_routed_experts=SLOTS, num_local_experts=SLOTS - 1, num_experts=SLOTS)
    config = read_by_engine(tmp_path, lambda folder: read if folder else None)
    assert (config.n_routed_experts, config.num_local_experts, config.num_experts) == (E, SLOTS - 1, E)


def test_other_models_are_left_alone_and_an_unknown_count_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    physical(tmp_path, qwen3_moe().config)
    module = ModuleType("engine")
    vars(module)["get_config"] = lambda folder: SimpleNamespace(num_experts=SLOTS if folder else None)
    _restore_expert_count(tmp_path.resolve(), PLACEMENT, module)
    assert module.get_config(str(tmp_path / "other")).num_experts == SLOTS  # type: ignore[attr-defined]
    vars(module)["get_config"] = lambda folder: SimpleNamespace(moe_num_experts=SLOTS if folder else None)
    _restore_expert_count(tmp_path.resolve(), PLACEMENT, module)
    with pytest.raises(PlacementError, match="no expert count of 12"):
        module.get_config(str(tmp_path))  # type: ignore[attr-defined]
