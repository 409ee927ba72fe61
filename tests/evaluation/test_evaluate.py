"""Tasks of every kind give what lm-eval's ``simple_evaluate`` gives with HFLM, to the bit."""

import json
import random
import time
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from scoring_models import evaluate, llama, scorer, settings, text, tokenizer

from qbench.errors import DataError, EvaluationError
from qbench.evaluation.evaluate import (
    ask,
    build_ahead,
    group_scores,
    in_turn,
    judge,
    load_task,
    rebuild_requests,
    shared_samples,
)
from qbench.evaluation.scoring.batching import characters
from qbench.evaluation.scoring.scorer import pinned_hflm
from qbench.evaluation.settings import FEWSHOT_SEED, Chat
from qbench.evaluation.tasks import expand, plan_task

DATA = "dataset_path: json\ntest_split: test\n"
CHOICE = """output_type: multiple_choice
doc_to_text: "Q: {{text}} A:"
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: f1}, {metric: brier_score}]
"""
# By name: a definition, with the code beside it in own.py.
TASKS = {
    "zero_shot": CHOICE,
    "five_shot": CHOICE + "training_split: train\nfewshot_split: train\nnum_fewshot: 5\n",
    "first_shots": CHOICE
    + "training_split: train\nnum_fewshot: 2\nfewshot_config: {sampler: first_n, split: train}\n",
    "shuffled": CHOICE + "process_docs: !function own.shuffled\n",
    "coded": """output_type: multiple_choice
doc_to_text: !function own.drawn
doc_to_choice: ["yes", "no"]
doc_to_target: right
process_results: !function own.judged
metric_list: [{metric: sure, aggregation: mean}, {metric: pairs, aggregation: !function own.agree}]
""",
    "word": """output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "page": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "sums": """output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text.split(' ')[0]}}"
generation_kwargs: {until: [" the"], do_sample: false, max_gen_toks: 6}
repeats: 2
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
""",
}
OWN = """
import random

import numpy as np


def shuffled(docs):
    def one(doc):
        options = list(doc["options"])
        random.shuffle(options)
        return {**doc, "options": options, "right": options.index("yes")}

    return docs.map(one)


def drawn(doc):
    doc["options"].append("changed")  # as code may: what it is given is its own
    return f"{doc['text']} {random.randrange(99)} {np.random.randint(99)}"


def judged(doc, results):
    assert len(doc["options"]) == 2
    best = max(range(2), key=lambda i: results[i][0])
    return {"sure": results[best][0], "pairs": (doc["right"], best)}


