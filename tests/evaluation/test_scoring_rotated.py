"""Fast scoring of a rotated model reads the KV cache that exact scoring reads."""

import pytest
import torch
from quantizer_models import DIGEST
from treated_models import decoder

from qbench.evaluation.scoring.batching import Packing
from qbench.evaluation.scoring.forward import PackedForward
from qbench.evaluation.scoring.requests import Request
from qbench.quantizers import config_of
from qbench.quantizers.quantize import quantize

TEXTS = ([5, 9, 11, 40, 2, 7, 31], [5, 9, 11, 40, 80, 3], [8, 6, 4, 90])  # two share a prefix


def model_of(tmp_path, **rotation):
    entry = {"kv": "int4-token", "outliers": {"name": "rotation", **rotation}}
    return quantize(
        decoder("llama-biases"),
        config_of(entry, compute_dtype="float32"),
        calibration=None,
        digest=DIGEST,
        artifacts=tmp_path,
    ).model


@torch.no_grad()
def alone(model):
    return [model.model(torch.tensor([ids]), use_cache=False)[0][0, -1] for ids in TEXTS]


@torch.no_grad()
def packed(model):
    requests = [Request([*ids, 0], len(ids), i) for i, ids in enumerate(TEXTS)]
    (pack,) = Packing(max_length=64, batch_tokens=64).plan(requests, windows=False)
    batch = pack.collate(requests)
    rows = [batch.rows[batch.scored.row[list(batch.scored.request).index(i)]] for i in range(3)]
    forward = PackedForward(model, model.get_decoder())
    with forward.ready():
        return list(forward(batch)[rows])


@pytest.mark.parametrize("queries_keys", [True, False])
def test_packs_give_what_sequences_give(queries_keys, tmp_path):
    model = model_of(tmp_path, queries_keys=queries_keys)
    for found, wanted in zip(packed(model), alone(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_rotated_keys_are_rounded_otherwise(tmp_path):
    first, second = (alone(model_of(tmp_path, queries_keys=each)) for each in (True, False))
    assert (first[0] - second[0]).norm() > 1e-3 * first[0].norm()
