"""Which rows the LM head must take for its product to round as HFLM's whole one does.

A matrix product adds up in an order that depends on its number of rows and on a row's place in
it: CPU libraries give a thread's last few rows to another kernel. Which sizes that concerns
differs by processor (1–3 rows on one AMD EPYC, up to 15 on an Intel Xeon, and there any row of a
32,000-wide head with two threads), so it is tried out on the head itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE_BYTES = 2**30  # the most that a batch's whole logits may take; beyond, rows are taken out
SIZES = (65, 71, 100, 131, 160, 193)  # rows of products whose first rows are compared
PLACES = ((1, 1), (3, 2), (17, 1), (45, 3), (101, 1))  # first row, multiples of ``multiple``


@dataclass(frozen=True, slots=True)
class Product:
    """How to take rows out: only from batches of more than ``rows`` rows, filled up to a
    ``multiple``; never where ``stable`` is False."""

    rows: int
    multiple: int
    stable: bool

    def whole(self, rows: int, row_bytes: int) -> bool:
        """Whether a batch of so many rows must go through the head whole."""
        if self.rows == 0:
            return False
        return (rows <= self.rows or not self.stable) and rows * row_bytes <= WHOLE_BYTES


def try_out(
    head: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, device: torch.device
) -> Product:
    """Compares parts of a random product [200, width] with the same rows of the whole."""
    if device.type != "cpu":  # no claim to the bit there
        return Product(rows=0, multiple=1, stable=True)
    threads = torch.get_num_threads()
    multiple = 16 * threads
    generator = torch.Generator().manual_seed(0)
    longest = max(200, PLACES[-1][0] + max(n for _, n in PLACES) * multiple)
    x = torch.randn(longest, width, generator=generator).to(dtype)
    with torch.no_grad():
        whole = head(x)
        stable = all(torch.equal(head(x[:n]), whole[:n]) for n in SIZES) and all(
            torch.equal(head(x[i : i + n * multiple]), whole[i : i + n * multiple])
            for i, n in PLACES
        )
    return Product(rows=max(64, 4 * threads**2), multiple=multiple, stable=stable)
