"""The demo's pair: its on-disk format, alike in all but the normalizer, and far above chance."""

import json

import pytest
import torch

PAIR = {"softmax": "parallel_attn", "softpick": "parallel_softpick_attn"}


@pytest.mark.parametrize("file", ["config.json", "training.json"])
def test_the_pair_differs_only_in_its_attention(demo, file):
    first, second = (json.loads((demo / name / file).read_text()) for name in PAIR)
    different = {key for key in {*first, *second} if first.get(key) != second.get(key)}
    assert different == {"config.json": {"attn_impl"}, "training.json": {"attention", "loss"}}[file]


@pytest.fixture(scope="module")
def tokenizer(demo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo / "softpick")


@pytest.mark.parametrize("name", PAIR)
def test_both_models_answer_far_above_chance(demo, tokenizer, name):
    from loading import load_model

    from qbench.checkpoints import find

    model = load_model(find(str(demo / name)), dtype=torch.float32, device="cpu")
    assert model.config._attn_implementation == f"qbench-{name}-reference"
    with open(demo / "data/demo_choice/test.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:200:5]
    right = 0
    for row in rows:
        scores = [score(model, tokenizer, row["query"], f" {c}") for c in row["choices"]]
        right += max(range(4), key=scores.__getitem__) == row["answer"]
    assert right / len(rows) > 0.6  # chance is 0.25, ± 0.07


def score(model, tokenizer, context: str, ending: str) -> float:
    """Log-likelihood of ``ending`` after ``context``, in nats."""
    start = len(tokenizer(context)["input_ids"])
    ids = torch.tensor([tokenizer(context + ending)["input_ids"]])
    with torch.no_grad():
        logs = model(ids[:, :-1]).logits.log_softmax(-1)
    return logs[0, start - 1 :].gather(-1, ids[0, start:, None]).sum().item()
