import pytest
import torch

from qbench.bench import attention_speed
from qbench.bench.attention_speed import Shape, bench_attention
from qbench.errors import UnavailableError


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(UnavailableError, match=r"CUDA GPU, and none is here$"):
        bench_attention(tmp_path / "attention.json", True, (), log=print)
    assert list(tmp_path.iterdir()) == []


def test_flop_count_the_pairs_that_are_seen():
    shape = Shape(2, 2000, 4, 4, 64)
    seen = torch.ones(2000, 2000, dtype=torch.bool).tril()
    assert shape.flop("causal") == 4 * 2 * 4 * 64 * int(seen.sum())
    assert shape.flop("window") == 4 * 2 * 4 * 64 * int(seen.triu(-1023).sum())


def test_every_timed_shape_has_a_length_that_is_checked():
    shapes = (*attention_speed.SHAPES, attention_speed.DECODE)
    assert {shape.head_dim for shape in shapes} == set(attention_speed.CHECKED)
