"""Copies that a library makes for a cell."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from small_recipe import DEMO, qbench, small_recipe

from qbench import made_copy
from qbench.errors import QuantizationError, RecipeError
from qbench.plan import plan
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.registry import settings_of
from qbench.recipe import Recipe
from qbench.store import Store

CALIBRATION = {"path": str(DEMO / "calibration.jsonl"), "samples": 16, "length": 64}


def recipe_of(folder, *quantizers, checkpoint="softmax"):
    return small_recipe(folder, checkpoints={"base": str(DEMO / checkpoint)},
                        quantizers=["fp32", *quantizers], tasks=["demo_pages"],
                        calibration=CALIBRATION)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_gptaq_copy_is_made_once_audited_and_nearer_than_two_bits(tmp_path):
    recipe = recipe_of(tmp_path, "gptaq-4bit", "rtn-2bit")
    for out in ("first", "again"):
        assert qbench("run", recipe, "--out", tmp_path / out, "--device", "cpu", "--force") == 0
    records = {record.quantizer: record for record in Store(tmp_path / "again").records()}
    made, rounded = records["gptaq-4bit"], records["rtn-2bit"]
    assert made.audit.passed
    assert made.method == "gptaq"
    assert made.stages[0].detail == "made by gptqmodel, from the cache"
    assert 4 < made.audit.size.bits_per_weight < 4.5
    kl = [record.damage.tasks["demo_pages"].distributions.kl.mean for record in (made, rounded)]
    assert 0 < kl[0] < kl[1] / 4


@pytest.mark.parametrize(
    ("quantizer", "checkpoint", "words"),
    [
        ("exl3-4bit", "softmax", "exl3-4bit: gptqmodel makes it on a GPU only"),
        ("awq-4bit", "softpick", "would calibrate it with softmax, and .* was trained with softp"),
        ("autoround-4bit", "softmax", r"it needs auto_round: pip install -e '\.\[autoround\]'"),
        ("awq-4bit:group_size=96", "softmax", "group_size 96 does not divide the inputs of"),
    ],
)
def test_what_no_library_can_make_is_refused_when_planned(
    quantizer, checkpoint, words, tmp_path, monkeypatch
):
    spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "auto_round" else spec(name)
    )
    recipe = recipe_of(tmp_path, quantizer, checkpoint=checkpoint)
    with pytest.raises(RecipeError, match=words):
        plan(Recipe.load(recipe), device="cpu")


def test_a_library_that_fails_is_said_in_a_line_with_its_log(tmp_path):
    cell = SimpleNamespace(checkpoint=SimpleNamespace(folder=tmp_path / "gone"))
    calibration, log = Calibration(ids=torch.zeros(1, 8, dtype=torch.int64)), tmp_path / "made.log"
    maker = settings_of("awq-4bit", {"group_size": 64})
    with pytest.raises(QuantizationError, match=rf"awq-4bit: gptqmodel failed: .*; its log: {log}"):
        made_copy._make(cell, maker, calibration, tmp_path / "out", "cpu", log)
    assert "no such folder" in log.read_text()
