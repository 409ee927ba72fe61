"""The bench of scoring on the bundled pair: what it compares, and that it compares."""

import json
from pathlib import Path

import pytest
import torch
from loading import load_model
from scoring_models import settings

from qbench.bench import evaluation_speed as evaluation
from qbench.bench.evaluation_speed import MODES, compare, table
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.scoring import Scorer
from qbench.evaluation.tasks import plan_task

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture(scope="module")
def model():
    return load_model(find(str(DEMO / "softpick")), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(find(str(DEMO / "softpick")))


def tasks(*names):
    return [
        load_task(plan_task(name, data=DEMO / "data", definitions=DEMO / "tasks")) for name in names
    ]


RUNS = ("lm-eval", "exact", "fast", "fast, rows kept", "fast, damage measured")


@pytest.fixture(scope="module")
def comparison(model, tokenizer):
    """Its warm-up scores fewer documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "WARM_UP", 1)
        return compare(
            model,
            tokenizer,
            tasks("demo_choice", "demo_pages"),
            {mode: settings(mode, max_length=128, limit=5) for mode in MODES},
            log=print,
        )


def test_every_mode_scores_every_task_and_all_together(comparison):
    scored = {(row["task"], row["mode"]) for row in comparison["rows"]}
    names = ("demo_choice", "demo_pages", "all")
    assert scored == {(t, m) for t in names for m in RUNS}
    for row in comparison["rows"]:
        assert row["documents"] == (10 if row["task"] == "all" else 5)
        assert row["seconds"] >= row["scoring_seconds"] > 0
        assert ("speed" not in row) == (row["mode"] == "lm-eval")


def test_exact_differs_by_nothing_and_fast_by_rounding(comparison):
    rows = {(row["task"], row["mode"]): row for row in comparison["rows"]}
    assert rows["all", "exact"]["largest_difference"] == 0
    assert rows["demo_choice", "fast"]["largest_difference"] < 1e-4
    assert rows["demo_pages", "fast"]["largest_difference"] < 1e-2
    assert rows["all", "fast"]["changed_answers"] == 0
    for run in RUNS[3:]:  # who watches changes nothing
        differences = [rows["all", which]["largest_difference"] for which in (run, "fast")]
        assert differences[0] == differences[1]


def test_generated_answers_are_compared_as_they_are(model, tokenizer, tmp_path, monkeypatch):
    """They have no log-likelihood, and each of the task's filters has its row."""
    rows = [{"text": f"Fog covered the valley {n}"} for n in range(3)]
    data = tmp_path / "lambada_word" / "test.jsonl"
    data.parent.mkdir()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(
        plan_task("lambada_word", data=tmp_path, definitions=DEMO.parent / "generation")
    )
    real = Scorer.generate_until
    monkeypatch.setattr(
        Scorer, "generate_until", lambda self, asked: [*real(self, asked)[:-1], "another"]
    )
    chosen = {mode: settings(mode, max_length=128) for mode in ("lm-eval", "exact")}
    found = compare(model, tokenizer, [task], chosen, log=print)
    row = next(row for row in found["rows"] if row["mode"] == "exact")
    assert (row["documents"], row["requests"], row["changed_answers"]) == (3, 3, 1)
    assert row["scoring_seconds"] > 0
    assert (row["largest_difference"], row["mean_difference"]) == (None, None)
    assert "nan" not in table(found)
