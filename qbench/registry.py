"""One registry shape for normalizers, quantizers, checkpoint formats and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from qbench.errors import RecipeError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to things of one kind. A duplicate raises; an unknown name lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}

    def add(self, name: str, thing: T) -> T:
        if name in self._things:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._things[name] = thing
        return thing

    def get(self, name: str) -> T:
        if name not in self._things:
            raise RecipeError(f"unknown {self.kind} {name!r}; known: {', '.join(self._things)}")
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __contains__(self, name: object) -> bool:
        return name in self._things
