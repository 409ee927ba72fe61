"""Generated answers on CUDA: steps captured as graphs, on the kernels."""

import gc

import pytest
import torch
from scoring_models import llama, prompt, text, tokenizer

from qbench.attention.transformers import set_attention
from qbench.evaluation.scoring import generate, language_model
from qbench.evaluation.settings import ScoringSettings
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of

# fp8: on a grid of integers a token's lowest value may lie between two codes, so that the last bit
# of a product decides
FP8 = "fp8-token"


@pytest.mark.parametrize("cache", [None, FP8], ids=["unquantized", "fp8-token"])
@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_captured_steps_answer_as_hflm_does(normalizer, cache, monkeypatch):
    """Five slots for 17 prompts of different lengths: slots are filled again, move to the left,
    and at last are fewer."""
    model = llama(heads=4).cuda()
    assert set_attention(model, normalizer=normalizer) == f"{normalizer}/triton"
    if cache is not None:
        model = apply(model, config_of({"kv": cache}, compute_dtype="float32"), {})
    captured, capture = [], generate._Decoding._capture

    def noted(run):
        captured.append(capture(run))
        return captured[-1]

    monkeypatch.setattr(generate, "at_once", lambda model, length: 5)
    monkeypatch.setattr(generate, "SPARE_COLUMNS", 0)
    monkeypatch.setattr(generate._Decoding, "_capture", noted)
    requests = [
        prompt(text(i, 1 + 3 * i), i, until=[" the"], max_gen_toks=5 + 2 * i) for i in range(17)
    ]
    settings = ScoringSettings(mode="exact", max_length=256, batch_size=1, window_batch_size=1)
    lm = language_model(model, tokenizer(), settings)
    assert lm.generate_until(requests) == lm.hflm.generate_until(requests, disable_tqdm=True)
    assert captured
    assert None not in captured
    assert kept_by(lambda: lm.generate_until(requests)) == 0


def kept_by(call):
    """Bytes of the GPU's memory that wait for the garbage collector after ``call``."""
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
