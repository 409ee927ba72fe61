"""The shipped recipes of the published pair, whole, against a local server that speaks the Hub's
protocol: huggingface_hub, datasets and lm-eval as they are."""

import json
import re
from pathlib import Path

import pytest
from hub.content import C4, DOCUMENTS

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


@pytest.mark.parametrize(
    ("recipe", "cells"), [(GPTQ, 10), pytest.param(APPENDIX, 18, marks=pytest.mark.slow)]
)
def test_the_shipped_recipes_are_planned_from_the_hub(hub, qbench, recipe, cells):
    ended = qbench("plan", recipe, "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    for task, data in TASKS.items():
        commit = hub.dataset(data).names["main"]
        assert f"task  {task}: all documents of {data} at {commit[:12]}" in ended.stdout
    assert ended.stdout.count("to run") == cells
    assert f"datasets--{C4.replace('/', '--')}" in ended.stdout
    assert ended.stderr == ""  # progress is shown in a terminal alone


def cells_of(folder):
    """Every record below a results folder, by cell."""
    records = [json.loads(path.read_text()) for path in (folder / "records").rglob("*.json")]
    return {f"{record['checkpoint']}/{record['quantizer']}": record for record in records}


@pytest.mark.slow
def test_the_shipped_recipe_runs_whole_and_then_needs_no_hub(hub, qbench, tmp_path):
    """10 cells: 128 × 2,048 tokens of calibration, every document; 20 s on two idle cores."""
    ended = qbench("run", GPTQ, "--device", "cpu", "--workers", "2")
    assert ended.returncode == 0, ended.stderr
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
    assert ended.stdout == shown
    assert all(f"| {task} " in shown for task in TASKS)
    hub.requests.clear()
    again = qbench("run", GPTQ, "--device", "cpu", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("already there") == 10
    assert again.stdout == ended.stdout
    assert hub.requests == []


@pytest.mark.slow
def test_data_that_move_on_are_other_cells(hub, qbench, tmp_path):
    text = f"name: small\ncheckpoints: {{one: {DEMO}}}\nquantizers: [bf16]\ntasks: [sciq]\n"
    (tmp_path / "small.yaml").write_text(text)
    before = qbench("plan", "small.yaml", "--device", "cpu").stdout
    repository = hub.dataset("allenai/sciq")
    repository.commit({**repository.commits[repository.names["main"]], "more.txt": b"x"})
    after = qbench("plan", "small.yaml", "--device", "cpu").stdout
    assert re.findall(r"key \w+", before) != re.findall(r"key \w+", after)
