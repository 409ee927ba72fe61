"""What a task asks: the same text and token ids wherever it is made again."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace

import pytest
from lm_eval.api.model import LM
from small_recipe import DEMO

from qbench.checkpoints import find, load_tokenizer
from qbench.evaluation.evaluate import asked, evaluate
from qbench.evaluation.scoring.asked import Asked, Ids, Known
from qbench.evaluation.settings import FEWSHOT_SEED
from qbench.evaluation.tasks import load_task, plan_task

DRAWN = """
task: drawn
dataset_path: json
test_split: test
output_type: loglikelihood
doc_to_text: !function drawing.text
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
DRAWING = """
import random

import numpy as np


def text(document):
    return f"{document['question']} {random.randrange(10**9)} {np.random.randint(10**9)}"
"""


class Recorder(LM):
    """Notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.arguments = []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.arguments += [one.args for one in requests]
        return [(-1.0, True) for _ in requests]

    loglikelihood_rolling = generate_until = None


@pytest.mark.parametrize("seed", [0, 3])
def test_text_that_a_tasks_own_code_draws_is_shown_as_it_was_asked(tmp_path, seed):
    (tmp_path / "drawn.yaml").write_text(DRAWN)
    (tmp_path / "drawing.py").write_text(DRAWING)
    (tmp_path / "data" / "drawn").mkdir(parents=True)
    lines = [json.dumps({"question": one, "answer": "7"}) for one in ("One", "Two", "Three")]
    (tmp_path / "data" / "drawn" / "test.jsonl").write_text("\n".join(lines))
    planned = plan_task("drawn", data=tmp_path / "data", definitions=tmp_path)
    task, model = load_task(planned), Recorder()
    settings = SimpleNamespace(limit=None, seed=seed, fewshot_seed=FEWSHOT_SEED)
    evaluate(model, task, settings)
    record = SimpleNamespace(
        cell="softpick/bf16",
        documents={"drawn": task.digest},
        key_parts={"scoring": {"seed": seed, "fewshot_seed": FEWSHOT_SEED}},
    )
    for document, arguments in enumerate(model.arguments):
        assert asked(record, [planned], document)["drawn"] == (arguments,)


def test_ids_of_requests_that_are_gone_are_never_those_of_others():
    """CPython puts a new object where the last one was: its id is no proof."""
    ids = Ids()
    model = Asked(load_tokenizer(find(str(DEMO / "softpick"))), False, ids)

    def ask(text):
        requests = [SimpleNamespace(args=(text, " a"))]
        with pytest.raises(Known):
            model.loglikelihood(requests)

    ask("the first")
    gc.collect()
    others = [[SimpleNamespace(args=("another", " b"))] for _ in range(1000)]
    assert not any(ids.of_pairs(one, ids.prefix_id) for one in others)
