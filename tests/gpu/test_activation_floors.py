"""Damage of quantized activations on a trained pair, against an independent implementation's."""

import pytest
from pair import NAMES, checkpoint, loss, pair_model, texts

from qbench.quantizers import config_of
from qbench.quantizers.quantize import quantize

BATCH = 4  # texts of 1,024 tokens: those that a scale per tensor is of
# Nats a token: the input of every linear layer but the LM head, symmetric, float32 weights.
FLOORS = {
    ("softmax", "int8-token"): 0.0018,
    ("softmax", "int8-tensor"): 0.0225,
    ("softmax", "int6-token"): 0.0225,
    ("softmax", "int6-tensor"): 0.2144,
    ("softmax", "int4-token"): 0.360,
    ("softpick", "int8-token"): 0.0008,
    ("softpick", "int8-tensor"): 0.0152,
    ("softpick", "int6-token"): 0.0241,
    ("softpick", "int6-tensor"): 0.2899,
    ("softpick", "int4-token"): 0.554,
}
NOISE = 0.002  # nats: what int8 a token moves is no more than that
SCHEMES = tuple(dict.fromkeys(scheme for _, scheme in FLOORS))


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_that_of_an_independent_implementation(name, tmp_path):
    before = loss(pair_model(name, "cuda"), texts(name), BATCH)
    for scheme in SCHEMES:
        chosen = config_of({"activations": scheme}, compute_dtype="float32")
        digest = checkpoint(name).digest
        made = quantize(
            pair_model(name, "cuda"), chosen, calibration=None, digest=digest, artifacts=tmp_path
        )[0]
        damage = loss(made, texts(name), BATCH) - before
        print(f"{name} {scheme} {damage:.4f}")
        assert damage == pytest.approx(FLOORS[name, scheme], rel=0.15, abs=NOISE), scheme
