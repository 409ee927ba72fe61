"""Which rows the LM head must take for its product to round as HFLM's whole one does.

A matrix product adds up in an order that depends on its number of rows and on a row's index in
it: CPU libraries give a thread's last few rows to another kernel. Which sizes that concerns
differs by processor (1–3 rows on one AMD EPYC, up to 15 on an Intel Xeon, and there any row of a
32,000-wide head with two threads), so it is tried out on the head itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

WHOLE_BYTES = 2**30  # the most that a batch's whole logits may take; beyond, rows are taken out
SIZES = (65, 71, 100, 131, 160, 193)  # rows of products whose first rows are compared
PARTS = ((1, 1), (3, 2), (17, 1), (45, 3), (101, 1))  # first row, multiples of ``multiple``


@dataclass(frozen=True, slots=True)
class Product:
    """How to take rows out: only from batches of more than ``rows`` rows, filled up to a
    ``multiple``; never where ``stable`` is False."""

    rows: int
    multiple: int
    stable: bool

    def projection(self, total: int, chosen: Tensor, row_bytes: int) -> Projection:
        """For the rows ``chosen`` [R] of a batch of ``total`` rows, of which each gives
        ``row_bytes`` of logits."""
        few = 0 < total <= self.rows
        if (few or not self.stable) and total * row_bytes <= WHOLE_BYTES:
            return Projection(total=total, chosen=chosen)
        return Projection(multiple=self.multiple)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """How rows [R, H] go through an LM head: filled up to a ``multiple``, or where ``chosen`` [R]
    is given at these indexes of a product of ``total`` rows."""

    multiple: int = 1
    total: int = 0
    chosen: Tensor | None = None

    def parts(self, count: int, at_once: int) -> Iterator[tuple[int, int]]:
        """First and last row of each part of ``count`` rows, ``at_once`` or a few more each."""
        at_once += -at_once % self.multiple
        for first in range(0, count, at_once):
            yield first, min(first + at_once, count)

    def of(self, head: Callable[[Tensor], Tensor], rows: Tensor) -> Callable[[int, int], Tensor]:
        """Gives the logits [last − first, vocabulary] of a part. The product's shape depends on
        the part alone, so that two heads round alike."""
        if self.chosen is not None:
            whole = rows.new_zeros(self.total, rows.shape[1]).index_copy_(0, self.chosen, rows)
            logits = head(whole)[self.chosen]
            return lambda first, last: logits[first:last]
        missing = -len(rows) % self.multiple
        filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows

        def part(first: int, last: int) -> Tensor:
            end = last + (first - last) % self.multiple
            return head(filled[first:end])[: last - first]

        return part


def try_out(
    head: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, device: torch.device
) -> Product:
    """Compares parts of a random product [200, width] with the same rows of the whole."""
    if device.type != "cpu":  # no claim to the bit there
        return Product(rows=0, multiple=1, stable=True)
    threads = torch.get_num_threads()
    multiple = 16 * threads
    generator = torch.Generator().manual_seed(0)
    longest = max(200, PARTS[-1][0] + max(n for _, n in PARTS) * multiple)
    x = torch.randn(longest, width, generator=generator).to(dtype)
    with torch.no_grad():
        whole = head(x)
        stable = all(torch.equal(head(x[:n]), whole[:n]) for n in SIZES) and all(
            torch.equal(head(x[i : i + n * multiple]), whole[i : i + n * multiple])
            for i, n in PARTS
        )
    return Product(rows=max(64, 4 * threads**2), multiple=multiple, stable=stable)
