"""Softpick's rows of tiny scores as :mod:`qbench.attention.kernels.mending` computes them, in
Triton's interpreter. Prints a line a case: its name and 0, or 1 where the output or lse of a row,
the keys' flags or the number of tiles that were read again are wrong."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

from dataclasses import replace

import torch

from qbench.attention.kernels import forward, launch, mending, tiles
from qbench.attention.kernels.settings import NONE, Parameters, Settings
from qbench.attention.normalizers import softpick

LENGTH, WIDTH = 192, 16
TINY = 3e-6  # e^x − 1 from e^x in float32 is wrong by 1 %
LIMIT = 1e-5
SETTINGS = Settings("softpick", 1.0, 0.0, True, 0, LENGTH, LENGTH)
STEEP = Parameters(slopes=torch.full((4,), 4.0))
# By queries of 32 and keys of 16: the last tiles of a block, which the diagonal cuts, are two.
TILE = replace(
    tiles.forward_tile(WIDTH, torch.bfloat16, "softpick", 0), block_q=32, block_k=16, mend=True
)
reads = {"sweep": 0, "mended": 0}


def counted(module, name):
    """Counts the tiles of keys or of values that the module's function reads."""
    load = module.load_rows

    def loaded(*given, **settings):
        reads[name] += 1
        return load(*given, **settings)

    module.load_rows = loaded


def computed(special, scores, other=-1.0, spans=None, parameters=NONE):
    """Output, lse and flags, their truth in float64, and how many tiles were read by the sweeps and
    to mend. Every row has the score ``scores[row]`` at the keys ``special``, else ``other``."""
    key = torch.zeros(1, 2, LENGTH, WIDTH)
    key[..., 0] = other
    key[:, :, special, 0], key[:, :, special, 1] = 0.0, 1.0
    query = torch.zeros(1, 4, LENGTH, WIDTH)
    query[..., 0], query[..., 1] = 1.0, scores
    value = torch.randn(1, 2, LENGTH, WIDTH)
    reads.update(sweep=0, mended=0)
    output, lse, flags = launch.forward(query, key, value, None, spans, parameters, SETTINGS, TILE)
    x = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3)
    place = torch.arange(LENGTH)
    if parameters.slopes is not None:
        x -= parameters.slopes[:, None, None] * (place[:, None] - place)
    e = torch.special.expm1(x.masked_fill(place > place[:, None], 0.0))
    if spans is not None:
        group = (place[:, None] >= spans[:, 1]).sum(1)
        e = e * (group == group[:, None])
    total = e.abs().sum(-1, keepdim=True) + softpick.EPSILON
    truth = (e.relu() / total) @ value.double().repeat_interleave(2, 1)
    wrong = ((output - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-30)).max()
    wrong = max(wrong, (lse - total.squeeze(-1).log2()).abs().max())
    return float(wrong), flags[0].tolist(), reads["sweep"] // 4, reads["mended"] // 4


def right(special, tiny, flagged, whole, mended, score=TINY, **settings):
    """Whether all is right, where the rows ``tiny`` have the score given and the others 1.
    ``whole`` and ``mended``: how many tiles of keys and of values a head reads again, each way."""
    scores = torch.ones(LENGTH)
    usual = computed(special, scores, **settings)
    scores[tiny] = torch.tensor(score)
    wrong, flags, sweep, mend = computed(special, scores, **settings)
    alike = wrong <= LIMIT and usual[0] <= LIMIT and usual[1] == [[0, 0, 0]] * 2
    return alike and (flags, sweep - usual[2], mend) == ([flagged] * 2, whole, mended)


def cases():
    yield "none", right([40], [], [0, 0, 0], 0, 0)
    yield "in the last tiles", right([40], [50], [1, 0, 0], 0, 2 + 1)
    yield "a block's first row", right([64], [64], [0, 1, 0], 0, 2 + 1)
    yield "all rows of a block", right([130], [*range(130, 160)], [0, 0, 1], 0, 2 + 1)
    yield "before the last tiles", right([10], [50], [1, 0, 0], 0, 4 + 1)
    yield "there and here", right([10, 40, 100], [50, 120], [1, 1, 0], 0, 4 + 8 + 2 + 3)
    yield "the last key", right([191], [191], [0, 0, 1], 0, 2 + 1)
    yield "its own key, with slopes", right([40], [40], [1, 0, 0], 0, 3, parameters=STEEP)
    # Computed again as a whole: 4 tiles of keys and 4 of values.
    yield "a small sum", right([0], [40], [1, 0, 0], 8, 0, other=-1e-6)
    yield "a large sum beside", right([40], [50, 52], [1, 0, 0], 8, 0, score=(TINY, 100.0))
    # Two sequences, the second from key 70 on: its tiles of keys have parts of two chunks.
    bounds = [[0, 0, 70, 0, 70, 0], [0, 70, LENGTH, 70, LENGTH, 0]]
    spans = torch.tensor(bounds, dtype=torch.int32)
    yield "packed", right([5, 126], [130], [0, 1, 1], 0, 2 + 1, spans=spans)
    yield "packed, before the last tiles", right([5, 72], [105], [0, 1, 0], 0, 4 + 1, spans=spans)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    counted(forward, "sweep")
    counted(mending, "mended")
    for name, good in cases():
        print(f"{name}\t{float(not good):.0f}", flush=True)
