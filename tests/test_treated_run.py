"""Treated outliers and W8A8 cells through a whole run: planned, audited, scored, recorded."""

import pytest
from small_recipe import DEMO, qbench, small_recipe

from qbench.store import Store

COLUMNS = {
    "static": {"name": "w8a8-int8-static", "outliers": "smoothquant"},
    "w4a8kv4": {
        "weights": {"name": "gptq-4bit", "group_size": 64},
        "activations": "int8-token",
        "kv": "int4-token",
        "outliers": {"name": "rotation", "queries_keys": True},
    },
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("treated")
    return small_recipe(
        folder,
        checkpoints={"softpick": str(DEMO / "softpick")},
        quantizers=["fp32", *({**entry, "label": label} for label, entry in COLUMNS.items())],
        tasks=["demo_choice"],
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 4, "length": 64},
    )


@pytest.fixture(scope="module")
def records(recipe):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBENCH_CACHE", str(recipe.parent / "cache"))
        assert qbench("run", recipe, "--out", recipe.parent / "out", "--device", "cpu") == 0
    return {record.cell: record for record in Store(recipe.parent / "out").records()}


@pytest.mark.parametrize("label", COLUMNS)
def test_every_cell_covers_its_weights_and_has_damage(records, label):
    record = records[f"softpick/{label}"]
    assert record.audit.passed
    assert record.audit.coverage >= 0.99
    assert record.damage.tasks["demo_choice"].distributions.kl.mean > 0
    assert record.audit.treatment_error < 1e-5
