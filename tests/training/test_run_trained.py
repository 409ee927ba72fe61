"""From text to a table over seeds: what `qbench train` writes, `qbench run` takes as it is."""

from __future__ import annotations

from small_recipe import qbench, small_recipe

from qbench.comparison.compare import compare
from qbench.store import Store


def test_trained_seeds_are_run_and_told_of_as_replicates(tmp_path, train, capfd, own_cache):
    shape = {"hidden": 32, "layers": 1, "context": 64}
    train(
        tmp_path / "trained", seeds=[1, 2], model=shape, tokens=1280,
        batch={"tokens": 128, "sequences": 2},
    )  # fmt: skip
    recipe = small_recipe(
        tmp_path,
        checkpoints={name: f"trained/{name}-seed*" for name in ("softmax", "softpick")},
        quantizers=["fp32", {"name": "rtn-4bit", "group_size": 32}],
        tasks=["demo_lastword"],
        evaluation={"limit": 8, "damage": False},
    )
    assert qbench("run", recipe, "--out", tmp_path / "out", "--device", "cpu") == 0
    shown = capfd.readouterr().out
    assert "over seeds (2 of softmax, 2 of softpick): Δ = softpick − softmax" in shown
    assert "trained differently" not in shown
    found = compare(Store(tmp_path / "out"))
    assert found.grid.replicates == {
        "softmax": ("softmax.1", "softmax.2"), "softpick": ("softpick.1", "softpick.2"),
    }  # fmt: skip
    seeds = {record.checkpoint: record.training.seed for record in found.records.values()}
    assert seeds == {"softmax.1": 1, "softmax.2": 2, "softpick.1": 1, "softpick.2": 2}
    assert {one.line.quantizer for one in found.seeds} == {"fp32", "rtn-4bit"}
