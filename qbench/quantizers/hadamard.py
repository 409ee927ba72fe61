"""Build Hadamard matrices: entries ±1, orthogonal rows; divided by √n, rotations. No torch.

Sylvester's construction gives the powers of two, Paley's two (R. E. A. C. Paley, On orthogonal
matrices, 1933) those of order q + 1 for a prime power q ≡ 3 (mod 4) and 2 (q + 1) for q ≡ 1
(mod 4); the Kronecker product of two is one again. An order is taken as the smallest Paley
matrix times a power of two that gives it: 384 = 12 · 32, 2,816 = 44 · 64, 11,008 = 344 · 32.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.int8]
LARGEST = 1024  # Paley matrix; a transform costs a product with it
CHUNK = 64  # largest Sylvester matrix that is multiplied by at once


def factors(order: int) -> tuple[int, ...] | None:
    """Return the orders of the matrices whose Kronecker product is the Hadamard matrix of
    ``order``: a Paley matrix first, if any, then powers of two; None if none can be built."""
    power = order & -order
    odd = order // power
    paley = 1
    if odd > 1:
        sizes = (odd * 2**k for k in range(2, power.bit_length()))
        paley = next((n for n in sizes if n <= LARGEST and _source(n)), 0)
        if not paley:
            return None
    rest, parts = order // paley, [paley] if paley > 1 else []
    while rest > 1:
        parts.append(min(rest, CHUNK))
        rest //= parts[-1]
    return tuple(parts) or (1,)


def _source(order: int) -> tuple[int, int, bool] | None:
    """Return prime and degree of the field whose Paley matrix has ``order``, and whether by the
    second construction; None if there is none."""
    if order % 4:
        return None
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        field = _prime_power(q) if q % 4 == remainder else None
        if field:
            return (*field, remainder == 1)
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    """Return ``q`` as a prime and an exponent of at most 3; None for other numbers."""
    prime = next((n for n in range(2, math.isqrt(q) + 1) if q % n == 0), q)
    return next(((prime, degree) for degree in (1, 2, 3) if prime**degree == q), None)


@functools.cache
def matrix(order: int) -> Matrix:
    """Return the Hadamard matrix, entries ±1, of an ``order`` that is a power of two or Paley's."""
    from scipy.linalg import hadamard  # slow to import, and settings ask for factors alone

    return hadamard(order, np.int8) if order & (order - 1) == 0 else _paley(order)


def _paley(order: int) -> Matrix:
    field = _source(order)
    prime, degree, second = field
    characters = _characters(prime, degree)
    q = len(characters)
    core = np.zeros((q + 1, q + 1), np.int8)
    core[0, 1:] = 1
    core[1:, 0] = 1 if second else -1
    core[1:, 1:] = characters
    if not second:
        return core + np.eye(q + 1, dtype=np.int8)
    nonzero = np.array([[1, 1], [1, -1]], np.int8)
    zero = np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(core, nonzero) + np.kron(np.eye(q + 1, dtype=np.int8), zero)


def _characters(prime: int, degree: int) -> Matrix:
    """Return χ(a − b) for all a, b of the field: 1 for squares, −1 for others, 0 for 0. Elements
    are polynomials over the integers modulo ``prime``, of a degree below ``degree``."""
    elements = list(itertools.product(range(prime), repeat=degree))
    powers = _powers_of_x(prime, degree)
    character = {x: 1 - 2 * (power % 2) for power, x in enumerate(powers)} | {elements[0]: 0}

    def difference(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((x - y) % prime for x, y in zip(a, b, strict=True))

    return np.array([[character[difference(a, b)] for b in elements] for a in elements], np.int8)


def _powers_of_x(prime: int, degree: int) -> list[tuple[int, ...]]:
    """Return all elements but 0 as x⁰, x¹, x², … modulo the first polynomial x^degree − Σ cᵢ xⁱ
    that generates them all: coefficients, the lowest first."""
    for coefficients in itertools.product(range(prime), repeat=degree):
        powers = [(1, *[0] * (degree - 1))]
        while len(powers) < prime**degree - 1:
            *lower, top = powers[-1]
            shifted = zip((0, *lower), coefficients, strict=True)
            powers.append(tuple((a + top * c) % prime for a, c in shifted))
        if len({*powers, (0,) * degree}) == prime**degree:
            return powers
    raise AssertionError  # every field has a primitive polynomial
