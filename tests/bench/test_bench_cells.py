"""`qbench bench cells`: tokens per second of finished cells."""

import json

import pytest
from small_recipe import qbench, small_recipe


@pytest.mark.usefixtures("own_cache")
def test_each_finished_cell_of_this_machine_has_a_speed(tmp_path, capsys):
    recipe = small_recipe(tmp_path, quantizers=["fp32", "rtn-4bit"], tasks=["demo_pages"],
                          evaluation={"limit": 1, "damage": False})  # fmt: skip
    results, file = tmp_path / "results", tmp_path / "cells.json"
    assert qbench("run", recipe, "--out", results, "--device", "cpu", "--only", "softmax/*") == 0
    command = ("bench", "cells", results, "--tokens", 2, "--device", "cpu", "--out", file)
    assert qbench(*command) == 0
    measured = json.loads(file.read_text())
    assert [row["cell"] for row in measured["rows"]] == ["softmax/fp32", "softmax/rtn-4bit"]
    assert all(row["tokens_per_second"] > 0 for row in measured["rows"])
    assert "torch" in measured["environment"]["versions"]
