"""Damage by a KV cache of few bits on the trained pair, against an independent measurement on 15
texts of 1,024 tokens: here on two of them, which differ from all by a tenth; in full on a GPU
(tests/gpu/test_gpu_kv_cache.py)."""

import pytest
from pair import loss, pair_model, texts

from qbench.quantizers.names import config_of
from qbench.quantizers.quantize import apply

FLOOR = {"softmax": 0.143, "softpick": 0.104}  # nats a token, int3 per head and token


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "softpick"])
def test_three_bits_cost_about_what_others_measured(name):
    ids = texts(name)[1:3]
    model = pair_model(name)
    before = loss(model, ids, 2)
    quantizer = config_of({"kv": "int3-token"}, compute_dtype="float32")
    damage = loss(apply(model, quantizer, {}), ids, 2) - before
    assert damage == pytest.approx(FLOOR[name], rel=0.3)
