"""The shipped recipes of the published pair, whole, against a local server that speaks the Hub's
protocol: huggingface_hub, datasets and lm-eval as they are."""

import json
from pathlib import Path

import pytest
from hub.content import C4, SHARD, SOFTPICK
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
GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to dataset is restricted."}
SCIQ = "allenai/sciq"


def test_the_shipped_recipes_are_planned_from_the_hub_and_again_without_it(hub, qbench):
    first = qbench("plan", GPTQ, "--device", "cpu")
    assert first.code == 0, first.errors
    for task, data in TASKS.items():
        commit = hub.dataset(data).names["main"]
        assert f"task  {task}: all documents of {data} at {commit[:12]}" in first.output
    assert first.output.count("to run") == 10
    assert f"datasets--{C4.replace('/', '--')}" in first.output
    assert f"downloading {SHARD} of {C4}: 1 file" in first.errors
    hub.requests.clear()
    again = qbench("plan", GPTQ, "--device", "cpu", HF_HUB_OFFLINE="1")
    assert (again.code, again.output) == (0, first.output), again.errors
    appendix = qbench("plan", APPENDIX, "--device", "cpu", HF_HUB_OFFLINE="1")
    assert appendix.code == 0, appendix.errors
    assert appendix.output.count("to run") == 18
    assert hub.requests == []


@pytest.mark.slow
def test_a_cell_of_the_shipped_recipe_is_scored_and_kept(hub, qbench, tmp_path):
    asked = ("run", GPTQ, "--only", "softpick/bf16", "--limit", "3", "--device", "cpu")
    ended = qbench(*asked)
    assert ended.code == 0, ended.errors
    assert "softpick/bf16: done" in ended.errors
    (path,) = (tmp_path / "results" / "gptq" / "records").rglob("softpick/bf16/*.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok"
    assert {score["task"] for score in record["scores"]} == set(TASKS)
    hub.requests.clear()
    again = qbench(*asked, HF_HUB_OFFLINE="1")
    assert again.code == 0, again.errors
    assert "softpick/bf16: done" not in again.errors  # the record is used again
    assert hub.requests == []


@pytest.mark.slow
def test_gptq_cells_of_the_pair_are_quantized_audited_and_scored(qbench, tmp_path):
    text = GPTQ.read_text()
    smaller = {"samples: 128": "samples: 4", "length: 2048": "length: 64"}
    for shipped, ours in smaller.items():
        assert shipped in text
        text = text.replace(shipped, ours)
    (tmp_path / "gptq.yaml").write_text(text)
    ended = qbench(
        "run", "gptq.yaml", "--only", "*/[bg][fp][1t]*[64]*", "--limit", "3", "--device", "cpu"
    )
    assert ended.code == 0, ended.errors
    records = (tmp_path / "results" / "gptq" / "records").rglob("*.json")
    found = {"/".join(path.parts[-3:-1]): json.loads(path.read_text()) for path in records}
    assert set(found) == {f"{name}/{quantizer}" for name in ("softmax", "softpick")
                          for quantizer in ("bf16", "gptq-4bit")}  # fmt: skip
    assert {record["status"] for record in found.values()} == {"ok"}
    assert all(record["audit"]["passed"] for record in found.values() if record["audit"])


def test_a_checkpoint_that_is_gated_ends_the_command_with_one_line(hub, qbench):
    hub.faults.append(Fault(f"/api/models/{SOFTPICK}", 401, {"X-Error-Code": "GatedRepo"}))
    line = qbench("run", GPTQ, "--device", "cpu").line
    assert line.startswith(f"checkpoint {SOFTPICK}: ")
    assert "`hf auth login` or set HF_TOKEN" in line


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(f"/datasets/{SCIQ}", 401, GATED), "sign in with `hf auth login` or set HF_TOKEN"),
        (Fault(f"/datasets/{SCIQ}", 404, {"X-Error-Code": "RepoNotFound"}), "no such repository"),
        (Fault(f"/datasets/{SCIQ}", 429, {"Retry-After": "7200"}), "busy (429"),
        (Fault(r"sciq/resolve/.*parquet", cut_after=100, method="GET"), "broke"),
    ],
    ids=["gated", "missing", "busy", "broken"],
)
def test_data_that_the_hub_refuses_is_one_line(hub, qbench, tmp_path, fault, words):
    (tmp_path / "small.yaml").write_text(
        f"name: small\ncheckpoints: {{one: {DEMO}}}\nquantizers: [bf16]\ntasks: [sciq]\n"
    )
    hub.faults.append(fault)
    line = qbench("plan", "small.yaml", "--device", "cpu").line
    assert line.startswith(f"sciq: the hub did not give {SCIQ}: ")
    assert words in line
    assert "say --data DIR" in line
    if fault.cut_after:
        hub.faults.clear()
        again = qbench("plan", "small.yaml", "--device", "cpu")
        assert again.code == 0, again.errors
        assert "task  sciq: 6 of 6 documents" in again.output
