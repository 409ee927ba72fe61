"""Kernels that are in the code and not in use (``qbench bench attention --tiles`` times them), each
forced on: against float64, over and over, in CUDA graphs, and from memory."""

import pytest
import torch
from gpu_tensors import draw

from qbench.attention import kernels, reference
from qbench.attention.kernels import gluon_backward, launch, recall, schedules
from qbench.bench.attention_checks import CASES, errors, limit, relative_error
from qbench.bench.attention_timing import captured
from qbench.bench.attention_tried import SHAPES, TRIED, drawn, run_of, unsteady

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs Hopper",
    ),
]
LENGTHS = (128, 256, 384, 640, 1024, 1152)  # one block, one and a part, and so on, of 128 or 192


@pytest.fixture(params=TRIED, ids=lambda tried: f"{tried} {tried.width}")
def tried(request):
    """In use while the test runs."""
    with request.param.used():
        yield request.param


def gradients(attend, inputs, gradient, **settings):
    output = attend(*inputs, normalizer="softmax", causal=True, **settings)
    return (output, *torch.autograd.grad(output, inputs, gradient))


def compared(tried, length, scores, kv_heads=4, softcap=None):
    """The relative errors of the output and the gradients."""
    sizes = ((4, 0), (kv_heads, 1), (kv_heads, 2), (4, 3))
    tensors = [draw(2, heads, length, tried.width, seed=seed) for heads, seed in sizes]
    *inputs, gradient = tensors
    if scores == "some far":  # one key in fifty, of both signs
        inputs[1][:, :, ::50] *= 40.0
    else:
        inputs[0] *= scores
    inputs = [tensor.requires_grad_() for tensor in inputs]
    given = tried.parameters(4)
    softcap = softcap or tried.softcap or None
    got = gradients(kernels.attention, inputs, gradient, parameters=given, softcap=softcap)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    given = {name: tensor.double() for name, tensor in given.items()}
    truth = gradients(
        reference.attention, wide, gradient.double(), parameters=given, softcap=softcap
    )
    return [relative_error(a, b) for a, b in zip(got, truth, strict=True)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scores", [0.3, 3.0, 12.0, "some far"])
def test_output_and_gradients_equal_the_float64_reference(tried, scores, length):
    inputs = [draw(2, 4, length, tried.width, seed=seed) for seed in range(3)]
    assert tried.applies(*inputs)
    found = compared(tried, length, scores)
    # See test_attention_arithmetic.py on scores beside a cap.
    assert max(found) <= (3e-2 if scores not in (0.3, 3.0) else 1e-2), found


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_keys_are_right_by_whichever_kernel(tried, kv_heads):
    assert max(compared(tried, 640, 1.0, kv_heads)) <= 1e-2


@pytest.mark.parametrize("softcap", [5.0, 15.0, 30.0, 80.0])
def test_other_caps_are_right_by_whichever_kernel(tried, softcap):
    assert max(compared(tried, 640, 1.0, softcap=softcap)) <= 1e-2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: f"{tried} {tried.width}")
def test_many_blocks_a_program_give_the_same_bits_in_every_run_and_no_wrong_rows(tried, shape):
    for _ in range(5):
        assert unsteady(tried, shape) is None


@pytest.mark.parametrize("case", [c for c in CASES if c.causal], ids=str)
def test_all_cases_of_the_bench_are_right_while_it_is_in_use(tried, case):
    found = errors(case, "softmax", torch.bfloat16, seed=7)
    over = {what: e for what, e in found.items() if not e <= limit(what, torch.bfloat16)}
    assert over == {}


def test_calls_from_memory_and_cuda_graphs_give_the_bits_of_first_calls(tried):
    many = [drawn(tried, (2, 640, 8)) for _ in range(2)]
    first = []
    for inputs in many:
        recall.forget()
        first.append([t.clone() for t in run_of(tried, inputs)()])
    recall.forget()
    for inputs, expected in zip(many * 2, first * 2, strict=True):  # all but one from memory
        assert all(map(torch.equal, run_of(tried, inputs)(), expected))
    kept = []

    def make():
        run = run_of(tried, many[0])

        def call():
            kept[:] = run()

        return call

    replay = captured(make)
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    for tensor in kept:
        tensor.zero_()
    replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, kept, first[0]))


def test_a_graph_that_is_captured_first_is_right_without_a_table(tried, monkeypatch):
    """A table cannot be made then: another kernel computes it, which is loaded before: a graph
    captures no loading."""
    monkeypatch.setattr(schedules, "_tables", {})
    inputs = drawn(tried, (1, 384, 2))
    with monkeypatch.context() as no_table:
        no_table.setattr(schedules, "possible", lambda plan: False)
        expected = [t.clone() for t in run_of(tried, inputs)()]
    recall.forget()
    run = run_of(tried, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(relative_error(a, b) <= 1e-2 for a, b in zip(got, expected, strict=True))


def test_launches_by_the_driver_give_the_same_bits(tried, monkeypatch):
    monkeypatch.setattr(recall, "OFTEN", 2)
    inputs = drawn(tried, (2, 640, 8))
    results = [[t.clone() for t in run_of(tried, inputs)()] for _ in range(6)]
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_gradients_of_slopes_are_by_the_other_kernel(monkeypatch):
    monkeypatch.setattr(gluon_backward, "AHEAD", gluon_backward.AHEAD_TRIED)
    monkeypatch.setattr(launch.gluon_backward, "ENOUGH", 0)
    recall.forget()
    inputs = [draw(2, 4, 640, 64, seed=s).requires_grad_() for s in range(3)]
    gradient = draw(2, 4, 640, 64, seed=3)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda").requires_grad_()
    output = kernels.attention(
        *inputs, normalizer="softmax", causal=True, parameters={"slopes": slopes}
    )
    got = torch.autograd.grad(output, [*inputs, slopes], gradient)
    wide = [tensor.detach().double().requires_grad_() for tensor in (*inputs, slopes)]
    truth = reference.attention(
        *wide[:3], normalizer="softmax", causal=True, parameters={"slopes": wide[3]}
    )
    truths = torch.autograd.grad(truth, wide, gradient.double())
    found = [relative_error(a, b) for a, b in zip(got, truths, strict=True)]
    assert max(found[:3]) <= 1e-2
    assert found[3] <= 5e-2
    recall.forget()
