"""The arithmetic that ``qbench bench attention --tiles`` tries: a variant is a kernel with a choice
of constants of :mod:`qbench.attention.kernels.tiles`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from qbench.attention.kernels import modes, recall, tiles

CAP = 50.0

RECIPROCALS = {"a reciprocal each": 0, "where needed": modes.RARE.value}
TANGENTS = {"tanh by instruction": False, "by polynomial": True}  # whether tanh is a polynomial


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
        if self.reciprocals is not None:
            bits = RECIPROCALS[self.reciprocals]
            tiles.RECIPROCALS.update(dict.fromkeys(kept, bits))
        if self.tangents is not None:
            tiles.POLYNOMIALS.clear()
            tiles.POLYNOMIALS.update(kept if TANGENTS[self.tangents] else ())
        recall.forget()
        try:
            yield
        finally:
            tiles.RECIPROCALS.update(kept)
            tiles.POLYNOMIALS.clear()
            tiles.POLYNOMIALS.update(polynomials)
            recall.forget()


VARIANTS = (
    Variant(normalizer="softmax"),
    Variant(normalizer="softpick"),
    Variant(normalizer="sigmoid"),
    *(Variant(normalizer="sigmoid", reciprocals=each) for each in RECIPROCALS),
    Variant(normalizer="softmax", sloped=True),
    Variant(normalizer="sigmoid", sloped=True),
    *(Variant(normalizer="softmax", softcap=CAP, tangents=each) for each in TANGENTS),
    Variant(normalizer="sigmoid", softcap=CAP, tangents="by polynomial"),
)
