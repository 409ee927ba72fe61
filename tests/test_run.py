"""A recipe end to end on the bundled pair: records, resumption, failures, exit codes."""

import json
import shutil
from pathlib import Path

import pytest
from small_recipe import DEMO, qbench, run_small, small_recipe
from transformers import AutoTokenizer

from qbench import store as store_module
from qbench.errors import OutputError
from qbench.files import cache_folder, content_key
from qbench.store import Store

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_run_writes_records_tables_and_the_second_run_computes_nothing(tmp_path, capfd):
    path, out = small_recipe(tmp_path), tmp_path / "out"
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    store = Store(out)
    records = store.records()
    assert [record.cell for record in records] == [
        "softmax/fp32", "softmax/rtn-4bit", "softpick/fp32", "softpick/rtn-4bit",
    ]  # fmt: skip
    quantized = records[3]
    assert quantized.attention == "softpick/reference"
    manifest = store.manifest()
    measured = (manifest.sources["softpick"], manifest.data, manifest.limit)
    assert (quantized.source, quantized.data, quantized.limit) == measured
    assert measured[0].endswith("recipes/demo/softpick")
    assert quantized.audit.passed
    assert quantized.audit.coverage == 1.0
    assert 4 < quantized.audit.bits_per_weight < 5
    assert {stage.name for stage in quantized.stages} == {"load", "quantize", "audit", "evaluate"}
    assert {score.metric for score in quantized.scores} >= {"acc", "acc_norm", "perplexity"}
    assert content_key(json.loads(json.dumps(quantized.key_parts))) == quantized.key
    outcomes = store.outcomes(quantized)
    assert set(outcomes["task"]) == {"demo_choice", "demo_lastword", "demo_pages"}
    means = outcomes[(outcomes["task"] == "demo_choice") & (outcomes["metric"] == "acc")]["value"]
    (acc,) = [s for s in quantized.scores if s.task == "demo_choice" and s.metric == "acc"]
    assert acc.value == pytest.approx(means.mean())
    shown = capfd.readouterr()
    assert "demo_choice" in shown.out
    assert "Δ" in (out / "tables.md").read_text()
    before = {record.cell: record.finished for record in records}
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    assert {record.cell: record.finished for record in store.records()} == before
    assert capfd.readouterr().err.count("already finished") == 4


def test_a_failed_cell_is_recorded_shown_and_retried_while_the_others_go_on(tmp_path, capfd):
    # Only the model itself can say that it has no such layer.
    quantizers = [{"name": "rtn-4bit", "group_size": 64, "leave_out": ["*.experts"]}, "fp32"]

    def ran():
        changes = {"quantizers": quantizers, "tasks": ["demo_choice"], "code": 1}
        store = run_small(tmp_path, "--only", "softmax/*", **changes)
        return {record.cell: record for record in store.records()}

    records = ran()
    assert records["softmax/fp32"].status == "ok"
    broken = records["softmax/rtn-4bit"]
    assert broken.status == "failed"
    assert "'*.experts' matches no weight matrix" in broken.error
    shown = capfd.readouterr()
    assert "failed" in shown.out
    assert shown.err.count("'*.experts' matches no weight matrix") == 1
    assert "1 of 2 cells failed, as said above: softmax/rtn-4bit" in shown.err
    log = Path(shown.err.rstrip().rpartition(" ")[2])
    assert "Traceback" in log.read_text()
    assert ran()["softmax/rtn-4bit"].finished > broken.finished


def test_a_checkpoint_whose_tensors_do_not_fit_is_bad_input(tmp_path, capfd):
    copy = shutil.copytree(DEMO / "softmax", tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    store = run_small(tmp_path, checkpoints={"copy": str(copy)}, quantizers=["fp32"], code=2)
    words = f"copy/fp32: FAILED: checkpoint {copy}: the tensors do not fit the configuration; mis"
    assert words in capfd.readouterr().err
    (record,) = store.records()
    assert record.bad_input


def test_an_unquantized_cell_is_held_to_the_checkpoint_read_again(tmp_path, monkeypatch):
    """It was held to a copy of itself, which cannot fail."""
    from qbench import cell

    inner, loads = cell.load_model, []

    def load_model(*of, **named):
        model = inner(*of, **named)
        if not loads:
            model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
        loads.append(model)
        return model

    monkeypatch.setattr(cell, "load_model", load_model)
    only = ("--only", "softmax/fp32")
    (record,) = run_small(tmp_path, *only, tasks=["demo_choice"], code=1).records()
    words = "audit: model.layers.1.mlp.up_proj.weight: differs from the tensor in model.safe"
    assert record.error.startswith(words)


def test_calibration_tokens_that_the_model_does_not_embed_are_the_tokenizers_fault(tmp_path, capfd):
    """It was torch's IndexError; on a GPU it would end the process."""
    folder = shutil.copytree(DEMO / "softmax", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["the"])
    tokenizer.save_pretrained(folder)
    text = {"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 64}
    run_small(tmp_path, checkpoints={"model": str(folder)}, tasks=["demo_choice"],
              quantizers=["gptq-4bit"], calibration=text, code=1)  # fmt: skip
    words = "the tokenizer gives token id 1024, but the model embeds only 1024"
    assert words in capfd.readouterr().err


def test_a_full_cache_loses_no_scores(tmp_path, capfd, monkeypatch):
    """Ended as failed before, its scores with it. Neither hidden states nor tasks are kept."""
    inner = store_module.write_atomically

    def full(path, *of, **named):
        if path.is_relative_to(cache_folder()):
            raise OutputError(
                f"{path}: cannot be written (No space left on device); make room there"
            )
        return inner(path, *of, **named)

    only = ("--only", "softmax/*")
    with monkeypatch.context() as disk:
        disk.setattr("qbench.evaluation.kl_observer.write_tensors", full)
        disk.setattr(store_module, "write_atomically", full)
        store = run_small(tmp_path, *only, tasks=["demo_choice"])
    assert "demo_choice is scored, but not kept in the cache: " in (said := capfd.readouterr().err)
    assert "cannot be written (No space left on device); make room there, or leave" in said
    base, cell = store.records()
    assert (base.status, cell.status) == ("ok", "ok")
    assert base.scores
    assert "the unquantized cell is then made anew" in cell.damage.reason
    run_small(tmp_path, *only, tasks=["demo_choice"])  # with room: both again
    assert store.records()[1].damage.tasks
