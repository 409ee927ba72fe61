"""Which Hadamard matrices are known, and what for: plain numbers, no torch.

Sylvester's construction gives the powers of two, Paley's two (R. E. A. C. Paley, On orthogonal
matrices, 1933) those of order q + 1 for a prime power q ≡ 3 (mod 4) and 2 (q + 1) for q ≡ 1
(mod 4); the Kronecker product of two is one again. An order is taken as the smallest Paley
matrix times a power of two that gives it: 384 = 12 · 32, 2,816 = 44 · 64, 11,008 = 344 · 32.
"""

from __future__ import annotations

import math

LARGEST = 1024  # Paley matrix; a transform costs a product with it
CHUNK = 64  # largest Sylvester matrix that is multiplied by at once


def factors(order: int) -> tuple[int, ...] | None:
    """Orders of the matrices whose Kronecker product is the Hadamard matrix of ``order``: a
    Paley matrix first, if any, then powers of two; None where no such matrix is known here."""
    power = order & -order
    odd = order // power
    paley = 1
    if odd > 1:
        sizes = (odd * 2**k for k in range(2, power.bit_length()))
        paley = next((n for n in sizes if n <= LARGEST and source(n)), 0)
        if not paley:
            return None
    rest, parts = order // paley, [paley] if paley > 1 else []
    while rest > 1:
        parts.append(min(rest, CHUNK))
        rest //= parts[-1]
    return tuple(parts) or (1,)


def source(order: int) -> tuple[int, int, bool] | None:
    """Of Paley's matrix: prime and degree of the field that gives ``order``, and whether by the
    second construction; None if neither does."""
    if order % 4:
        return None
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        found = _prime_power(q) if q % 4 == remainder else None
        if found:
            return (*found, remainder == 1)
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    """``q`` as prime and exponent of at most 3; None for other numbers."""
    for degree in (1, 2, 3):
        prime = round(q ** (1 / degree))
        if prime**degree == q and prime > 1 and _is_prime(prime):
            return prime, degree
    return None


def _is_prime(n: int) -> bool:
    return all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


def no_matrix(what: str, order: int) -> str:
    """What to say of a width that cannot be rotated."""
    remedy = "; set online: false" if "intermediate" in what else ""
    return (
        f"{what} {order:,}: no Hadamard matrix of that order by Sylvester's and Paley's "
        f"constructions{remedy}"
    )
