"""Which blocks of queries each program takes, where as many programs are started as there are
multiprocessors. Causal blocks take longer the later they begin."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

SECTION = 32  # batch rows × heads that are worked on together, for the L2 cache
MOST = 256  # tables that are kept
LARGEST = 1 << 16  # blocks of a table: longer ones take the host too long

_tables: dict[Plan, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Plan:
    """``pairs``: batch rows × heads; ``block``: queries of a block; ``slot``: keys that are loaded
    together; ``device``: whose memory the table is in."""

    length: int
    pairs: int
    block: int
    slot: int
    programs: int
    device: int | None

    @property
    def blocks(self) -> int:
        """Of one pair; the last may have fewer queries."""
        return -(-self.length // self.block)


def load(plan: Plan, at: int) -> int:
    """What block ``at`` of a pair takes, in slots of keys; one more for what each block takes."""
    return -(-min((at + 1) * plan.block, plan.length) // plan.slot) + 1


def rows(plan: Plan) -> list[list[int]]:
    """Of each program pair · blocks + block, in the order that they are taken: section by section
    the longest first, each by the program that has the least."""
    least = [(0, program) for program in range(plan.programs)]
    found: list[list[int]] = [[] for _ in range(plan.programs)]
    for first in range(0, plan.pairs, SECTION):
        for at in reversed(range(plan.blocks)):
            for pair in range(first, min(first + SECTION, plan.pairs)):
                taken, program = least[0]
                heapq.heapreplace(least, (taken + load(plan, at), program))
                found[program].append(pair * plan.blocks + at)
    return found


def possible(plan: Plan) -> bool:
    """Whether :func:`table` has one, or can make one now: it is copied from the host's memory,
    which a CUDA graph cannot capture."""
    if plan in _tables:
        return True
    room = len(_tables) < MOST and plan.blocks * plan.pairs <= LARGEST
    return room and not torch.cuda.is_current_stream_capturing()


def table(plan: Plan) -> Tensor:
    """:func:`rows` [programs, columns] in int32, each after how many they are. Never given back:
    CUDA graphs and calls that are repeated know its address."""
    if plan not in _tables:
        taken = rows(plan)
        columns = -(-(1 + max(map(len, taken))) // 16) * 16
        padded = [[len(row), *row] + [0] * (columns - 1 - len(row)) for row in taken]
        _tables[plan] = torch.tensor(padded, dtype=torch.int32, device=plan.device)
    return _tables[plan]


def kept(tensor: Tensor) -> bool:
    """Whether this is a table: the same in every call, not room for results."""
    return any(tensor is one for one in _tables.values())
