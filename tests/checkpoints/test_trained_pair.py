"""A trained 27M pair against figures of an independent implementation (float32)."""

import json
import math
from pathlib import Path

import pytest
import torch
from loading import load_model

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer

SHARED = Path(__file__).parents[3] / "shared"
PAGES = SHARED / "data" / "eval" / "wikitext" / "test_document_level.jsonl"

pytestmark = pytest.mark.skipif(
    not PAGES.is_file(), reason="the trained 27M pair and WikiText are not beside the project"
)


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        pytest.param("softmax", 37.467, marks=pytest.mark.slow),
        ("softpick", 36.494),
    ],
)
def test_perplexity_is_that_of_an_independent_implementation(normalizer, expected):
    checkpoint = find(str(SHARED / "checkpoints" / f"{normalizer}-27M"))
    assert checkpoint.normalizer == normalizer
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    total = count = 0
    for line in PAGES.read_text().splitlines()[:8]:
        ids = tokenizer.encode(json.loads(line)["page"], add_special_tokens=False)[:511]
        tokens = torch.tensor([[tokenizer.bos_token_id, *ids]])
        with torch.inference_mode():
            logits = model(tokens, use_cache=False).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        count += tokens.shape[1] - 1
    assert math.exp(total / count) == pytest.approx(expected, abs=2e-3)
