"""Damage of quantized activations on a trained 27M pair, against an independent implementation's.

Run as a program, it prints the figures: ``python tests/gpu/test_activation_floors.py cpu``.
"""

import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quantizers"))

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


def damages(name, device, folder):
    """By scheme, each computed when it is asked for: nats a token."""
    before = loss(pair_model(name, device), texts(name), BATCH)
    for scheme in SCHEMES:
        chosen = config_of({"activations": scheme}, compute_dtype="float32")
        made = quantize(
            pair_model(name, device),
            chosen,
            calibration=None,
            digest=checkpoint(name).digest,
            artifacts=folder,
        )
        yield scheme, loss(made.model, texts(name), BATCH) - before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_that_of_an_independent_implementation(name, tmp_path):
    found = dict(damages(name, "cuda", tmp_path))
    print({scheme: round(damage, 4) for scheme, damage in found.items()})
    for scheme, damage in found.items():
        assert damage == pytest.approx(FLOORS[name, scheme], rel=0.15, abs=NOISE), scheme


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for model in NAMES:
            for one, damage in damages(model, sys.argv[1], Path(place)):
                print(f"{model} {one} {damage:.4f} (floor {FLOORS[model, one]:.4f})", flush=True)
