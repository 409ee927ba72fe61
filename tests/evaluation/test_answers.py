"""Answers of models: what is asked, read and counted."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scoring_models import evaluate, llama, scorer, settings, text, tokenizer
from test_kl import quantized_like

from qbench.comparison.answers import answer_damage, classes
from qbench.errors import DataError, EvaluationError
from qbench.evaluation.answers import answer
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.kl_observer import BaselineWriter, KLObserver
from qbench.evaluation.scoring.generate import Prompt, add_noise, decode, decode_by_transformers
from qbench.evaluation.settings import AnswerSettings
from qbench.evaluation.tasks import Row, plan_answers, plan_task, prompt_fields
from qbench.metrics import VARIANCE, variance_name
from qbench.records import ANSWERS

CHAT = {"tokenizer": tokenizer(), "ends": frozenset({1})}
CHECKED = {"max_length": 96, "add_bos": False}


def asked(prompts, samples=1, temperature=0.0, limit=20):
    rows = [prompt_fields(Row(line=1, fields={"prompt": p, "target": "a"}), "p") for p in prompts]
    answers = AnswerSettings(
        max_new_tokens=limit, samples=samples, temperature=temperature, from_task=False
    )
    return SimpleNamespace(
        name="answers", label="answers", answers=answers, task=SimpleNamespace(eval_docs=rows),
        location=lambda document: f"document {document}",
    )  # fmt: skip


PROMPTS = [text(1, 4), text(2, 9), text(3, 2)]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_kl_along_answers_is_that_of_float64(mode):
    model = llama()
    other = quantized_like(model, 0.3)
    task, writer = asked(PROMPTS, limit=30), BaselineWriter()
    run = {"read": True, "settings": settings(mode, **CHECKED), **CHAT}
    base = answer(scorer(model, mode, max_length=96, observer=writer), task, base=None, **run)
    states = writer.hidden_states()
    meter = KLObserver(states)
    read = answer(scorer(other, mode, max_length=96, observer=meter), task,
                  base=states.tasks["answers"], **run)  # fmt: skip
    table = read.table(meter.divergences["answers"], lambda ids: [str(i) for i in ids])
    assert read.tokens.tolist() == base.tokens.tolist()
    for document, ids in enumerate(CHAT["tokenizer"](PROMPTS)["input_ids"]):
        rows = table[(table["document"] == document) & (table["position"] >= 0)]
        tokens = torch.tensor([[*ids, *rows["text"].astype(int)]])
        with torch.no_grad():
            p, q = (
                m.double()(tokens).logits[0, len(ids) - 1 : -1].log_softmax(-1)
                for m in (model, other)
            )
        chosen = tokens[0, len(ids) :, None]
        best = q.scatter(1, chosen, -torch.inf).max(-1).values
        expected = {
            "kl": (p.exp() * (p - q)).sum(-1),
            "change": (q - p).gather(1, chosen)[:, 0],
            "margin": q.gather(1, chosen)[:, 0] - best,
            "agrees": (p.argmax(-1) == q.argmax(-1)).double(),
        }
        for name, tolerance in (("kl", 1e-5), ("change", 5e-3), ("margin", 5e-3), ("agrees", 0)):
            assert np.allclose(rows[name], expected[name], atol=tolerance, rtol=0), name
    assert table["kl"].mean() > 0.01


def test_sampled_answers_do_not_depend_on_the_batch():
    """In slots, one by one, and by transformers' own generate."""
    model = llama()
    ids = CHAT["tokenizer"]([text(i, 2 + i % 3) for i in range(6)])["input_ids"]
    prompts = [
        Prompt(ids=i, limit=12, temperature=0.9, seed=seed)
        for i, seed in itertools.product(ids, (1, 2**32 - 1))
    ]
    together = decode(model, prompts, ends={1})
    assert together == [decode(model, [one], ends={1})[0] for one in prompts]
    assert together == decode_by_transformers(model, prompts, ends={1}, batch_size=4)
    greedy = decode(model, [Prompt(ids=i, limit=12) for i in ids], ends={1})
    assert together[::2] != together[1::2] != greedy


def test_draws_have_the_distribution_of_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(40_000, 4)
    seed, position = torch.arange(40_000) // 200, torch.arange(40_000) % 200
    drawn = add_noise(logits, seed, position, torch.full((40_000,), 0.7)).argmax(-1)
    share = torch.bincount(drawn, minlength=4) / 40_000
    assert torch.allclose(share, (logits[0] / 0.7).softmax(-1), atol=0.01)


