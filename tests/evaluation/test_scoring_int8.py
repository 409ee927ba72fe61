"""LLM.int8's cells score what the library's own layers score, to the bit."""

from __future__ import annotations

import copy
import dataclasses

import bitsandbytes
import numpy as np
import pytest
import torch
from quantizer_models import DIGEST
from recorded_rows import recorded, watch
from scoring_models import choices, llama, pages

from qbench.evaluation.kl import KLObserver
from qbench.evaluation.settings import Tolerance
from qbench.quantizers import bnb, parse
from qbench.quantizers.quantize import quantize

REQUESTS = {"choices": choices(9), "windows": pages((30, 0, 120, 1))}
LOOSE_BOUNDS = Tolerance(mean=10.0, largest=100.0, changed=1.0)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_answers_and_divergence_are_the_librarys(kind, mode, tmp_path, monkeypatch):
    original, requests = llama(dtype=torch.bfloat16), REQUESTS[kind]
    chosen = parse("bnb-8bit", {"compute_dtype": "bfloat16", "threshold": 1.0})
    model = quantize(
        copy.deepcopy(original), chosen, calibration=None, digest=DIGEST, artifacts=tmp_path
    ).model
    base = recorded(original, requests)

    def scored():
        meter = KLObserver(base)
        answers = watch(model, meter, requests, mode, tolerance=LOOSE_BOUNDS)
        (measured,) = meter.divergences.values()
        return answers, [getattr(measured, f.name) for f in dataclasses.fields(measured)]

    answers, measured = scored()
    assert measured[0].max() > 0
    monkeypatch.setattr(bnb.Linear8, "forward", bitsandbytes.nn.Linear8bitLt.forward)
    expected, same = scored()
    assert answers == expected
    assert all(map(np.array_equal, measured, same))
