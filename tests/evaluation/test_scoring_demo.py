"""The bundled pair and tasks through lm-eval itself: every kind of task, both normalizers."""

from pathlib import Path

import pytest
import scoring_models
import torch
from loading import load_model

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.evaluation.degradation import correct_requests
from qbench.evaluation.evaluate import evaluate
from qbench.evaluation.loaded import load_task
from qbench.evaluation.scoring import language_model
from qbench.evaluation.tasks import plan_task

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
TASKS = ("demo_choice", "demo_lastword", "demo_pages")
LENGTH = 96  # so that pages need several windows


@pytest.fixture(scope="module", params=["softmax", "softpick"])
def pair(request):
    checkpoint = find(str(DEMO / request.param))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    assert model.config._attn_implementation == f"qbench-{request.param}-reference"
    return model, load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def tasks():
    return {
        name: load_task(plan_task(name, data=DEMO / "data", definitions=DEMO / "tasks"))
        for name in TASKS
    }


KEY = "0" * 64


def scorer(pair, mode, limit=None):
    return language_model(*pair, settings(mode, limit=limit))


def settings(mode, limit=None):
    return scoring_models.settings(mode, max_length=LENGTH, limit=limit)


def test_the_right_answers_are_those_that_accuracy_counts(pair, tasks):
    result = evaluate(scorer(pair, "fast"), tasks["demo_choice"], settings("fast", 30))
    gold = correct_requests(tasks["demo_choice"], 30)
    best = result.responses.groupby("document").apply(
        lambda rows: rows["request"].to_numpy()[rows["log_likelihood"].to_numpy().argmax()],
        include_groups=False,
    )
    accuracy = result.outcomes[result.outcomes["metric"] == "acc"].set_index("document")["value"]
    assert {d: float(best[d] == gold[d]) for d in gold} == accuracy.to_dict()
    assert set(correct_requests(tasks["demo_lastword"], 7).values()) == {0}
    assert correct_requests(tasks["demo_pages"], 7) == {}
