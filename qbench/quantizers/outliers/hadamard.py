"""Hadamard matrices: entries ±1, rows orthogonal; divided by √n, a rotation.

Built by Sylvester's and Paley's constructions, and their Kronecker products (``orders``).
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from qbench.quantizers.outliers.orders import factors, source


def transform(x: Tensor, *, inverse: bool = False) -> Tensor:
    """x H / √n along the last axis of x [..., n], in x's dtype; x Hᵀ / √n if ``inverse``.

    Raises ValueError where no Hadamard matrix of that order is known here.
    """
    order = x.shape[-1]
    parts = factors(order)
    if parts is None:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    y, after = x, order
    for part in parts:
        after //= part
        factor = matrix(part, x.dtype, x.device)
        factor = factor.T if inverse else factor
        # No axis is moved, which would copy: the last takes a matrix on the right, others left.
        y = y.reshape(-1, part) @ factor if after == 1 else factor.T @ y.reshape(-1, part, after)
    return y.reshape(x.shape) / math.sqrt(order)


@functools.lru_cache(maxsize=64)
def matrix(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix of an ``order`` that is a power of two or Paley's: entries ±1."""
    rows = _sylvester(order) if order & (order - 1) == 0 else _paley(order)
    return rows.to(device, dtype)


def _sylvester(order: int) -> Tensor:
    rows = torch.ones(1, 1, dtype=torch.int8)
    while len(rows) < order:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    return rows


def _paley(order: int) -> Tensor:
    field = source(order)
    assert field is not None
    prime, degree, second = field
    characters = _characters(prime, degree)
    q = len(characters)
    core = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    core[0, 1:] = 1
    core[1:, 0] = 1 if second else -1
    core[1:, 1:] = characters
    if not second:
        return core + torch.eye(q + 1, dtype=torch.int8)
    one = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    zero = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(core, one) + torch.kron(torch.eye(q + 1, dtype=torch.int8), zero)


def _characters(prime: int, degree: int) -> Tensor:
    """χ(a − b) for all a, b of the field: 1 for squares, −1 for others, 0 for 0. Elements are
    polynomials over the integers modulo ``prime``, modulo one that has no divisor."""
    elements = list(itertools.product(range(prime), repeat=degree))
    modulus = _irreducible(prime, degree)
    squares = {_product(a, a, modulus, prime) for a in elements if any(a)}

    def character(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        c = tuple((x - y) % prime for x, y in zip(a, b, strict=True))
        return (1 if c in squares else -1) if any(c) else 0

    table = [[character(a, b) for b in elements] for a in elements]
    return torch.tensor(table, dtype=torch.int8)


def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """Coefficients c of an x^degree − Σ cᵢ xⁱ without divisors: up to degree 3, without roots."""
    if degree == 1:
        return (0,)
    return next(
        c
        for c in itertools.product(range(prime), repeat=degree)
        if all((x**degree - sum(c[i] * x**i for i in range(degree))) % prime for x in range(prime))
    )


def _product(
    a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], prime: int
) -> tuple[int, ...]:
    degree = len(a)
    whole = [0] * (2 * degree - 1)
    for i, j in itertools.product(range(degree), repeat=2):
        whole[i + j] += a[i] * b[j]
    for top in range(2 * degree - 2, degree - 1, -1):  # x^degree = Σ cᵢ xⁱ
        for i in range(degree):
            whole[top - degree + i] += whole[top] * modulus[i]
    return tuple(c % prime for c in whole[:degree])
