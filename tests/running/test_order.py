"""Which cells begin first."""

from __future__ import annotations

from small_recipe import DEMO, small_recipe

from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.running.order import in_order

GPTQ = {"name": "gptq-4bit", "group_size": 64, "backend": "torch"}


def test_who_waits_for_anothers_calibration_begins_last(tmp_path):
    recipe = small_recipe(
        tmp_path,
        quantizers=[
            "fp32",
            {"activations": "int8-token", "label": "a8"},
            {"weights": GPTQ, "activations": "int8-static", "label": "w4a8-static"},
            GPTQ,
            {"weights": GPTQ, "activations": "int4-token", "label": "w4a4"},
            {"activations": "int8-tensor", "label": "a8-tensor"},
        ],
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 64},
    )
    cells = plan(Recipe.load(recipe), device="cpu").cells
    found = [cell.name for cell in in_order(cells)]
    both = ("softmax", "softpick")
    assert found == [
        f"{checkpoint}/{label}"
        for labels in (("fp32",), ("w4a8-static",), ("a8", "a8-tensor"), ("gptq-4bit", "w4a4"))
        for checkpoint in both
        for label in labels
    ]
