"""Prompts that chance decides are those that lm-eval makes with its own defaults."""

from __future__ import annotations

import json
import random

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from scoring_models import llama, scorer, settings, text

from qbench.evaluation.evaluate import evaluate
from qbench.evaluation.loaded import load_task
from qbench.evaluation.tasks import plan_task

TASK = """
task: quiz
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}}}
output_type: multiple_choice
training_split: train
test_split: test
num_fewshot: 5
doc_to_text: "Q: {{{{text}}}} A:"
doc_to_choice: "{{{{options}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data" / "quiz"
    data.mkdir(parents=True)
    for split, count, seed in (("train", 40, 0), ("test", 6, 100)):
        rows = [
            {"text": text(seed + i, 3), "options": ["yes", "no"], "right": i % 2}
            for i in range(count)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    definitions = tmp_path / "tasks"
    definitions.mkdir()
    (definitions / "quiz.yaml").write_text(TASK.format(folder=data))
    return tmp_path


def prompts_of(lm, run):
    """What ``run`` asks of ``lm``."""
    asked, answer = [], lm.loglikelihood

    def listen(requests, **options):
        asked.extend(instance.args for instance in requests)
        return answer(requests, **options)

    lm.loglikelihood = listen
    run(lm)
    return asked


def ours(folder, **changes):
    task = load_task(plan_task("quiz", data=folder / "data", definitions=folder / "tasks"))
    chosen = settings("exact", max_length=400, **changes)
    return prompts_of(
        scorer(llama(), "exact", max_length=400), lambda lm: evaluate(lm, task, chosen)
    )


def test_five_shot_prompts_are_lm_evals(folder):
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    theirs = prompts_of(
        scorer(llama(), "exact", max_length=400),
        lambda lm: simple_evaluate(
            model=lm, tasks=["quiz"], task_manager=manager, bootstrap_iters=0
        ),
    )
    assert len(theirs) == 12
    assert theirs[0][0].count("Q:") == 6
    assert ours(folder) == theirs
    assert ours(folder) == theirs  # the task object again, whose generator has gone on
    assert ours(folder, seed=7) == theirs
    assert ours(folder, fewshot_seed=0) != theirs


SHUFFLE = """
import random


def shuffled(docs):
    def one(doc):
        options = list(doc["options"])
        random.shuffle(options)
        return {**doc, "options": options, "right": options.index("yes")}

    return docs.map(one)
"""


def test_what_a_definition_draws_while_it_is_built_is_what_lm_eval_draws(folder):
    """As gpqa does with its choices: lm-eval seeds before it builds tasks."""
    definition = folder / "tasks" / "quiz.yaml"
    shuffled = definition.read_text().replace(
        "num_fewshot: 5", "process_docs: !function own.shuffled"
    )
    definition.write_text(shuffled.replace("training_split: train\n", ""))
    (folder / "tasks" / "own.py").write_text(SHUFFLE)
    random.seed(99)
    drawn = ours(folder)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    theirs = prompts_of(
        scorer(llama(), "exact", max_length=400),
        lambda lm: simple_evaluate(
            model=lm, tasks=["quiz"], task_manager=manager, bootstrap_iters=0
        ),
    )
    assert drawn == theirs
    assert ours(folder) == drawn