def agree(items):
    return sum(gold == guess for gold, guess in items) / len(items)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tasks")
    for name in TASKS:
        (made / "data" / name).mkdir(parents=True)
        for split, count, seed in (("train", 30, 100), ("test", 7, 0)):
            rows = [
                {"text": text(seed + i, 4 + 3 * i), "options": ["yes", "no"], "right": i % 2}
                for i in range(count)
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (made / "data" / name / f"{split}.jsonl").write_text(lines)
    (made / "own").mkdir()
    (made / "own" / "own.py").write_text(OWN)
    for name, definition in TASKS.items():
        files = {split: str(made / "data" / name / f"{split}.jsonl") for split in ("train", "test")}
        kwargs = f"dataset_kwargs: {json.dumps({'data_files': files})}\n"
        (made / "own" / f"{name}.yaml").write_text(f"task: {name}\n{DATA}{kwargs}{definition}")
    (made / "own" / "both.yaml").write_text(
        "group: both\ntask: [word, zero_shot]\naggregate_metric_list: [{metric: acc}]\n"
    )
    (made / "own" / "all.yaml").write_text(
        "group: all\ngroup_alias: All\ntask: [both, first_shots]\naggregate_metric_list:\n"
        "- {metric: acc, weight_by_size: false, filter_list: none}\n- {metric: perplexity}\n"
    )
    return made


def loaded(folder, name):
    return load_task(plan_task(name, data=folder / "data", definitions=folder / "own"))


def theirs(folder, name, chosen, template=None, **changes):
    """Of a task object: built by name, it would draw its first prompt once more before the rest."""
    manager = TaskManager(include_path=str(folder / "own"), include_defaults=False)
    random.seed(0)
    np.random.seed(1234)
    tasks = [name] if name == "all" else list(manager.load([name])["tasks"].values())
    model = pinned_hflm(llama(), tokenizer(), chosen)
    model.tokenizer.chat_template = template
    with patch("lm_eval.evaluator.add_env_info"):  # a second of processes about the machine
        return simple_evaluate(
            model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True,
            **changes,
        )  # fmt: skip


def assert_same(found, results, name):
    values = {score.metric: score.value for score in found.scores}
    expected = {
        key.replace(",none", "").replace(",", " [") + ("]" if ",none" not in key else ""): value
        for key, value in results["results"][name].items()
        if "," in key and "_stderr" not in key
    }
    assert values == expected
    samples = results["samples"][name]
    logged = [s for s in samples if s["filter"] == samples[0]["filter"]]
    answers = found.responses[found.responses["filter"].isna()]
    for sample in logged:
        rows = answers[answers["document"] == sample["doc_id"]]
        first = [a for one in sample["resps"] for a in one]
        if isinstance(first[0], str):
            assert rows["answer"].tolist() == first
        else:
            numbers = [a[0] if isinstance(a, tuple | list) else a for a in first]
            assert rows["log_likelihood"].tolist() == numbers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("first_shots", "zero_shot")))
        for name in TASKS
    ],
)
def test_a_task_gives_what_simple_evaluate_gives_to_the_bit(folder, name):
    chosen = settings("exact", max_length=900, limit=6)
    model, task = scorer(llama(), "exact", max_length=900), loaded(folder, name)
    results = theirs(folder, name, chosen, limit=6)
    for _ in range(2):  # the second time most requests are there already
        assert_same(evaluate(model, task, chosen), results, name)
    longer = evaluate(model, task, settings("exact", max_length=900))
    assert longer.outcomes["document"].nunique() == 7


@pytest.mark.parametrize("name", ["word", "page"])
def test_a_perplexity_beyond_the_largest_number_is_infinite(folder, name):
    model = llama()
    model.lm_head.weight.data *= 1e6
    found = evaluate(
        scorer(model, "exact", max_length=900),
        loaded(folder, name),
        settings("exact", max_length=900),
    )
    values = {one.metric: one.value for one in found.scores}
    assert {values[metric] for metric in values if "perplexity" in metric} == {np.inf}
    assert np.isfinite(values["acc" if name == "word" else "bits_per_byte"])


CHAT = (
    "{{ bos_token }}{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER_ALONE = CHAT.replace(
    "{% for", "{{ raise_exception('no') if messages[0].role == 'system' }}{% for"
)


@pytest.mark.parametrize(
    ("name", "multiturn", "system"),
    [
        ("five_shot", True, "Answer briefly."),
        ("five_shot", False, None),
        pytest.param("page", True, "Answer briefly.", marks=pytest.mark.slow),
        pytest.param("sums", True, "Answer briefly.", marks=pytest.mark.slow),
    ],
)
def test_conversations_are_those_of_simple_evaluate_to_the_bit(folder, name, multiturn, system):
    asked = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn,
             "system_instruction": system}  # fmt: skip
    chosen = settings("exact", max_length=900, limit=4, chat=Chat(**asked))
    model, task = scorer(llama(), "exact", max_length=900), loaded(folder, name)
    model.hflm.tokenizer.chat_template = CHAT
    assert_same(
        evaluate(model, task, chosen), theirs(folder, name, chosen, CHAT, limit=4, **asked), name
    )
    whole = "".join(task.task.instances[0].args[:1])
    if name == "five_shot":
        assert whole.startswith("<s>[system] Answer briefly." if system else "<s>[user] Q: ")
        assert whole.count("[assistant]") == (6 if multiturn else 1)


