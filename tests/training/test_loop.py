"""Trainings as a whole: what they leave behind, and how they end where they go wrong."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from loading import load_model
from safetensors.torch import load_file

from qbench.analysis.measure import measure
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import DataError, RecipeError, TrainingError
from qbench.records import read_training
from qbench.training import loop
from qbench.training.data import read_token_files, watched_rows
from qbench.training.loop import _or_inf
from qbench.training.training_recipe import TrainingRecipe

ROOT = Path(__file__).parents[2]


def test_a_trained_pair_is_two_checkpoints_alike_in_all_but_the_normalizer(trained):
    out, pair = trained
    assert [record.normalizer for record in pair] == ["softmax", "softpick"]
    assert pair[0].in_common == pair[1].in_common
    folders = [out / f"{record.normalizer}-seed3" for record in pair]
    softmax, softpick = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert {key for key in softmax if softmax[key] != softpick[key]} == {"qbench_normalizer"}
    for record, folder in zip(pair, folders, strict=True):
        assert record.final_loss < 3.6  # ln 64 is 4.16
        checkpoint = find(str(folder))
        assert checkpoint.normalizer == record.normalizer
        assert checkpoint.training == record.summary
        model = load_model(checkpoint, dtype=torch.float32, device="cpu")
        assert model.config._attn_implementation == f"qbench-{record.normalizer}-reference"
        assert load_tokenizer(checkpoint)("the cat")["input_ids"]


def test_the_record_says_how_it_came_about(trained, tokens):
    out, (_, record) = trained
    path = out / "softpick-seed3" / "training.json"
    assert read_training(path) == record
    modes = {file.stat().st_mode for file in path.parent.rglob("*.[jst]*") if file.is_file()}
    assert len(modes) == 1  # whoever reads the record reads the weights
    assert (record.steps, record.tokens) == (40, 2560)
    assert record.attention == "softpick/reference"
    assert record.kernels == ("none",)  # on a CPU
    assert record.data.sources == ("text.txt",)
    assert "/" not in record.data.tokenizer
    about = json.loads((tokens / "tokens.json").read_text())
    assert record.data.tokens == about["train"]["tokens"]
    assert [sample.step for sample in record.watched] == [0, 10, 20, 30, 40]
    assert record.best_loss == min(s.loss for s in record.watched[1:])
    session = record.sessions[0]
    assert (session.first_step, session.last_step, session.processes) == (0, 40, 1)
    assert session.environment.versions["torch"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_held_out_loss_is_that_of_the_saved_checkpoint(tmp_path, train, tokens, precision):
    """Its weights are rounded to bfloat16; the rotary frequencies are not."""
    settings = {"normalizers": ["softmax"], "tokens": 640, "compute": {"precision": precision}}
    [record] = train(tmp_path, **settings)
    recipe = TrainingRecipe.load(tmp_path / "recipe.yaml")
    ids = torch.tensor(watched_rows(recipe, read_token_files(tokens)))
    assert ids.shape == (4, 16)
    assert (ids[:, 0] == 1).all()
    assert not (ids[:, 1:] == 1).any()  # no BOS of a document after ours
    checkpoint = find(str(tmp_path / "softmax-seed3"))
    model = load_model(checkpoint, dtype=getattr(torch, precision), device="cpu")
    measured = measure(model, ids, tokenizer=load_tokenizer(checkpoint), linears=(), batch=4)
    last = record.watched[-1]
    assert last.loss == pytest.approx(math.log(measured.perplexity), rel=1e-7)
    assert last.kurtosis == pytest.approx(measured.hidden.kurtosis, rel=1e-7)


def test_the_best_checkpoint_of_other_held_out_texts_is_not_compared(tmp_path, train):
    train(tmp_path, stop_after=10, normalizers=["softmax"])
    words = r"watch\.samples, watch\.length: .*other held-out texts"
    with pytest.raises(TrainingError, match=words):
        train(tmp_path, normalizers=["softmax"], watch={"samples": 3})
    train(tmp_path, normalizers=["softmax"], watch={"every": 7})


def test_a_loss_of_zero_is_a_loss():
    assert [_or_inf(loss) for loss in (0.0, 0.7, None)] == [0.0, 0.7, math.inf]


def test_a_loss_that_is_not_finite_ends_it_and_the_last_good_state_is_kept(
    tmp_path, train, monkeypatch
):
    def breaks(number, steps, schedule):
        return float("nan") if number == 23 else 1.0

    monkeypatch.setattr(loop, "learning_rate", lambda *_: float("nan"))
    with pytest.raises(TrainingError, match=r"step 5: the loss is nan.*there is no earlier state"):
        train(tmp_path, normalizers=["softmax"])
    monkeypatch.setattr(loop, "learning_rate", breaks)
    with pytest.raises(TrainingError, match=r"step 25: the loss is nan.*kept in") as error:
        train(tmp_path, normalizers=["softmax"])
    assert "\n" not in str(error.value)
    assert "the state of step 20 is kept in" in str(error.value)
    monkeypatch.undo()
    [record] = train(tmp_path, normalizers=["softmax"])
    assert record.sessions[1].first_step == 20
    assert record.final_loss < 3.5


def test_a_loss_far_above_the_lowest_ends_it(tmp_path, train):
    with pytest.raises(TrainingError, match="training diverged; lower the learning rate"):
        train(
            tmp_path, optimizer={"learning_rate": 30.0}, watch={"diverged": 0.5},
            schedule={"warmup_steps": 30},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"model": {"vocabulary": 16}}, RecipeError, "the tokenizer of"),
        ({"tokens": 10**6, "batch": {"tokens": 10**5}}, RecipeError, "fewer than one step takes"),
        ({"watch": {"samples": 500}}, DataError, "watch.samples asks for 500"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused_before_training(tmp_path, train, changed, error, words):
    lines = []
    with pytest.raises(error, match=words):
        train(tmp_path, log=lines.append, **changed)
    assert not lines
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_second_process_does_not_train_in_the_same_folder(tmp_path, train):
    (tmp_path / "softmax-seed3").mkdir()
    with (
        FileLock(tmp_path / "softmax-seed3" / ".lock"),
        pytest.raises(TrainingError, match="another process trains there"),
    ):
        train(tmp_path)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path, train, recipe_file):
    """Gradients of the normalizers' own parameters are averaged over processes, too, after
    a step's two passes and while the second lasts."""
    parameters = {"alibi_slopes": {"trained": True}, "sigmoid_bias": {"start": -1.0}}
    settings = {
        "normalizers": ["softpick", "sigmoid"], "tokens": 1280, "watch": {"every": 20},
        "model": {"parameters": parameters}, "batch": {"sequences": 1},
    }  # fmt: skip
    path = recipe_file(**settings)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "qbench", "train", path, "--out", tmp_path / "two", "--device", "cpu",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    for record in train(tmp_path / "one", **settings):
        name = f"{record.normalizer}-seed3"
        two = read_training(tmp_path / "two" / name / "training.json")
        assert two.sessions[0].processes == 2
        assert two.final_loss == pytest.approx(record.final_loss, abs=1e-4)
        ours, theirs = (
            load_file(tmp_path / n / name / "model.safetensors") for n in ("one", "two")
        )
        learned = [key for key, tensor in ours.items() if tensor.shape == (2,)]
        assert len(learned) == (2 if record.normalizer == "softpick" else 4)
        for key in learned:
            torch.testing.assert_close(theirs[key], ours[key], rtol=1e-2, atol=1e-3)
