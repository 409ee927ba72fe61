"""Softmax's slopes from places that rows share (modes.SHARED), in Triton's interpreter. Prints a
line a case: name, largest relative error of the output, and of lse beside the kernel in use."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import torch

from qbench.attention import reference
from qbench.attention.kernels import forward, launch, scores, tiles
from qbench.attention.kernels.settings import Parameters, Settings
from qbench.attention.kernels.spans import packed_spans
from qbench.attention.kernels.tiles import Tile

WIDTH = 16
SLOPES = {
    "ALiBi": [0.7, 0.06], "steep": [4.0, 1.5], "too steep": [60.0, 0.1], "rising": [-0.7, 0.0],
}  # fmt: skip
TILE = Tile(block_q=32, block_k=16, warps=4, stages=1, free=True)
shared = []  # by tile of scores that were computed so


def noted(*given):
    shared.append(1)
    return scores.shared_scores(*given)


def error(got, truth):
    return float((got.double() - truth).norm() / truth.norm()) if got.isfinite().all() else 9.0


def compared(normalizer, slopes, lengths=(83, 83), cuts=None, **settings):
    """Of the output, and of lse beside what it is without."""
    queries, keys = lengths
    sizes = ((4, queries), (2, keys), (2, keys))
    inputs = [torch.randn(1, heads, length, WIDTH) for heads, length in sizes]
    given = {"slopes": torch.tensor(slopes * 2)}
    if normalizer == "softmax-sink":
        given["sinks"] = torch.tensor([0.5, -300.0, 9.0, -1.0])
    asked = Settings(normalizer, 0.25, 0.0, settings.get("causal", True),
                     settings.get("window", 0), queries, keys)  # fmt: skip
    mask, spans = settings.get("mask"), None
    if cuts is not None:
        spans = packed_spans(cuts, cuts)
    made = []
    for chosen in (set(), {WIDTH}):
        tiles.SHARED = chosen
        shared.clear()
        made.append(launch.forward(*inputs, mask, spans, Parameters(**given), asked, TILE))
    wide = [tensor.double() for tensor in inputs]
    more = {name: tensor.double() for name, tensor in given.items()}
    if cuts is not None:
        truth = reference.packed_attention(
            *wide, normalizer=normalizer, cu_seqlens_q=cuts, cu_seqlens_k=cuts, parameters=more
        )
    else:
        settings = {"causal": True, **settings}
        truth = reference.attention(*wide, normalizer=normalizer, parameters=more, **settings)
    usual, got = (each[1] for each in made)
    finite = usual.isfinite()
    same = torch.equal(finite, got.isfinite()) and shared
    return max(error(made[1][0], truth), error(got[finite], usual[finite].double())) if same else 9


def cases():
    for normalizer in ("softmax", "softmax1", "softmax-sink"):
        for name, slopes in SLOPES.items():
            yield f"{normalizer}: {name}", compared(normalizer, slopes)
    slopes = SLOPES["ALiBi"]
    yield "fewer queries", compared("softmax", slopes, (41, 83))
    yield "window", compared("softmax", slopes, window=9)
    mask = torch.rand(1, 1, 83, 83) < 0.5
    mask[0, 0, 3] = False
    yield "mask", compared("softmax", slopes, causal=True, mask=mask)
    cuts = torch.tensor([0, 5, 5, 70, 83], dtype=torch.int32)
    yield "packed", compared("softmax", slopes, cuts=cuts)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    forward.shared_scores = noted
    for name, worst in cases():
        print(f"{name}\t{worst:.1e}", flush=True)
