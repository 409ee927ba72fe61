"""What cannot be scored is named, with its line where there is one, and costs nothing else."""

import json
import re
import shutil

import pytest
import torch
from scoring_models import evaluate, scorer
from small_recipe import DEMO, blocks, run_small
from tiny import tiny_model

from qbench.comparison.compare import compare
from qbench.errors import UnavailableError
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.tasks import plan_task

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def data(tmp_path):
    return shutil.copytree(DEMO / "data", tmp_path / "data")


def change(data, task, line, **fields):
    path = data / task / "test.jsonl"
    rows = [json.loads(one) for one in path.read_text().splitlines()]
    rows[line - 1] |= fields
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_cannot_be_loaded_or_scored_costs_its_task_alone(tmp_path, data, capfd):
    """A continuation that is longer than the context; a column of texts that holds a list in one
    row, which datasets refuses. The other task, and damage, are kept."""
    change(data, "demo_choice", 2, choices=["word " * 900, "b", "c", "d"])
    change(data, "demo_lastword", 2, text=["a"])
    store = run_small(tmp_path, data=str(data), checkpoints=blocks("softpick"), code=1)
    for record in store.records():
        assert record.status == "ok"
        assert {score.task for score in record.scores} == {"demo_pages"}
        assert record.failed_tasks.keys() == {"demo_choice", "demo_lastword"}
        assert "does not fit into evaluation.max_length" in record.failed_tasks["demo_choice"]
        assert re.match("demo_lastword: .*test.jsonl", record.failed_tasks["demo_lastword"])
    assert record.damage.tasks["demo_pages"].distributions.kl.mean > 0
    tables = (store.directory / "tables.md").read_text()
    assert "demo_choice: failed: a continuation of" in tables
    assert "cells lack a task" in capfd.readouterr().err
    # as a GPU's record says it under scoring: auto
    said = record.scoring.model_copy(update={"exact_tasks": {"demo_pages": "fast is 0.06 off"}})
    read = store.outcomes(record), store.responses(record)
    store.put(record.model_copy(update={"scoring": said}), *read)
    found = [(cell.cell, problem) for cell, problem in compare(store).problems()]
    assert (record.cell, "demo_pages: scored exactly: fast is 0.06 off") in found


def test_a_metric_that_cannot_be_computed_costs_its_task_alone(tmp_path):
    """f1 is of two classes in lm-eval; demo_choice has four answers."""
    tasks = shutil.copytree(DEMO / "tasks", tmp_path / "tasks")
    (tasks / "judge.py").write_text("def fails(doc, results):\n    doc['nothing']\n")
    for name, line in (
        ("demo_choice", "  - metric: f1\n"),
        ("demo_lastword", "process_results: !function judge.fails\n"),
    ):
        path = tasks / f"{name}.yaml"
        path.write_text(path.read_text().replace("metadata:", f"{line}metadata:"))
    store = run_small(
        tmp_path, quantizers=["fp32"], code=1, definitions=str(tasks), evaluation={"limit": 12},
        checkpoints=blocks("softpick"),
    )  # fmt: skip
    (record,) = store.records()
    assert {score.task for score in record.scores} == {"demo_pages"}
    words = r"demo_choice: f1 cannot be computed \(ValueError: T.*; leave this"
    assert re.match(words, record.failed_tasks["demo_choice"])
    words = "demo_lastword: its answers .*'nothing'"
    assert re.match(words, record.failed_tasks["demo_lastword"])


def test_a_score_is_a_number_of_numpy_too(tmp_path):
    shutil.copytree(DEMO / "tasks", tmp_path / "tasks")
    (tmp_path / "tasks" / "of.py").write_text(
        "import numpy\ndef middle(values):\n    return numpy.float32(numpy.median(values))\n"
    )
    path = tmp_path / "tasks" / "demo_lastword.yaml"
    text = path.read_text().replace("aggregation: mean", "aggregation: !function of.middle")
    path.write_text(text)
    task = load_task(plan_task("demo_lastword", data=DEMO / "data", definitions=tmp_path / "tasks"))
    model = scorer(tiny_model("opt"), "exact")
    scores = evaluate(model, task, model.settings).scores
    assert {score.metric for score in scores} == {"perplexity", "acc"}


def test_a_cell_of_which_no_task_can_be_scored_fails(tmp_path, data):
    change(data, "demo_choice", 2, choices=["word " * 900, "b", "c", "d"])
    changes = {"tasks": ["demo_choice"], "quantizers": ["fp32"], "checkpoints": blocks("softpick")}
    (record,) = run_small(tmp_path, data=str(data), code=1, **changes).records()
    assert record.status == "failed"
    assert "does not fit into evaluation.max_length" in record.error
    assert record.failed_tasks == {}


def test_a_decoder_that_does_not_give_what_the_head_takes_is_refused():
    model = tiny_model("opt")
    model.get_decoder = lambda: lambda ids, use_cache: (torch.zeros(1, 8, 48),)
    with pytest.raises(UnavailableError, match=r"lies between the two; set scoring: lm-eval"):
        scorer(model, "exact")


@pytest.mark.parametrize(
    ("named", "task", "words"),
    [
        ({}, "demo_lastword", "tokenizer has neither a BOS nor an EOS token, and lm-eval puts one"),
        ({"bos_token": "<s>"}, "sums", "sums: .* tokenizer has no EOS token, which ends"),
    ],
)
def test_a_tokenizer_without_the_tokens_that_lm_eval_needs_is_named(
    tmp_path, data, named, task, words
):
    """HFLM stops at both with a bare TypeError."""
    folder = shutil.copytree(DEMO / "softpick", tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {name: value for name, value in config.items() if "_token" not in name}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    tasks = shutil.copytree(DEMO / "tasks", tmp_path / "tasks")
    (tasks / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\noutput_type: generate_until\ntest_split: test\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {max_gen_toks: 8, until: ['.']}\n"
    )
    shutil.copytree(data / "demo_lastword", data / "sums")
    store = run_small(
        tmp_path, checkpoints={"a": str(folder)}, quantizers=["fp32"], data=str(data), tasks=[task],
        definitions=str(tasks), evaluation={"limit": 2}, code=1 if named else 2,
    )  # fmt: skip
    (record,) = store.records()
    assert re.search(words, record.error)
    assert bool(record.stages) == bool(named)  # the first is known before work starts
