"""Quantizers by name: ``bf16``, ``bnb-4bit``, ``gptq-3bit``, … Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbench.errors import RecipeError
from qbench.quantizers.settings import (
    Bnb4,
    Bnb8,
    Gptq,
    Hqq,
    Rtn,
    Settings,
    Unquantized,
    options,
)
from qbench.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """One name of the registry: what makes its settings, and a line about it."""

    name: str
    kind: type
    fixed: tuple[tuple[str, Any], ...]  # the settings that the name itself states
    description: str


QUANTIZERS: Registry[Quantizer] = Registry("quantizer")


def _add(name: str, kind: type, description: str, **fixed: Any) -> None:
    entry = Quantizer(name=name, kind=kind, fixed=tuple(fixed.items()), description=description)
    QUANTIZERS.add(name, entry)


_add("bf16", Unquantized, "unquantized, bfloat16", dtype="bfloat16")
_add("fp32", Unquantized, "unquantized, float32 (for CPUs)", dtype="float32")
_add("bnb-4bit", Bnb4, "bitsandbytes nf4 or fp4, blocks of 64", bits=4)
_add("bnb-8bit", Bnb8, "bitsandbytes LLM.int8, activations quantized too", bits=8)
for _n in (2, 3, 4, 8):
    _add(f"gptq-{_n}bit", Gptq, f"GPTQ, {_n} bits, calibrated", bits=_n)
for _n in (2, 3, 4, 8):
    _add(f"hqq-{_n}bit", Hqq, f"half-quadratic quantization, {_n} bits, no calibration", bits=_n)
for _n in (2, 3, 4, 8):
    _add(f"rtn-{_n}bit", Rtn, f"round to nearest in groups, {_n} bits: the yardstick", bits=_n)


def parse(name: str, stated: Mapping[str, Any] | None = None) -> Settings:
    """The settings that ``name`` and ``stated`` options give, defaults filled in.

    Raises RecipeError for an unknown name or option, a wrong type or an impossible value, saying
    what is possible.
    """
    if name not in QUANTIZERS:
        _refuse_bits(str(name))
    quantizer = QUANTIZERS.get(name)
    stated, known = dict(stated or {}), options(quantizer.kind)
    for key in stated:
        if key not in known:
            offer = f"it has {', '.join(known)}" if known else "it has no options"
            raise RecipeError(f"{name}: unknown option {key!r}; {offer}")
    return quantizer.kind(**dict(quantizer.fixed), **stated)


def _refuse_bits(name: str) -> None:
    """Raise where ``name`` is a known method at a width that it does not have."""
    attempt = re.fullmatch(r"([a-z]+)-(\w+)bit", name)
    if attempt is None:
        return
    method, bits = attempt.groups()
    widths = [n.split("-")[1].removesuffix("bit") for n in QUANTIZERS if n.startswith(f"{method}-")]
    if widths:
        raise RecipeError(f"{method} has no {bits}-bit; it has {', '.join(widths)}")


def requirements(settings: Settings) -> tuple[str, ...]:
    """Distributions whose versions can change what this quantizer gives, torch and transformers
    left out (they are part of every cell)."""
    if isinstance(settings, Bnb4 | Bnb8):
        return ("bitsandbytes",)
    if isinstance(settings, Hqq):
        return ("hqq",)
    if isinstance(settings, Gptq):
        backends = {"gptqmodel": ("gptqmodel", "optimum"), "torch": (), "auto-gptq": ("auto-gptq",)}
        return backends[settings.backend]
    return ()
