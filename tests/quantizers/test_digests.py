"""Digests of what is stored say whether two quantizations have the same bits."""

import copy

import pytest
import torch
from quantizer_models import PROBE, llama, make, settings

from qbench.quantizers.audit.cell import audit
from qbench.quantizers.audit.weights import digest

LAYER = "model.layers.1.mlp.up_proj"


def check(quantized, chosen):
    return audit(llama(), quantized, chosen, PROBE)


def digests(report):
    return {module.name: module.digest for module in report.modules}


def test_the_digest_says_whether_the_stored_bits_are_the_same(tmp_path):
    chosen = settings("rtn-4bit")
    rtn4 = make(chosen, tmp_path).model
    first, second = check(rtn4, chosen), check(copy.deepcopy(rtn4), chosen)
    assert first.digest == second.digest
    assert digests(first) == digests(second)
    assert len(set(digests(first).values())) == 14
    assert {len(digest) for digest in digests(first).values()} == {len(first.digest)} == {64}
    model = copy.deepcopy(rtn4)
    model.get_submodule(LAYER).scale[0, 0] *= 1.001
    third = check(model, chosen)
    assert third.digest != first.digest
    different = {n for n, d in digests(third).items() if d != digests(first)[n]}
    assert different == {LAYER}


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("bnb-4bit", {"double_quant": True}),
        ("bnb-8bit", {}),
        ("hqq-3bit", {}),
        ("gptq-4bit", {"desc_act": True}),
        ("gptq-4bit", {}),
    ],
)
def test_digests_are_the_same_when_quantized_again(name, stated, tmp_path):
    chosen = settings(name, **stated)
    first, second = (
        check(make(chosen, tmp_path / part).model, chosen) for part in ("once", "again")
    )
    assert (first.digest, digests(first)) == (second.digest, digests(second))


def test_a_digest_is_of_names_dtypes_shapes_and_bytes():
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.uint8)}
    assert digest(one) == digest(dict(reversed(one.items())))
    assert digest(one) == "4ada6d404ac49e8bebbc2829f61a582c1dfe92bcc09db74ee6207e2f792b16ad"
    others = [
        {**one, "a": one["a"].reshape(1, 2)},
        {**one, "a": one["a"].view(torch.int32)},
        {**one, "a": -one["a"]},
        {"c": one["a"], "b": one["b"]},
    ]
    assert len({digest(other) for other in (one, *others)}) == 5
