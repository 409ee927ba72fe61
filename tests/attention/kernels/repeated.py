"""Calls that are repeated from memory, run by Triton's interpreter in a process of its own. Prints
one line a case: name, largest relative error."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import sys

import torch

from qbench.attention import kernels, reference
from qbench.attention.kernels import launch, plans, recall, relaunch
from qbench.attention.normalizers import NORMALIZERS

SHAPE = (1, 70, 2, 16)  # batch, length, heads, width
repeated = []


def noted_launch(kernel, grid, device, pointers, numbers, constants):
    """As ``relaunch.launch``, of a compiled kernel."""

    def run(*arguments):
        repeated.append(kernel)
        count = len(pointers) + len(numbers)
        names = kernel.arg_names[count:]
        kernel[grid](*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))

    names = kernel.arg_names[len(pointers) + len(numbers) :]
    relaunch._note((run, pointers, [*numbers, *(constants[name] for name in names)]))
    kernel[grid](*pointers, *numbers, **constants)


def inputs(seed, transposed=True):
    torch.manual_seed(seed)
    tensors = [torch.randn(SHAPE).transpose(1, 2) for _ in range(4)]
    return tensors if transposed else [tensor.contiguous() for tensor in tensors]


def parameters(normalizer):
    given = {p.name: torch.tensor([-1.0, 0.5]) for p in NORMALIZERS.get(normalizer).parameters}
    given.pop("slopes", None)
    return given


def error(normalizer, seed, **settings):
    """Of the output and the gradients."""
    *tensors, gradient = inputs(seed, settings.pop("transposed", True))
    given = parameters(normalizer)
    results = []
    for attend, dtype in ((kernels.attention, torch.float32), (reference.attention, torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        more = {name: tensor.to(dtype) for name, tensor in given.items()}
        settings |= {"normalizer": normalizer, "causal": True, "parameters": more}
        output = attend(*leaves, **settings)
        results.append((output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))))
    pairs = zip(*results, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def cases():
    for normalizer in ("softmax", "softpick", "sigmoid", "softmax-sink"):
        recall.forget()
        first = error(normalizer, 0)
        before = len(repeated)
        second, third = error(normalizer, 1), error(normalizer, 2)
        assert first <= 1e-5, first
        assert len(repeated) == before + 6, "three launches, twice, were to be from memory"
        plan = next(iter(plans._plans.values()))
        assert plan.forward is not None
        assert len(plan.backward) == 1
        yield normalizer, max(second, third)
    assert len(plans._plans) == 1
    yield "another layout", max(error("softmax-sink", seed, transposed=False) for seed in (3, 4))
    yield "another scale", max(error("softmax-sink", seed, scale=0.3) for seed in (3, 4))
    assert len(plans._plans) == 3
    yield "another length", other_length()


def other_length():
    global SHAPE
    SHAPE = (1, 66, 2, 16)
    return max(error("softmax-sink", seed) for seed in (3, 4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    launch.INTERPRETED = False
    launch.launch = noted_launch
    for name, largest in cases():
        print(f"{name}\t{largest}", flush=True)
    sys.exit(0)