def test_a_template_that_cannot_be_rendered_is_said_with_its_remedy(folder):
    model = scorer(llama(), "exact", max_length=900)
    model.hflm.tokenizer.chat_template = "{{ x"
    chat = settings("exact", max_length=900, chat=Chat(apply_chat_template=True))
    with pytest.raises(EvaluationError, match="chat template cannot render a prompt: unexpected"):
        evaluate(model, loaded(folder, "word"), chat)
    load_task.cache_clear()


def test_a_template_without_a_system_role_takes_no_instruction_or_description(folder):
    chat = Chat(apply_chat_template=True, system_instruction="Be brief.")
    model = scorer(llama(), "exact", max_length=900)
    model.hflm.tokenizer.chat_template = USER_ALONE
    with pytest.raises(EvaluationError, match="the model's chat template has no system role"):
        evaluate(model, loaded(folder, "word"), settings("exact", max_length=900, chat=chat))
    task = loaded(folder, "word")
    task.task.set_config("description", "Complete the text.")
    chat = Chat(apply_chat_template=True)
    with pytest.raises(EvaluationError, match="word: description: the model's chat template has"):
        evaluate(model, task, settings("exact", max_length=900, chat=chat))
    load_task.cache_clear()


def test_a_task_too_long_to_encode_ahead_leaves_room_for_the_next(folder, monkeypatch):
    tasks, encoded = [loaded(folder, name) for name in ("zero_shot", "word")], []
    build_ahead(tasks, settings("exact"), encoded.append)
    assert [len(pairs) for pairs in encoded] == [14, 7]
    less = characters(encoded[0]) - 1
    monkeypatch.setattr("qbench.evaluation.evaluate.KEPT_CHARACTERS", less)
    build_ahead(tasks, settings("exact"), encoded.append)
    assert [len(pairs) for pairs in encoded[2:]] == [7]


def test_tasks_of_one_template_share_a_sample(folder):
    tasks = [loaded(folder, name) for name in ("zero_shot", "shuffled", "five_shot", "word")]
    counts = {"zero_shot": 16, "shuffled": 16, "five_shot": 32, "word": 32}
    assert shared_samples(tasks, 32) == counts
    assert set(shared_samples(tasks[:2], 9).values()) == {8}


def test_the_next_task_is_prepared_and_the_last_judged_while_one_is_scored(folder):
    """But not beside one that may draw at random; scores are those of one after the other."""
    names = ("zero_shot", "word", "coded", "five_shot")
    chosen, model = settings("exact", max_length=900), scorer(llama(), "exact", max_length=900)
    alone = [evaluate(model, loaded(folder, name), chosen) for name in names]
    meanwhile, encode = [], model.prepare

    def prepare(kind, instances):
        encode(kind, instances)
        meanwhile.append(instances[0].task_name)

    def score(task, asked):
        kinds = asked()
        while task.name == "zero_shot" and "word" not in meanwhile:
            time.sleep(0.01)
        if task.name == "coded":  # which may draw: nothing runs beside it
            assert meanwhile[-1] == "judged word"
        meanwhile.append(f"scored {task.name}")
        wait = ask(model, task, kinds)
        return lambda: (wait(), judge(task, chosen), meanwhile.append(f"judged {task.name}"))[1]

    model.prepare = prepare
    tasks = [loaded(folder, name) for name in names]
    found = [judged.result() for _, judged in in_turn(model, tasks, chosen, score)]
    assert meanwhile.index("scored coded") < meanwhile.index("five_shot")  # whose code may draw
    for one, other in zip(alone, found, strict=True):
        assert one.scores == other.scores
        pd.testing.assert_frame_equal(one.responses, other.responses)


