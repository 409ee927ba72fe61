"""Forward pass of soft-capped softmax by programs that last, one for each multiprocessor: the plain
causal bf16 case, by :mod:`qbench.attention.kernels.gluon_capped`.

There is no running maximum: a cap bounds the scores, and so the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qbench.attention.kernels import modes, schedules
from qbench.attention.kernels.gluon_backward import of_rows
from qbench.attention.kernels.gluon_capped import capped_kernel
from qbench.attention.kernels.relaunch import described, launch
from qbench.attention.kernels.settings import factors
from qbench.attention.kernels.tiles import Lasting

KEYS = 64  # of a tile
SLOT = 128  # keys of a slot
# Below, most scores would take the slower formula. Within, weights are 2^±72 at most, which leaves
# 2^55 for how many they are and for values.
SOFTCAPS = (15.0, 50.0)
ASKED = modes.CAPPED.value
EITHER = modes.NEAR.value  # which tanh other kernels would take


def fits(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, family: str, asked: int,
    softcap: float, kind: Lasting,
) -> bool:  # fmt: skip
    """Whether the kernel is for such tensors, where there is no mask and no spans."""
    batch, heads, length, width = query.shape
    return (
        causal
        and family == "softmax"
        and asked & ~EITHER == ASKED
        and SOFTCAPS[0] <= softcap <= SOFTCAPS[1]
        and window == 0
        and query.dtype == torch.bfloat16
        and width == kind.width
        and width == value.shape[3]
        and key.shape[:3] == query.shape[:3]  # shared keys were not tried on a GPU
        and length % 128 == 0
        and length >= kind.shortest
        and batch * heads * length < 2**31
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and schedules.possible(plan(query, kind))
    )


def plan(query: Tensor, kind: Lasting) -> schedules.Plan:
    batch, heads, length, _ = query.shape
    block, pairs = 64 * kind.groups, batch * heads
    programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    programs = min(programs, pairs * -(-length // block))
    return schedules.Plan(length, pairs, block, SLOT, programs, query.device.index)


def forward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float,
    softcap: float, kind: Lasting,
) -> None:  # fmt: skip
    """Fills output and lse; for what :func:`fits` says."""
    _, heads, length, width = query.shape
    taken = plan(query, kind)
    table = schedules.table(taken)
    sources = [described(of_rows, query, 64)]
    sources += [described(of_rows, tensor, KEYS) for tensor in (key, value)]
    launch(
        capped_kernel, (taken.programs, 1), query.device.index, [*sources, output, lse, table],
        ((heads, length), table.shape[1], factors(scale, softcap), output.stride()[:3]),
        {"HEAD_DIM": width, "SUB": KEYS, "STAGES": kind.slots, "GROUPS": kind.groups,
         "REGISTERS": kind.registers, "ONES": kind.ones, "num_warps": 4},
    )  # fmt: skip
