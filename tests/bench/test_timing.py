import gc
import weakref
from contextlib import contextmanager, nullcontext

import torch

from qbench.bench.timing import captured


class Tensor:
    """Stands for what a graph reads."""


class Stream:
    def wait_stream(self, other):
        pass


class Graph:
    def __init__(self):
        self.replayed = 0

    def replay(self):
        self.replayed += 1


@contextmanager
def capturing(graph, stream):
    """As torch.cuda.graph, which gives memory that nobody holds back to the driver."""
    gc.collect()
    yield


def test_what_a_graph_reads_lives_as_long_as_its_replay(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    made = []

    def make():
        tensor = Tensor()
        made.append(weakref.ref(tensor))
        return lambda: tensor

    first = captured(make)
    second = captured(make)
    for replay, tensor in zip((first, second), made, strict=True):
        assert tensor() is not None
        replay()
    del first, second, replay
    gc.collect()
    assert [tensor() for tensor in made] == [None, None]
