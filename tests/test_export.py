"""Results in others' formats, read back by their own tools; one cell by `qbench show`."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from lm_eval.utils import make_table
from small_recipe import qbench
from synthetic import make_store

from qbench import export
from qbench.cli.app import app
from qbench.cli.show import cell_text
from qbench.comparison.rows import find_cell
from qbench.errors import ResultsError
from qbench.store import Store

REAL = Path(__file__).parents[1] / "results" / "pair-27m"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Cells of the committed pair in both formats."""
    folder = tmp_path_factory.mktemp("export")
    export.export(some("softmax/bf16", "softpick/gptq-3bit"), "lm-eval", folder / "lm-eval")
    export.export(some("softpick/hqq-2bit"), "model-card", folder / "model-card")
    return folder


def some(*cells):
    """The committed pair with a few of its cells."""
    grid = Store(REAL).manifest()
    kept = tuple(cell for cell in grid.cells if cell.cell in cells)
    return Store(REAL, manifest=grid.model_copy(update={"cells": kept}))


def test_lm_evals_own_table_shows_our_scores(exported):
    (path,) = (exported / "lm-eval" / "softpick__gptq-3bit").glob("results_*.json")
    results = json.loads(path.read_text())
    table = make_table(results)
    shown = [cell.strip() for line in table.splitlines() for cell in line.split("|")]
    (record,) = some("softpick/gptq-3bit").records()
    for score in record.scores:
        assert results["results"][score.task][f"{score.metric},none"] == score.value
        assert f"{score.value:.4f}" in shown, score.metric
    assert results["n-samples"]["lambada_openai"]["effective"] == 5153
    assert (results["versions"]["piqa"], results["versions"]["wikitext"]) == (1.0, 2.0)


def test_samples_aggregate_to_the_scores(exported):
    place = exported / "lm-eval" / "softmax__bf16"
    (path,) = place.glob("samples_arc_easy_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (results,) = place.glob("results_*.json")
    score = json.loads(results.read_text())["results"]["arc_easy"]["acc,none"]
    assert sum(line["acc"] for line in lines) / len(lines) == pytest.approx(score, abs=1e-12)
    assert lines[0].keys() >= {"doc_id", "resps", "filtered_resps", "metrics", "acc_norm"}
    best = max(range(4), key=lambda i: float(lines[0]["filtered_resps"][i][0]))
    assert 0 <= best < 4
    assert len(list(place.glob("samples_*.jsonl"))) == 5


def test_the_hubs_library_reads_the_card_back(exported):
    card = ModelCard((exported / "model-card" / "softpick__hqq-2bit.md").read_text())
    (record,) = [one for one in Store(REAL).records() if one.cell == "softpick/hqq-2bit"]
    results = {(one.dataset_type, one.metric_name): one for one in card.data.eval_results}
    assert len(results) == len(record.scores)
    acc = results["allenai/ai2_arc", "acc"]
    (score,) = [one for one in record.scores if (one.task, one.metric) == ("arc_easy", "acc")]
    assert acc.metric_value == pytest.approx(100 * score.value)
    assert acc.metric_args == {"documents": 2376, "stderr": pytest.approx(100 * score.stderr)}


@pytest.mark.parametrize("hub_id", [None, "some/model"])
def test_a_card_has_the_verdict_and_the_base_model(tmp_path, hub_id):
    sizes = {"arc_easy": 2376, "wikitext": 62}
    columns = {"checkpoints": ("mine",), "quantizers": ("bf16", "hqq-4bit")}
    store = make_store(tmp_path / "grid", sizes=sizes, **columns)
    hub_ids = {"mine": hub_id} if hub_id else {}
    store.put_manifest(store.manifest().model_copy(update={"hub_ids": hub_ids}))
    paths = export.export(Store(tmp_path / "grid"), "model-card", tmp_path / "cards")
    (text,) = [path.read_text() for path in paths if "hqq-4bit" in path.name]
    card = ModelCard(text)
    assert card.data.base_model == hub_id
    assert card.data.get("base_model_relation") == ("quantized" if hub_id else None)
    assert ("base_model: not known" in text) == (hub_id is None)
    assert "Scores (secondary): " in text
    assert "Documents: arc_easy 2,376" in text
    assert "| Damage |" in re.sub(" +", " ", text)


def test_a_name_in_the_card_s_table_is_text():
    (record,) = some("softpick/hqq-2bit").records()
    named = record.scores[0].model_copy(update={"label": "a|b <b>"})
    text = export.card(record.model_copy(update={"scores": (named,)}))
    rows = [row.replace("\\|", "") for row in text.splitlines() if row.startswith("|")]
    assert {row.count("|") for row in rows} == {7}
    assert "<b>" not in text.split("---\n")[-1]


def test_what_is_left_out_is_named(tmp_path, capsys):
    folder = tmp_path / "grid"
    make_store(folder, sizes={"arc_easy": 9}, quantizers=("bf16",), failed=("softmax/bf16",),
               missing=("softpick/bf16",))  # fmt: skip
    assert qbench("export", folder, "--to", "lm-eval") == 0
    said = capsys.readouterr().err
    assert "softmax/bf16: failed: out of memory" in said
    assert "softpick/bf16: missing" in said
    assert "written: 0 files" in said


CELL = f"{REAL}/softpick/gptq-3bit"


def show(capsys, *arguments):
    assert not app(["show", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def test_a_cell_is_shown_with_its_key_and_environment():
    _, record = find_cell(CELL)
    text = cell_text(record)
    titles = {"audit", "scores", "stages", "damage", "environment", "key_parts"}
    assert {*re.findall(r"^(\w+):$", text, re.MULTILINE)} >= titles
    last = yaml.safe_load("environment:" + text.partition("\nenvironment:")[2])
    assert last["key_parts"] == record.key_parts
    assert all(f"{stage.name} " in text for stage in record.stages)
    assert re.search(r"lambada_openai +acc +0\.\d+ +0\.004\d+ .*5153", text)
    assert all(version in text for version in record.environment.versions.values())


def test_a_cell_of_the_folder_that_one_is_in_is_named_without_it(capsys, monkeypatch):
    whole = show(capsys, CELL)
    monkeypatch.chdir(REAL)
    assert show(capsys, "softpick/gptq-3bit") == whole


def test_what_is_not_there_is_said():
    with pytest.raises(ResultsError, match="results: names no cell; write DIR"):
        app(["show", "results"], standalone_mode=False)


def test_a_task_that_could_not_be_scored_is_shown_with_why(tmp_path):
    store = make_store(tmp_path / "grid", sizes={"arc_easy": 9}, quantizers=("bf16",))
    record = store.get(store.manifest().cells[0])
    failed = record.model_copy(update={"failed_tasks": {"wikitext": "it gives NaN"}})
    store.put(failed, store.outcomes(record))
    assert "failed_tasks:\n  wikitext: it gives NaN\n" in cell_text(store.get(record))
