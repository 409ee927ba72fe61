"""qbench from Python, as the README shows it."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from small_recipe import DEMO, small_recipe
from synthetic import make_store

from qbench import api, machine
from qbench.errors import QbenchError
from qbench.records import ANSWER_COLUMNS
from qbench.store import Store

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"```python\n(from qbench\.api import .*?)```", re.DOTALL)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_the_readmes_snippet_runs_as_it_stands(tmp_path):
    snippet = SNIPPET.search((ROOT / "README.md").read_text())
    if snippet is None:
        pytest.skip("the README shows no snippet of qbench.api")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "QBENCH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", snippet[1]], cwd=tmp_path, text=True, check=False,
                          capture_output=True, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hqq-3bit (KL " in done.stdout


def test_transformers_sees_all_that_is_installed_in_a_users_own_process(monkeypatch):
    """TorchVision, too, which no cell needs: in a notebook code of the user's follows."""
    asked = []
    monkeypatch.setattr(machine, "import_transformers", lambda: asked.append(1))
    monkeypatch.delitem(sys.modules, "qbench.runner.preload", raising=False)
    importlib.import_module("qbench.runner.preload")
    assert not asked
    monkeypatch.delitem(sys.modules, "qbench.api")
    monkeypatch.delitem(sys.modules, "qbench.runner.preload")
    importlib.import_module("qbench.runner.preload")
    assert asked


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


def test_a_model_is_evaluated_in_one_call(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = api.evaluate(
        DEMO / "softpick", "rtn-4bit,kv4", "demo_choice", dtype="float32",
        data=DEMO / "data", definitions=DEMO / "tasks", limit=20,
        out="~/out", device="cpu",
    )  # fmt: skip
    assert (tmp_path / "out" / "grid.json").exists()
    assert "fp32 is added: damage is measured" in capfd.readouterr().err
    assert found.verdict.startswith("Nearest to fp32: ")
    assert repr(found).startswith(
        "softpick: softpick (recipes/demo/softpick)\nDocuments: demo_choice 20"
    )
    damage = found.damage
    assert len(damage) == 2 * 2  # quantizers, metrics
    assert (damage["kl_low"] < damage["kl"]).all()
    assert (damage["kl"] < damage["kl_high"]).all()
    assert damage["bits_per_weight"].iloc[0] < 5
    documents = found.documents
    assert len(documents) == 2 * 2 * 20
    first = documents[(documents.quantizer == damage.quantizer[0]) & (documents.metric == "acc")]
    lost = (first.unquantized - first.value).mean()
    acc = damage[(damage.quantizer == damage.quantizer[0]) & (damage.metric == "acc")]
    assert acc.damage.item() == pytest.approx(lost)
    assert first.kl.mean() == pytest.approx(acc.kl.item())
    labels = [text.get_text() for text in found.plot().axes[0].texts]
    assert sorted(labels) == sorted(damage.quantizer.unique())
    assert len(found._repr_html_()) < 4000


def test_a_folder_without_finished_records_has_all_columns(tmp_path):
    planned = api.plan(api.Recipe.load(small_recipe(tmp_path)), device="cpu")
    Store(tmp_path / "out").put_manifest(planned.manifest())
    scores = api.load_records(tmp_path / "out")
    assert len(scores) == 0
    assert scores.pivot_table(index="task", columns="quantizer", values="value").empty


def test_load_answers_has_a_row_per_token_with_its_class(tmp_path):
    store = make_store(tmp_path, checkpoints=("mine",), quantizers=("bf16", "hqq-4bit", "rtn-4bit"),
                       sizes={"arc_easy": 5})  # fmt: skip
    texts = ["What is 6 × 7?", "The", " answer", " is", " 42", "<|im_end|>"]
    read = pd.DataFrame({"document": 0, "sample": 0, "position": range(-1, 5), "text": texts,
                         "kl": [None, 0.3, 0.1, 0.0, 0.2, 0.1], "change": 0.0, "margin": 0.5,
                         "agrees": [None, 0, 1, 1, 1, 1]})  # fmt: skip
    for record in store.records():
        if record.quantizer != "rtn-4bit":  # read no answers
            table = read if record.quantized else read.assign(kl=None, agrees=None)
            store.put(record, store.outcomes(record), answers=table)
    found = api.load_answers(tmp_path)
    assert [*found.columns] == ["checkpoint", "quantizer", *ANSWER_COLUMNS, "class"]
    assert found.groupby("quantizer").size().to_dict() == {"bf16": 6, "hqq-4bit": 6}
    rows = found[found.quantizer == "hqq-4bit"]
    assert [*rows["class"]] == ["prompt", "first token", "rest", "rest", "digits", "end"]
    assert [*rows.text] == texts
    assert rows.kl.mean() == pytest.approx(0.14)
    without = make_store(tmp_path / "without", quantizers=("bf16",), sizes={"arc_easy": 5})
    assert [*api.load_answers(without.directory).columns] == [*found.columns]


WRONG = {
    "tasks: Input should be": lambda planned: api.Overrides(tasks=3),
    "dat: Extra inputs": lambda planned: api.Overrides(dat="x"),
    "is a file; name a folder": lambda planned: api.run(planned, __file__),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_one_clear_error(words, tmp_path):
    planned = api.plan(api.Recipe.load(small_recipe(tmp_path)), device="cpu")
    with pytest.raises(QbenchError, match=words) as error:
        WRONG[words](planned)
    assert len(str(error.value)) < 400