def test_groups_are_scored_as_by_simple_evaluate(folder):
    """A request a batch: lm-eval puts requests of all tasks of a group into one. A group within
    one has a score of its own."""
    chosen = settings("exact", max_length=900, batch_size=1)
    results = theirs(folder, "all", chosen)
    model = scorer(llama(), "exact", max_length=900, batch_size=1)
    members, groups = expand("all", folder / "own")
    assert members == ["word", "zero_shot", "first_shots"]
    scores = []
    for name in members:
        found = evaluate(model, loaded(folder, name), chosen)
        assert_same(found, results, name)
        scores += found.scores
    found = {(g.group, g.metric): g for g in group_scores(groups, scores)}
    assert set(found) == {("all", "acc"), ("all", "perplexity"), ("both", "acc")}
    for (group, metric), score in found.items():
        assert score.value == results["groups"][group][f"{metric},none"]
        assert score.documents == sum(s.documents for s in scores if s.task in score.tasks
                                      and s.metric == metric)  # fmt: skip
    assert found["all", "acc"].label == "All"
    assert found["all", "perplexity"].tasks == ("word",)
    errors = [s.stderr for s in scores if s.metric == "acc"]
    assert found["all", "acc"].stderr == pytest.approx(np.sqrt(np.square(errors).sum()) / 3)
    kept = [score for score in scores if score.task != "first_shots"]
    assert {g.group for g in group_scores(groups, kept)} == {"both"}  # never of other tasks


@pytest.mark.parametrize("name", ["five_shot", "coded"])
def test_seeds_are_counted_from_lm_evals(folder, name):
    chosen = settings("exact", max_length=900, seed=3, fewshot_seed=5)
    results = theirs(
        folder, name, chosen, random_seed=3, numpy_random_seed=1237, torch_random_seed=1237,
        fewshot_random_seed=5,
    )  # fmt: skip
    found = evaluate(scorer(llama(), "exact", max_length=900), loaded(folder, name), chosen)
    assert_same(found, results, name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"unsafe_code": "true"}, "runs code that the model writes"),
     ({"doc_to_image": "text"}, "asks about images")],
)  # fmt: skip
def test_what_is_not_run_here_is_refused(folder, tmp_path, changes, words):
    ((key, value),) = changes.items()
    (tmp_path / "odd.yaml").write_text(f"task: odd\n{DATA}{key}: {value}\n{TASKS['zero_shot']}")
    (tmp_path / "odd").symlink_to(folder / "data" / "zero_shot")
    with pytest.raises(DataError, match=f"odd: it {words}"):
        plan_task("odd", data=tmp_path, definitions=tmp_path)


class Listener(LM):
    """Notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.arguments = []

    def loglikelihood(self, requests, disable_tqdm=False):
        self.arguments += [one.args for one in requests]
        return [(-1.0, True) for _ in requests]

    loglikelihood_rolling = generate_until = None


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", ["coded", "five_shot"])
def test_text_that_was_drawn_is_shown_as_it_was_asked(folder, name, seed):
    spec = plan_task(name, data=folder / "data", definitions=folder / "own")
    task, model = load_task(spec), Listener()
    evaluate(model, task, settings("exact", seed=seed))
    record = SimpleNamespace(
        cell="softpick/bf16",
        documents={name: task.digest},
        key_parts={"scoring": {"seed": seed, "fewshot_seed": FEWSHOT_SEED}},
    )
    found = rebuild_requests(record, [spec], 7)[name]
    assert found.keys() == set(range(7))
    for document in range(7):
        assert found[document].texts == tuple(model.arguments[2 * document : 2 * document + 2])
    record.documents[name] = "0"
    with pytest.raises(DataError, match="differ from those of softpick/bf16"):
        rebuild_requests(record, [spec], 1)


@pytest.mark.parametrize("name", ["zero_shot", "shuffled"])
def test_the_right_answer_is_the_one_that_lm_eval_counts(folder, name):
    """A model that finds each document's target likeliest is always right."""
    spec = plan_task(name, data=folder / "data", definitions=folder / "own")
    task = load_task(spec)
    record = SimpleNamespace(cell="a/b", documents={name: task.digest}, key_parts={})
    asked = rebuild_requests(record, [spec], 7)[name]
    assert all(isinstance(one.target, int) for one in asked.values())
    model = Listener()
    targets = [i == one.target for one in asked.values() for i in range(len(one.texts))]
    model.loglikelihood = lambda requests, **_: [
        (0.0 if right else -9.0, right) for right, _ in zip(targets, requests, strict=True)
    ]
    found = evaluate(model, task, settings("exact", limit=7))
    assert {s.metric: s.value for s in found.scores}["acc"] == 1.0
