"""Choose the implementation of an attention function. Imports no torch, since plans use it."""

from __future__ import annotations

import importlib.util
import os

from qbench.attention.kernels import require
from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import RecipeError, UnavailableError

IMPLEMENTATIONS = ("auto", "reference", "triton")
# In a normalizer's place: a model's class attends as it does in transformers, by its own code.
NATIVE = "native"


def choose(normalizer: str, implementation: str, device: str) -> str:
    """Return ``reference`` or ``triton`` for ``implementation`` on ``device`` (``cuda:1``,
    ``cpu``). ``auto`` is triton on CUDA if there are kernels, else the reference. Raises
    RecipeError for an unknown name, UnavailableError if triton cannot run or lacks kernels."""
    chosen = NORMALIZERS[normalizer]
    kind = device.partition(":")[0]
    if implementation not in IMPLEMENTATIONS:
        raise RecipeError(
            f"unknown attention {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "auto":
        implementation = "triton" if kind == "cuda" and chosen.kernels is not None else "reference"
    if implementation == "triton":
        require(normalizer)
        problem = ""
        if importlib.util.find_spec("triton") is None:
            problem = "the package triton is not installed"
        elif kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            problem = f"the kernels need a CUDA device, not {kind!r}"
        if problem:
            raise UnavailableError(f"attention: triton cannot run here: {problem}; use 'reference'")
    return implementation