def test_outcomes_are_means_over_samples_with_their_variance():
    found = answer(scorer(llama(), "exact", max_length=96), asked(PROMPTS, 3, 1.5),
                   settings("exact", **CHECKED), **CHAT, base=None, read=False)  # fmt: skip
    table = found.scored.outcomes.pivot(index="document", columns="metric", values="value")
    lengths = np.array(found.lengths, dtype=float).reshape(3, 3)
    assert np.allclose(table["length"], lengths.mean(1))
    assert np.allclose(table[variance_name("length")], lengths.var(1, ddof=1) / 3)
    assert len(found.scored.responses) == 9
    assert {score.metric for score in found.scored.scores} == {
        "exact_match", "stops", "repeats", "length",
    }  # fmt: skip


def test_a_prompt_without_room_for_its_answer_is_named():
    with pytest.raises(EvaluationError, match=r"document 1: the prompt has .* no room"):
        answer(scorer(llama(), "exact", max_length=96), asked(["a", text(1, 40)], limit=60),
               settings("exact", **CHECKED), **CHAT, base=None, read=False)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": " "}, "not a prompt; write"),
        ({"text": "a"}, "not a prompt; write"),
        ({"prompt": "a", "messages": []}, "not a prompt; write"),
        ({"messages": [{"role": "user"}]}, "not a prompt; write"),
        ({"prompt": "a", "target": 3}, "target must be a text"),
    ],
)
def test_a_malformed_line_is_refused_with_its_place(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=f"prompts.jsonl:2: {message}"):
        plan_answers(str(path), asked([]).answers, data=None, definitions=None)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["It", " is", " 42", ".", "<|im_end|>"], ["first token", "rest", "digits", "rest", "end"]),
        (["<think>", "so", "</think>", " a"], ["first token", "rest", "template", "rest"]),
        (['{"', "na", 'me":', ' "', "Bo", '"', "}"],
         ["first token", "JSON", "JSON", "JSON", "rest", "JSON", "JSON"]),
        (["See", ":\n", "```", "py\n", "x=1", "\n```", " end"],
         ["first token", "rest", "code", "code", "code", "code", "rest"]),
        (['He', ' said', ' "', "yes", '",'], ["first token", "rest", "rest", "rest", "rest"]),
    ],
)  # fmt: skip
def test_each_token_has_a_class(texts, expected):
    assert classes(texts) == expected


SAMPLED = """task: sampled
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{target}}"
repeats: 3
generation_kwargs: {until: [], do_sample: DRAWN, temperature: 0.9, max_gen_toks: 4}
filter_list:
- {name: FILTER, filter: [{function: FILTER}, {function: take_first}]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_positions_of_tokens_have_five_ranges():
    places = [0, 1, 15, 16, 63, 64, 255, 256, 900]
    table = pd.DataFrame({"document": 0, "sample": 0, "text": "a", "position": places,
                          "kl": places, "agrees": True})  # fmt: skip
    metrics = {"metric": ["agreed_tokens", "length"], "value": 9.0}
    outcomes = pd.DataFrame({"task": ANSWERS, "document": 0, **metrics})
    store = SimpleNamespace(answers=lambda _: table, outcomes=lambda _: outcomes)
    ranges = answer_damage(store, "cell", "unquantized").by_position
    means = {"1": 0, "2–16": 8, "17–64": 39.5, "65–256": 159.5, "257–": 578}
    assert {name: each.kl for name, each in ranges.items()} == means


@pytest.mark.parametrize(
    ("drawn", "filter_", "expected"),
    [("true", "lowercase", [2 / 3, 0.0]), ("false", "lowercase", [1.0, 0.0]),
     ("true", "majority_vote", [1.0, 0.0])],
)  # fmt: skip
def test_drawn_repeats_are_samples_of_a_prompt(tmp_path, drawn, filter_, expected):
    """lm-eval takes the first of three answers; a filter that makes one of all is left as it is."""
    (tmp_path / "sampled").mkdir()
    rows = [{"text": "a", "target": "yes"}, {"text": "b", "target": "yes"}]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "sampled" / "test.jsonl").write_text(lines)
    (tmp_path / "sampled.yaml").write_text(
        SAMPLED.replace("DRAWN", drawn).replace("FILTER", filter_)
    )
    said = {"a": ["yes", "no", "yes"], "b": ["no", "no", "no"]}
    given = {text: iter(answers) for text, answers in said.items()}
    model = SimpleNamespace(generate_until=lambda asked: [next(given[a.args[0]]) for a in asked])
    task = load_task(plan_task("sampled", data=tmp_path, definitions=tmp_path))
    found = evaluate(model, task, settings("exact"))
    table = found.outcomes.pivot(index="document", columns="metric", values="value")
    assert table[f"exact_match [{filter_}]"].tolist() == pytest.approx(expected)
    spread = [name for name in table if name.endswith(VARIANCE)]
    assert bool(spread) == (expected[0] < 1)
    if spread:
        assert table[spread[0]].tolist() == pytest.approx([1 / 9, 0.0])
    answers = found.responses[found.responses["filter"].isna()]
    assert answers["answer"].tolist() == said["a"] + said["b"]
