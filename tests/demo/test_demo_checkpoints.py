"""The demo's pair: its on-disk format, alike in all but the normalizer, and far above chance."""

import json

import pytest

PAIR = {"softmax": "parallel_attn", "softpick": "parallel_softpick_attn"}


@pytest.mark.parametrize("file", ["config.json", "training.json"])
def test_the_pair_differs_only_in_its_attention(demo, file):
    first, second = (json.loads((demo / name / file).read_text()) for name in PAIR)
    different = {key for key in {*first, *second} if first.get(key) != second.get(key)}
    assert different == {"config.json": {"attn_impl"}, "training.json": {"attention", "loss"}}[file]
