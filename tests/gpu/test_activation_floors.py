"""Damage of quantized activations on a trained 27M pair, against an independent implementation's.

Run as a program, it prints the figures: ``python tests/gpu/test_activation_floors.py [cuda|cpu]``.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from qbench.checkpoints import find, load_model, load_tokenizer
from qbench.quantizers import quantizer_of
from qbench.quantizers.quantization import quantize

SHARED = Path(__file__).parents[3] / "shared"
PAGES = SHARED / "data" / "eval" / "wikitext" / "test_document_level.jsonl"
LENGTH, ROWS, BATCH = 1024, 16, 4  # tokens, of which <s> is the first; pages at most; rows at once
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


def rows(tokenizer):
    """<s> and the first 1,023 tokens of each of the first pages that has so many: int64 [15, 1024]
    (the file has 15 such pages)."""
    found = []
    for line in PAGES.read_text().splitlines():
        ids = tokenizer.encode(json.loads(line)["page"], add_special_tokens=False)[: LENGTH - 1]
        if len(ids) == LENGTH - 1:
            found.append([tokenizer.bos_token_id, *ids])
    return torch.tensor(found[:ROWS])


@torch.no_grad()
def loss(model, tokens):
    """Mean of the next token's negative log-probability, in nats."""
    total = 0.0
    for batch in tokens.to(model.device).split(BATCH):
        for row, logits in zip(batch, model(batch, use_cache=False).logits, strict=True):
            total += torch.nn.functional.cross_entropy(
                logits[:-1].float(), row[1:], reduction="sum"
            ).item()
    return total / (tokens.shape[0] * (tokens.shape[1] - 1))


def damages(normalizer, schemes, device, folder):
    """By scheme."""
    checkpoint = find(str(SHARED / "checkpoints" / f"{normalizer}-27M"))
    tokens = rows(load_tokenizer(checkpoint))

    def load():
        return load_model(checkpoint, dtype=torch.float32, device=device)

    before, result = loss(load(), tokens), {}
    for scheme in schemes:
        chosen = quantizer_of({"activations": scheme}, compute_dtype="float32")
        made = quantize(
            load(), chosen, calibration=None, digest=checkpoint.digest, artifacts=folder
        )
        result[scheme] = loss(made.model, tokens) - before
    return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(not PAGES.is_file(), reason="needs the trained 27M pair in ../shared")
@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_damage_is_that_of_an_independent_implementation(normalizer, tmp_path):
    found = damages(normalizer, SCHEMES, "cuda", tmp_path)
    for scheme, damage in found.items():
        floor = FLOORS[normalizer, scheme]
        assert damage == pytest.approx(floor, rel=0.15, abs=NOISE), scheme


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    with tempfile.TemporaryDirectory() as place:
        for model in ("softmax", "softpick"):
            for scheme, damage in damages(model, SCHEMES, chosen, Path(place)).items():
                print(f"{model} {scheme} {damage:.4f} (floor {FLOORS[model, scheme]:.4f})")
