"""Steps captured as CUDA graphs give the bits of steps that are launched one by one, and calls
that are repeated from memory those of first calls."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qbench.attention import kernels
from qbench.attention.kernels import launch, recall, supported
from qbench.attention.kernels.settings import NONE, Settings
from qbench.bench.attention_timing import captured, given

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = (2, 256, 4, 64)  # batch, length, heads, width


def draw(seed, length=SHAPE[1]):
    """[B, H, T, D] in the memory of [B, T, H, D], as models have it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (SHAPE[0], length, *SHAPE[2:])
    tensor = torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
    return tensor.transpose(1, 2)


def made_step(normalizer, inputs):
    """A forward and a backward pass; what it returns is what they give."""
    parameters = given(normalizer, SHAPE[2])
    gradient = draw(9, inputs[0].shape[2])

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = kernels.attention(
            *leaves, normalizer=normalizer, parameters=parameters, causal=True
        )
        return (output.detach(), *torch.autograd.grad(output, leaves, gradient))

    return step


def same(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("normalizer", supported())
def test_a_captured_step_gives_the_bits_of_a_launched_one(normalizer):
    inputs = [draw(seed) for seed in range(3)]
    kept = []

    def make():
        step = made_step(normalizer, inputs)

        def run():
            kept[:] = step()

        return run

    replay = captured(make)
    for seed in (10, 20):  # other numbers in the same tensors
        for i, tensor in enumerate(inputs):
            tensor.copy_(draw(seed + i))
        replay()
        torch.cuda.synchronize()
        assert same(kept, made_step(normalizer, inputs)())


@pytest.mark.parametrize("normalizer", supported())
def test_a_repeated_call_gives_the_bits_of_a_first_one(normalizer):
    for inputs in ([draw(seed) for seed in range(3)], [draw(seed) for seed in range(3, 6)]):
        recall.forget()
        first = made_step(normalizer, inputs)()
        second = made_step(normalizer, inputs)()
        assert len(recall._calls) == 2, "forward and backward were to be kept"
        assert same(second, first)


@pytest.mark.parametrize("normalizer", ["softmax", "sigmoid"])
def test_kernels_that_one_thread_loaded_run_in_another(normalizer):
    """Threads, autograd's among them, have no CUDA context of their own."""
    query, key, value, gradient = (draw(seed) for seed in range(4))
    settings = Settings(normalizer, 0.125, 0.0, True, 0, SHAPE[1], SHAPE[1])

    def forward():
        return launch.forward(query, key, value, None, None, NONE, settings)

    kept = forward()

    def backward():
        return launch.backward(gradient, query, key, value, *kept, None, None, NONE, settings)[:3]

    expected = backward()
    for run, results in ((forward, kept), (backward, expected)):
        with ThreadPoolExecutor(1) as threads:
            assert same(threads.submit(run).result()[:2], results[:2])


def test_a_call_of_another_layout_is_another_call():
    recall.forget()
    made_step("softpick", [draw(seed) for seed in range(3)])()
    inputs = [draw(seed).contiguous() for seed in range(3)]
    first = made_step("softpick", inputs)()
    assert len(recall._calls) == 4
    recall.forget()
    assert same(first, made_step("softpick", inputs)())


@pytest.mark.parametrize("length", [256, 1152])
@pytest.mark.parametrize("normalizer", supported())
def test_launches_without_triton_give_the_bits_of_tritons(normalizer, length, monkeypatch):
    """Of other tensors than those whose launches were captured, and in another stream."""
    monkeypatch.setattr(
        launch.gluon_backward, "ENOUGH", 5 * 10**8
    )  # short: Triton's, long: Gluon's
    sets = [[draw(10 * turn + seed, length) for seed in range(3)] for turn in range(6)]
    monkeypatch.setattr(recall, "OFTEN", None)
    recall.forget()
    expected = [made_step(normalizer, inputs)() for inputs in sets]
    recall.forget()
    monkeypatch.setattr(recall, "OFTEN", 2)
    others = torch.cuda.Stream()
    for turn, (inputs, results) in enumerate(zip(sets, expected, strict=True)):
        torch.cuda.synchronize()
        with torch.cuda.stream(others if turn == 5 else torch.cuda.current_stream()):
            got = made_step(normalizer, inputs)()
        torch.cuda.synchronize()
        assert same(got, results)
    assert [len(call.direct) > 0 for call in recall._calls.values()] == [True, True]


def test_a_step_without_triton_is_captured_as_any(monkeypatch):
    inputs = [draw(seed) for seed in range(3)]
    recall.forget()
    monkeypatch.setattr(recall, "OFTEN", 1)
    for _ in range(4):
        expected = made_step("softpick", inputs)()
    kept = []

    def make():
        step = made_step("softpick", inputs)
        return lambda: kept.__setitem__(slice(None), step())

    captured(make)()
    torch.cuda.synchronize()
    assert same(kept, expected)
