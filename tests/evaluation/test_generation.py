"""Generated text: steps whose logits are not numbers fail, in every mode."""

from __future__ import annotations

import pytest
from lm_eval.api.instance import Instance
from scoring_models import llama, scorer, text, tokenizer

from qbench.errors import EvaluationError


def generation(prompt, document=0, most=4):
    return Instance(
        request_type="generate_until",
        doc={},
        arguments=(prompt, {"until": ["\n"], "max_gen_toks": most}),
        idx=0,
        metadata=("generation", document, 1),
    )


@pytest.mark.parametrize("mode", ["lm-eval", "exact", "fast"])
def test_generation_is_hflms_own(mode):
    model, requests = llama(), [generation(text(i, 5), i) for i in range(5)]
    lm = scorer(model, mode)
    expected = lm.hflm.generate_until(requests, disable_tqdm=True)
    assert lm.generate_until(requests, disable_tqdm=True) == expected
    assert not model._forward_hooks


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["lm-eval", "exact", "fast"])
def test_logits_that_are_no_numbers_fail_where_the_probe_met_none(mode, value):
    """Embedding rows of a few tokens are broken, as of a checkpoint that was written badly."""
    model = llama()
    lm = scorer(model, mode)
    word = tokenizer().encode(" photosynthesis")[-1]
    assert word > 8  # the probe's tokens
    model.model.embed_tokens.weight.data[word] = value
    good, bad = "the cat sat on", "the cat sat on photosynthesis"
    lm.generate_until([generation(good)], disable_tqdm=True)
    with pytest.raises(EvaluationError, match="NaN or infinite, which no scoring mode can mend"):
        lm.generate_until([generation(good), generation(bad, 1)], disable_tqdm=True)
    assert not model._forward_hooks


def test_tokens_that_the_model_does_not_embed_are_the_tokenizers_fault():
    """On a GPU an index out of range would end the process, and all cells after it."""
    model = llama()
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[:40].clone()
    lm = scorer(model, "exact")
    request = Instance(request_type="loglikelihood", doc={}, arguments=(text(0, 5), text(1, 3)),
                       idx=0, metadata=("t", 0, 1))  # fmt: skip
    with pytest.raises(EvaluationError, match=r"gives token \d+, and the model embeds 40"):
        lm.loglikelihood([request], disable_tqdm=True)
    with pytest.raises(EvaluationError, match="embeds 40"):
        lm.greedy([[1, 2, 41]], 1)
