"""The arithmetic that ``qbench bench attention --tiles`` tries: a variant is a kernel with a choice
of constants of :mod:`qbench.attention.kernels.tiles`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qbench.attention.kernels import modes, recall, tiles

CAP = 50.0

RECIPROCALS = {
    "a reciprocal each": 0,
    "one for two": modes.PAIRED.value,
    "none": modes.NEWTON.value,
    "where needed": modes.RARE.value,
    "where needed, by a maximum": tiles.exponentials(0),
    "where needed, 8 of 16 polynomials": tiles.exponentials(8),
    "where needed, 12 of 16 polynomials": tiles.exponentials(12),
    "where needed, polynomials": tiles.exponentials(16),
}
MEASURED = ("a reciprocal each", "one for two", "none")  # and slower
TANGENTS = {  # whether tanh is a polynomial, and how many of 16 exponentials
    "tanh by instruction": (False, 0),
    "tanh by instruction, 8 of 16 polynomials": (False, 8),
    "by polynomial": (True, 0),
    "by polynomial, 8 of 16 exponentials too": (True, 8),
    "by polynomial, exponentials too": (True, 16),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A kernel with the arithmetic that is tried: ``reciprocals`` of sigmoid and ``tangents`` of
    soft caps by their names above; None where there is no choice."""

    normalizer: str
    softcap: float = 0.0
    sloped: bool = False
    reciprocals: str | None = None
    tangents: str | None = None

    def __str__(self) -> str:
        words = [self.normalizer]
        words += ["soft cap"] if self.softcap else []
        words += ["ALiBi"] if self.sloped else []
        words += [word for word in (self.reciprocals, self.tangents) if word]
        return ", ".join(words)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """While kernels are launched with this arithmetic."""
        kept, polynomials = dict(tiles.RECIPROCALS), set(tiles.POLYNOMIALS)
        exponentials = dict(tiles.EXPONENTIALS)
        if self.reciprocals is not None:
            bits = RECIPROCALS[self.reciprocals]
            tiles.RECIPROCALS.update(dict.fromkeys(kept, bits))
        if self.tangents is not None:
            polynomial, powers = TANGENTS[self.tangents]
            tiles.POLYNOMIALS.clear()
            tiles.POLYNOMIALS.update(kept if polynomial else ())
            tiles.EXPONENTIALS.update(dict.fromkeys(exponentials, powers))
        recall.forget()
        try:
            yield
        finally:
            tiles.RECIPROCALS.update(kept)
            tiles.POLYNOMIALS.clear()
            tiles.POLYNOMIALS.update(polynomials)
            tiles.EXPONENTIALS.update(exponentials)
            recall.forget()


VARIANTS = (
    Variant(normalizer="softmax"),
    Variant(normalizer="softpick"),
    Variant(normalizer="sigmoid"),
    *(
        Variant(normalizer="sigmoid", reciprocals=each)
        for each in RECIPROCALS
        if each not in MEASURED
    ),
    Variant(normalizer="softmax", sloped=True),
    Variant(normalizer="sigmoid", sloped=True),
    *(Variant(normalizer="softmax", softcap=CAP, tangents=each) for each in TANGENTS),
    Variant(normalizer="sigmoid", softcap=CAP, tangents="by polynomial"),
)
