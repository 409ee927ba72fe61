"""Weights as int8 or FP8 codes times scales pass their audit and cost little."""

import pytest
import torch
from quantizer_models import damage
from test_treated_cells import judged, make
from treated_models import decoder

from qbench.quantizers import config_of


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("int8-row", "float32"), ("fp8-row", "bfloat16"), ("fp8-matrix", "float32")],
)
def test_codes_times_scales_are_weight_quantizers_on_their_own(weights, dtype, tmp_path):
    chosen = config_of({"name": weights}, compute_dtype=dtype)
    model = make(chosen, tmp_path, "llama-biases")
    report = judged(chosen, model)
    assert report.problems == ()
    assert report.levels <= 256
    assert 8 <= report.bits_per_weight < 8.8
    assert damage(model, decoder("llama-biases", dtype=getattr(torch, dtype))) < 0.1
