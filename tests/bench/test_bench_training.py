"""The bench of the training step, on a shape that a CPU takes."""

import json
import re

import pytest
from small_recipe import qbench

from qbench.bench import training as bench
from qbench.errors import RecipeError


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "tiny", (16, 1, 2, 64, 16, 2))
    return ["bench", "training", "--shape", "tiny", "--device", "cpu", "--compile", "no",
            "--precision", "float32"]  # fmt: skip


def test_every_attention_gives_a_row_beside_torchs(tiny, tmp_path, capfd):
    assert qbench(*tiny, "--out", tmp_path / "bench.json") == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["attention"] for row in found["rows"]] == [
        "softmax/torch", "softmax/reference", "softpick/reference",
    ]  # fmt: skip
    torchs, ours, other = (row["loss"] for row in found["rows"])
    assert torchs == pytest.approx(ours, abs=1e-4)  # the same function
    assert other == pytest.approx(4.16, abs=0.2)  # ln 64: random tokens
    text = capfd.readouterr().out
    assert len(re.findall(r"\| +1\.000 +\|", text)) == 1  # torch's beside itself
    assert (tmp_path / "bench.md").read_text() == text.rstrip("\n") + "\n"


def test_the_forward_pass_alone(tiny, capfd):
    attention = ("--attention", "sigmoid", "--attention", "sigmoid, ALiBi")
    assert qbench(*tiny, *attention, "--forward") == 0
    text = capfd.readouterr().out
    assert "sigmoid/reference " in text
    assert "sigmoid/reference, ALiBi " in text
    assert "data and forward pass, without gradients" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "huge"], "--shape huge: unknown, or not on cpu; possible: '27m', '124m'"),
        (["--attention", "softplus"], "--attention softplus: unknown, or not on cpu; possible: "),
        (["--attention", "softmax, cuDNN"], "--attention softmax, cuDNN: unknown, or not on cpu;"),
    ],
)
def test_what_is_unknown_is_refused(options, said):
    with pytest.raises(RecipeError, match=said):
        qbench("bench", "training", "--device", "cpu", *options)
