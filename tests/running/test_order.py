"""Which cells begin first."""

from __future__ import annotations

from small_recipe import DEMO, small_recipe

from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.running.order import in_order

GPTQ = {"name": "gptq-4bit", "group_size": 64}


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


def test_calibrated_cells_begin_beside_the_unquantized_and_exact_scoring_after_them(tmp_path):
    """Exact scoring would wait for the unquantized cells' rows with nothing to do."""
    recipe = small_recipe(
        tmp_path,
        quantizers=["bf16", "bnb-4bit", "bnb-8bit", GPTQ, {**GPTQ, "name": "gptq-3bit"}],
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 64},
        compute_dtype="bfloat16",
    )
    cells = plan(Recipe.load(recipe), device="cuda", gpu="a GPU").cells
    exact = {cell.name for cell in cells if cell.scoring.mode == "exact"}
    assert exact == {"softmax/bnb-8bit", "softpick/bnb-8bit"}
    found = [cell.name for cell in in_order(cells)]
    assert found == [
        *("softmax/bf16", "softpick/bf16"),
        *("softmax/gptq-4bit", "softmax/gptq-3bit"),
        *("softmax/bnb-8bit", "softpick/bnb-8bit"),
        *("softpick/gptq-4bit", "softpick/gptq-3bit"),
        *("softmax/bnb-4bit", "softpick/bnb-4bit"),
    ]
