"""What the forward pass says of softpick's rows of tiny scores, in Triton's interpreter, which
knows no bf16. Prints a line a case: its name and 0, or 1 where it is wrong."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

from dataclasses import replace

import torch

from qbench.attention import reference
from qbench.attention.kernels import launch, operator, tiles
from qbench.attention.kernels.settings import NONE, Parameters, Settings

LENGTH, WIDTH = 192, 16
STEEP = Parameters(slopes=torch.full((2,), 4.0))
SETTINGS = Settings("softpick", WIDTH**-0.5, 0.0, True, 0, LENGTH, LENGTH)


def flags(tiny, spans=None, **tile):
    """Of three chunks of keys, from rows whose only positive score is that of their own key: 3e-6
    in the rows ``tiny``, else 1."""
    key = torch.randn(1, 1, LENGTH, WIDTH)
    scores = torch.ones(LENGTH)
    scores[tiny] = 3e-6
    query = key / key.square().sum(-1, keepdim=True) * (scores * WIDTH**0.5)[:, None]
    tensors = (query.expand(1, 2, LENGTH, WIDTH), key, torch.randn(1, 1, LENGTH, WIDTH))
    inputs = [tensor.half().transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    asked = replace(tiles.forward_tile(WIDTH, torch.float16, "softpick", 0), **tile)
    return launch.forward(*inputs, None, spans, STEEP, SETTINGS, asked)[2].tolist()[0][0]


def few_rows(rows):
    """Whether the gradients of values are right where all scores are tiny."""
    query, key, value, gradient = (torch.randn(1, 1, rows, WIDTH).half() for _ in range(4))
    query *= 2.0**-18
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    settings = SETTINGS._replace(max_seqlen_q=rows, max_seqlen_k=rows)
    output = operator.apply(*inputs, None, None, NONE, settings)
    (got,) = torch.autograd.grad(output, inputs[2:], gradient)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = reference.attention(*wide, normalizer="softpick", causal=True)
    (expected,) = torch.autograd.grad(truth, wide[2:], gradient.double())
    return float((got - expected).norm() / expected.norm()) <= 2e-3


def cases():
    for free in (False, True):
        kind = "no running maximum" if free else "running maximum"
        yield f"{kind}: no row is tiny", flags([], free=free), [0, 0, 0]
        yield f"{kind}: one row", flags([100], free=free), [0, 1, 0]
        yield f"{kind}: the last key of a chunk", flags([63], free=free), [1, 0, 0]
        yield f"{kind}: two rows", flags([3, 191], free=free), [1, 0, 1]
    yield "large tiles of keys", flags([150], block_k=128), [0, 0, 1]
    # Two sequences, the second from key 70 on: its tiles of keys have parts of two chunks.
    bounds = [[0, 0, 70, 0, 70, 0], [0, 70, LENGTH, 70, LENGTH, 0]]
    spans = torch.tensor(bounds, dtype=torch.int32)
    yield "packed", flags([100], spans), [0, 1, 1]
    yield "packed, the first sequence", flags([10], spans), [1, 0, 0]
    yield "as few rows as in decoding", few_rows(40), True
    yield "more rows", few_rows(80), True


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, got, expected in cases():
        print(f"{name}\t{float(got != expected):.0f}", flush=True)
