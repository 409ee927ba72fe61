"""Build Hadamard matrices: entries ±1, orthogonal rows; divided by √n, rotations. No torch.

Sylvester's construction gives the powers of two, Paley's two (R. E. A. C. Paley, On orthogonal
matrices, 1933) those of order q + 1 for a prime q ≡ 3 (mod 4) and 2 (q + 1) for q ≡ 1 (mod 4); the
Kronecker product of two is one again. An order is taken as the smallest Paley matrix times a power
of two that gives it: 384 = 12 · 32, 2,816 = 44 · 64."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.int8]
LARGEST = 1024  # Paley matrix; a transform costs a product with it
CHUNK = 64  # largest Sylvester matrix that is multiplied by at once


def factors(order: int) -> tuple[int, ...] | None:
    """Return the orders of the matrices whose Kronecker product is the Hadamard matrix of
    ``order``: a Paley matrix first, if needed, then powers of two up to ``CHUNK``; or None."""
    power = order & -order
    odd, paley = order // power, 1
    if odd > 1:
        sizes = (odd * 2**k for k in range(2, power.bit_length()))
        paley = next((n for n in sizes if n <= LARGEST and _prime(n)), 0)
        if not paley:
            return None
    rest, parts = order // paley, [paley] if paley > 1 else []
    while rest > 1:
        parts.append(min(rest, CHUNK))
        rest //= parts[-1]
    return tuple(parts) or (1,)


def _prime(order: int) -> int | None:
    """Return the prime whose Paley matrix has ``order``, a multiple of 4; None if there is none."""
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        if q % 4 == remainder and all(q % n for n in range(2, math.isqrt(q) + 1)):
            return q
    return None


@functools.cache
def matrix(order: int) -> Matrix:
    """Return the Hadamard matrix int8 [order, order], entries ±1, of an ``order`` that ``factors``
    returns: a power of two or Paley's. Later calls return the same array: do not write to it."""
    from scipy.linalg import hadamard  # slow to import, and settings need only factors

    if order & (order - 1) == 0:
        return hadamard(order, np.int8)
    q = _prime(order)
    assert q is not None, "factors() gives no other order"
    second, numbers = q % 4 == 1, np.arange(q)
    character = np.full(q, -1, np.int8)  # 1 for squares, 0 for 0
    character[numbers**2 % q] = 1
    character[0] = 0
    core = np.zeros((q + 1, q + 1), np.int8)
    core[0, 1:] = 1
    core[1:, 0] = 1 if second else -1
    core[1:, 1:] = character[(numbers[:, None] - numbers) % q]
    if not second:
        return core + np.eye(q + 1, dtype=np.int8)
    nonzero, zero = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(core, nonzero) + np.kron(np.eye(q + 1, dtype=np.int8), zero)
