"""qbench from Python, as the README shows it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import small_recipe

from qbench import api
from qbench.errors import RecipeError

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"```python\n(from qbench\.api import .*?)```", re.DOTALL)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_the_readmes_snippet_runs_as_it_stands(tmp_path):
    snippet = SNIPPET.search((ROOT / "README.md").read_text())
    if snippet is None:
        pytest.skip("the README shows no snippet of qbench.api")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    done = subprocess.run([sys.executable, "-c", snippet[1]], cwd=tmp_path, text=True, check=False,
                          capture_output=True, env=environment(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "demo_choice" in done.stdout


def environment(folder):
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "QBENCH_CACHE": str(folder / "cache")}


def test_a_recipe_is_planned_run_compared_and_loaded_as_a_table(tmp_path, capfd):
    recipe = api.Recipe.load(small_recipe(tmp_path, tasks=["demo_choice"]))
    planned = api.plan(recipe, device="cpu")
    records = api.run(planned, tmp_path / "out", only="*/fp32")
    assert [record.cell for record in records] == ["softmax/fp32", "softpick/fp32"]
    assert "softmax/fp32: done" in capfd.readouterr().err
    shown = api.tables(api.compare(tmp_path / "out"))
    assert "demo_choice" in shown
    scores = api.load_records(tmp_path / "out")
    assert len(scores) == 4
    assert set(scores["metric"]) == {"acc", "acc_norm"}
    assert set(scores["documents"]) == {3}
    one = scores[(scores["checkpoint"] == "softmax") & (scores["metric"] == "acc")]
    assert one["value"].item() == next(s.value for s in records[0].scores if s.metric == "acc")


def test_overrides_are_those_of_the_command_line(tmp_path):
    recipe = api.Recipe.load(small_recipe(tmp_path), api.Overrides(limit=2, scoring="fast"))
    (limit,) = {cell.scoring.limit for cell in api.plan(recipe, "cpu").cells}
    assert limit == 2
    folder = ROOT / "recipes" / "demo" / "softpick"
    other = api.Recipe.load(small_recipe(tmp_path), api.Overrides(checkpoints={"softmax": folder}))
    assert other.checkpoints["softmax"].path == str(folder)
    half = api.Recipe.load(small_recipe(tmp_path), api.Overrides(dtype="float16"))
    assert {one.quantization.compute_dtype for one in half.quantizers} == {"float16"}
    with pytest.raises(RecipeError, match="has no other"):
        api.Recipe.load(small_recipe(tmp_path), api.Overrides(checkpoints={"other": "x"}))
    with pytest.raises(RecipeError, match=r"compute_dtype: .*'float32' \(it is 'bf16'\)$"):
        api.Recipe.load(small_recipe(tmp_path), api.Overrides(dtype="bf16"))
