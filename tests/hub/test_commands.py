"""The shipped recipes of the published pair, whole, against a local server that speaks the Hub's
protocol: huggingface_hub, datasets and lm-eval as they are."""

import json
import re
from pathlib import Path

import pytest
from hub.content import C4, DOCUMENTS
from hub.server import Fault

RECIPES = Path(__file__).parents[2] / "recipes"
GPTQ, APPENDIX = RECIPES / "gptq.yaml", RECIPES / "appendix-340m.yaml"
TASKS = {
    "arc_easy": "allenai/ai2_arc",
    "lambada_openai": "EleutherAI/lambada_openai",
    "piqa": "baber/piqa",
    "sciq": "allenai/sciq",
    "wikitext": "EleutherAI/wikitext_document_level",
}
DEMO = RECIPES / "demo" / "softpick"
SCIQ = "allenai/sciq"


@pytest.mark.parametrize(
    ("recipe", "cells"), [(GPTQ, 10), pytest.param(APPENDIX, 18, marks=pytest.mark.slow)]
)
def test_the_shipped_recipes_are_planned_from_the_hub(hub, qbench, recipe, cells):
    ended = qbench("plan", recipe, "--device", "cpu")
    assert ended.code == 0, ended.errors
    for task, data in TASKS.items():
        commit = hub.dataset(data).names["main"]
        assert f"task  {task}: all documents of {data} at {commit[:12]}" in ended.output
    assert ended.output.count("to run") == cells
    assert f"datasets--{C4.replace('/', '--')}" in ended.output
    assert ended.errors == ""  # progress is shown in a terminal alone


def cells_of(folder):
    """Every record below a results folder, by cell."""
    records = [json.loads(path.read_text()) for path in (folder / "records").rglob("*.json")]
    return {f"{record['checkpoint']}/{record['quantizer']}": record for record in records}


@pytest.mark.slow
def test_the_shipped_recipe_runs_whole_and_then_needs_no_hub(hub, qbench, tmp_path):
    """10 cells: 128 × 2,048 tokens of calibration, every document; 20 s on two idle cores."""
    ended = qbench("run", GPTQ, "--device", "cpu", "--workers", "2")
    assert ended.code == 0, ended.errors
    folder = tmp_path / "results" / GPTQ.stem
    found = cells_of(folder)
    labels = ["bf16", *(f"gptq-{bits}bit" for bits in (2, 3, 4, 8))]
    assert set(found) == {f"{name}/{label}" for name in ("softmax", "softpick") for label in labels}
    for name, record in found.items():
        assert record["status"] == "ok", record["error"]
        scored = {score["task"]: score["documents"] for score in record["scores"]}
        assert scored == dict.fromkeys(TASKS, DOCUMENTS), name
        quantized = not name.endswith("/bf16")
        assert record["audit"]["passed"]
        assert record["audit"]["coverage"] == quantized
        assert (record["damage"] or {}).get("status") == ("measured" if quantized else None)
        assert record["attention"] == f"{name.partition('/')[0]}/reference"
    for name in ("softmax", "softpick"):
        errors = [found[f"{name}/gptq-{bits}bit"]["audit"]["weight_error"] for bits in (2, 3, 4, 8)]
        assert errors == sorted(errors, reverse=True)
    shown = (folder / "tables.md").read_text()
    assert ended.output == shown
    assert all(f"| {task} " in shown for task in TASKS)
    hub.requests.clear()
    again = qbench("run", GPTQ, "--device", "cpu", HF_HUB_OFFLINE="1")
    assert again.code == 0, again.errors
    assert again.errors.count("already there") == 10
    assert again.output == ended.output
    assert hub.requests == []


@pytest.fixture
def small(tmp_path):
    """A recipe of one cell, with its checkpoint at hand and its data on the hub."""
    text = f"name: small\ncheckpoints: {{one: {DEMO}}}\nquantizers: [bf16]\ntasks: [sciq]\n"
    (tmp_path / "small.yaml").write_text(text)
    return "small.yaml"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (None, "ask on its page, then sign in with `hf auth login` or set HF_TOKEN"),
        (Fault(f"/datasets/{SCIQ}", 404, {"X-Error-Code": "RepoNotFound"}), "no such repository"),
    ],
    ids=["gated", "missing"],
)
def test_data_that_the_hub_refuses_is_one_line(hub, qbench, small, fault, words):
    hub.dataset(SCIQ).gated = fault is None
    hub.faults += [fault] if fault else []
    line = qbench("run", small, "--device", "cpu").line
    assert line.startswith(f"sciq: the hub did not give the data set {SCIQ}: ")
    assert words in line
    assert "add --data DIR" in line


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (f"{C4}/en/nosuch.json.gz", "it has no such file"),
        pytest.param(
            f"{C4}/",
            "write hf://datasets/OWNER/NAME/FILE, or NAME@REVISION",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_calibration_text_that_the_hub_does_not_have_is_one_line(qbench, tmp_path, address, words):
    (tmp_path / "gptq.yaml").write_text(
        f"name: small\ncheckpoints: {{one: {DEMO}}}\nquantizers: [bf16, gptq-4bit]\n"
        f"tasks: [sciq]\ncalibration: {{path: 'hf://datasets/{address}'}}\n"
    )
    line = qbench("plan", "gptq.yaml", "--device", "cpu").line
    assert line.startswith(f"calibration.path: hf://datasets/{address}: ")
    assert words in line


def test_a_plan_without_the_hub_says_what_it_lacks(qbench, small):
    line = qbench("plan", small, "--device", "cpu", HF_HUB_OFFLINE="1").line
    assert "HF_HUB_OFFLINE is set, so what the cache lacks is not fetched" in line


@pytest.mark.slow
def test_data_that_break_off_fail_the_cell_and_are_taken_up_by_the_next_run(hub, qbench, small):
    hub.faults.append(Fault(r"sciq/resolve/.*parquet", cut_after=100, method="GET"))
    ended = qbench("run", small, "--device", "cpu")
    assert ended.code == 1
    (failed,) = [line for line in ended.errors.splitlines() if line.startswith("one/bf16: FAILED:")]
    assert "sciq: the hub did not give its data: the connection broke" in failed
    hub.faults.clear()
    again = qbench("run", small, "--device", "cpu")
    assert again.code == 0, again.errors
    assert "one/bf16: done" in again.errors


@pytest.mark.slow
def test_data_that_move_on_are_other_cells(hub, qbench, small):
    before = qbench("plan", small, "--device", "cpu").output
    repository = hub.dataset(SCIQ)
    repository.commit({**repository.commits[repository.names["main"]], "more.txt": b"x"})
    after = qbench("plan", small, "--device", "cpu").output
    assert re.findall(r"key \w+", before) != re.findall(r"key \w+", after)
