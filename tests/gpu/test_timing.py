"""The benches' clock on a GPU."""

import gc
import weakref

import torch

from qbench.bench.timing import captured


def test_what_a_graph_reads_lives_as_long_as_its_replay():
    """The next capture gives memory that nobody holds back to the driver."""
    made = []

    def make():
        tensor = torch.ones(1 << 20, device="cuda")
        made.append(weakref.ref(tensor))
        return lambda: tensor.sum()

    replays = [captured(make), captured(make)]
    for replay, tensor in zip(replays, made, strict=True):
        assert tensor() is not None
        replay()
    del replays, replay, tensor
    gc.collect()
    assert [tensor() for tensor in made] == [None, None]
