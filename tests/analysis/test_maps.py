"""Attention maps: weights of chosen heads, as the definition has them."""

import pytest
import torch
from loading import load_model
from small_recipe import DEMO

from qbench.analysis.attention_weights import TOKENS, attention_maps
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer


@pytest.fixture(scope="module", params=["softmax", "softpick"])
def loaded(request):
    checkpoint = find(str(DEMO / request.param))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    return model, load_tokenizer(checkpoint)


def test_maps_are_lower_triangles_of_weights_on_three_kinds_of_text(loaded):
    model, tokenizer = loaded
    prose = torch.randint(3, 400, (60,), generator=torch.Generator().manual_seed(0))
    result = attention_maps(model, tokenizer, prose, [(1, 3), (0, 0)])
    assert [(m.text, m.layer, m.head) for m in result] == [
        (text, *head) for text in ("prose", "code", "few-shot") for head in ((1, 3), (0, 0))
    ]
    for one in result:
        assert [len(row) for row in one.rows] == list(range(1, len(one.tokens) + 1))
        assert len(one.tokens) <= TOKENS
        sums = [sum(row) for row in one.rows]
        if model.config.qbench_normalizer == "softmax":
            assert sums == pytest.approx([1.0] * len(sums), abs=2e-3)
        else:
            assert all(total <= 1.001 for total in sums)
