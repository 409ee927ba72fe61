"""A trained 27M pair against figures of an independent implementation (float32)."""

import json
from pathlib import Path

import pytest
import torch
from loading import load_model

from qbench.analysis.measure import measure
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.quantizers.linear import linears

SHARED = Path(__file__).parents[3] / "shared"
PAGES = SHARED / "data" / "eval" / "wikitext" / "test_document_level.jsonl"

pytestmark = pytest.mark.skipif(
    not PAGES.is_file(), reason="the trained 27M pair and WikiText are not beside the project"
)

# perplexity, sink rates at ε 0.2 and 0.3, zeros, kurtosis of all values
FIGURES = {
    "softmax": (37.467, 26 / 576, 12 / 576, 0.0, 47.3),
    "softpick": (36.494, 0.0, 0.0, 0.864, 34.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", FIGURES)
def test_what_is_measured_is_what_an_independent_implementation_gives(normalizer):
    """Of the first 8 pages, <s> and 511 tokens of each."""
    figures = FIGURES[normalizer]
    checkpoint = find(str(SHARED / "checkpoints" / f"{normalizer}-27M"))
    assert checkpoint.normalizer == normalizer
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    rows = [
        tokenizer.encode(json.loads(line)["page"], add_special_tokens=False)[:511]
        for line in PAGES.read_text().splitlines()[:8]
    ]
    ids = torch.tensor([[tokenizer.bos_token_id, *row] for row in rows])
    names = list(linears(model))
    result = measure(model, ids, tokenizer=tokenizer, linears=names, batch=4)
    assert result.perplexity == pytest.approx(figures[0], abs=2e-3)
    assert result.sinks[0].rates["0.2"] == pytest.approx(figures[1], abs=1e-9)
    assert result.sinks[0].rates["0.3"] == pytest.approx(figures[2], abs=1e-9)
    assert result.zeros == pytest.approx(figures[3], abs=5e-4)
    assert result.hidden.kurtosis == pytest.approx(figures[4], abs=0.05)
