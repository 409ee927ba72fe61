"""The forward kernel of soft-capped softmax whose programs take many blocks: against float64, over
and over, in CUDA graphs, and from memory."""

from dataclasses import replace

import pytest
import torch
from gpu_tensors import draw

from qbench.attention import kernels, reference
from qbench.attention.kernels import lasting, recall, schedules, tiles
from qbench.attention.kernels.launch import forward
from qbench.attention.kernels.settings import NONE, Settings
from qbench.bench.attention_checks import CASES, errors, limit, relative_error
from qbench.bench.attention_timing import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs Hopper",
    ),
]
CAP = 50.0
LENGTHS = (128, 256, 384, 640, 1024, 1152)  # one block, one and a part, and so on, of 128 or 192
SHAPES = ((4, 4096, 16), (8, 1024, 16))  # batch, length, heads


@pytest.fixture(params=list(tiles.LASTING), autouse=True)
def width(request, monkeypatch):
    """A head dimension, with the kernel in use for every length."""
    kinds = {at: replace(kind, shortest=0) for at, kind in tiles.LASTING.items()}
    monkeypatch.setattr(tiles, "LASTING", kinds)
    recall.forget()
    yield request.param
    recall.forget()


@pytest.fixture
def launched(monkeypatch):
    """How often the kernel was launched."""
    calls = []
    kept = lasting.forward
    monkeypatch.setattr(lasting, "forward", lambda *given: (calls.append(1), kept(*given)))
    return calls


def drawn(width, shape):
    batch, length, heads = shape
    return [draw(batch, heads, length, width, seed=seed) for seed in range(3)]


def run(inputs, softcap=CAP):
    """Output and lse."""
    length, width = inputs[0].shape[2:]
    settings = Settings("softmax", width**-0.5, softcap, True, 0, length, length)
    return forward(*inputs, None, None, NONE, settings)[:2]


def compared(width, length, *, scores=1.0, kv_heads=4, softcap=CAP):
    """The relative error of the output."""
    sizes = ((4, 0), (kv_heads, 1), (kv_heads, 2))
    inputs = [draw(2, heads, length, width, seed=seed) for heads, seed in sizes]
    if scores == "some far":  # one key in fifty, of both signs
        inputs[1][:, :, ::50] *= 40.0
    else:
        inputs[0] *= scores
    how = {"normalizer": "softmax", "causal": True, "softcap": softcap}
    truth = reference.attention(*(tensor.double() for tensor in inputs), **how)
    return relative_error(kernels.attention(*inputs, **how), truth)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scores", [0.3, 3.0, 12.0, "some far"])
def test_the_output_equals_the_float64_reference(width, scores, length, launched):
    # See test_attention_arithmetic.py on scores beside a cap.
    assert compared(width, length, scores=scores) <= (3e-2 if scores not in (0.3, 3.0) else 1e-2)
    assert launched


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_keys_are_right_by_another_kernel(width, kv_heads, launched):
    assert compared(width, 640, kv_heads=kv_heads) <= 1e-2
    assert not launched


@pytest.mark.parametrize("softcap", [5.0, 15.0, 30.0, 80.0])
def test_other_caps_are_right_by_whichever_kernel(width, softcap):
    assert compared(width, 640, softcap=softcap) <= 1e-2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_blocks_a_program_give_the_same_bits_in_every_run_and_no_wrong_rows(
    width, shape, launched, monkeypatch
):
    inputs = drawn(width, shape)
    with monkeypatch.context() as another:
        another.setattr(tiles, "LASTING", {})
        output, lse = run(inputs)
        recall.forget()
    assert not launched
    first = run(inputs)
    assert launched
    for _ in range(40):
        assert all(map(torch.equal, run(inputs), first))
    rows = (first[0].double() - output.double()).norm(dim=-1) / output.double().norm(dim=-1)
    assert float(rows.max()) <= 5e-2
    assert float((first[1] - lse).abs().max()) <= 2e-2  # its sums may be of bf16


@pytest.mark.parametrize("case", [c for c in CASES if c.causal], ids=str)
def test_all_cases_of_the_bench_are_right_while_it_is_in_use(case):
    found = errors(case, "softmax", torch.bfloat16, seed=7)
    over = {what: e for what, e in found.items() if not e <= limit(what, torch.bfloat16)}
    assert over == {}


def test_calls_from_memory_and_cuda_graphs_give_the_bits_of_first_calls(width):
    many = [drawn(width, (2, 640, 8)) for _ in range(2)]
    many[1][0] *= -1.0
    first = []
    for inputs in many:
        recall.forget()
        first.append([tensor.clone() for tensor in run(inputs)])
    recall.forget()
    for inputs, expected in zip(many * 2, first * 2, strict=True):  # all but one from memory
        assert all(map(torch.equal, run(inputs), expected))
    kept = []

    def make():
        def call():
            kept[:] = run(many[0])

        return call

    replay = captured(make)
    for tensor in kept:
        tensor.zero_()
    replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, kept, first[0]))


def test_a_graph_that_is_captured_first_is_right_without_a_table(width, monkeypatch):
    """A table cannot be made then: another kernel computes it, which is loaded before: a graph
    captures no loading."""
    monkeypatch.setattr(schedules, "_tables", {})
    inputs = drawn(width, (1, 384, 2))
    with monkeypatch.context() as no_table:
        no_table.setattr(schedules, "possible", lambda plan: False)
        expected = [tensor.clone() for tensor in run(inputs)]
    recall.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(relative_error(a, b) <= 1e-2 for a, b in zip(got, expected, strict=True))


def test_launches_by_the_driver_give_the_same_bits(width, monkeypatch):
    monkeypatch.setattr(recall, "OFTEN", 2)
    inputs = drawn(width, (2, 640, 8))
    results = [[tensor.clone() for tensor in run(inputs)] for _ in range(6)]
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
