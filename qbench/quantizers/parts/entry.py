"""A recipe's entry that states parts, as a quantizer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qbench.errors import RecipeError, shown
from qbench.quantizers.names import QUANTIZERS, Presets, parse
from qbench.quantizers.parts.combined import UNQUANTIZED, Combined
from qbench.quantizers.parts.registries import (
    ACTIVATIONS,
    COMBINATIONS,
    HEADS,
    KV_CACHES,
    OUTLIERS,
)
from qbench.quantizers.quantizer import Quantizer

PARTS: dict[str, Presets] = {
    "weights": QUANTIZERS,
    "activations": ACTIVATIONS,
    "kv": KV_CACHES,
    "outliers": OUTLIERS,
    "prune_heads": HEADS,
}


def unquantized_dtype(entries: Sequence[Any]) -> str:
    """Of the one unquantized entry of a recipe's list, so that damage against it is that of
    quantization alone; bfloat16 where there is none, or more than one."""
    named = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    found = [dtype for dtype, name in UNQUANTIZED.items() if name in named]
    return found[0] if len(found) == 1 else "bfloat16"


def quantizer_of(entry: Mapping[str, Any], *, compute_dtype: str) -> Quantizer:
    """The quantizer that an entry of a recipe gives, its label taken off.

    ``entry``: ``{name: …, option: …}``, or parts (``{weights: …, activations: …, kv: …,
    outliers: …, prune_heads: …}``), or the name of a combination with parts that replace its own.
    Each part is a name or ``{name: …, option: …}``. Weights that are left out are not quantized.
    Computed in ``compute_dtype`` unless an entry says otherwise. Raises RecipeError, one line.
    """
    stated = dict(entry)
    name = stated.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise RecipeError("a quantizer is a name, or {name: …, option: value}")
    if name in COMBINATIONS:
        stated = {**COMBINATIONS.get(name).parts, **stated}
    elif name is not None:
        if both := [kind for kind in stated if kind in PARTS]:
            raise RecipeError(f"{name}: say weights: {name} where there is {both[0]} beside it")
        return _of(QUANTIZERS, name, stated, compute_dtype)
    elif not any(kind in PARTS for kind in stated):
        raise RecipeError("a quantizer is a name, or {name: …, option: value}")
    return _combined(stated, compute_dtype)


def _combined(stated: dict[str, Any], compute_dtype: str) -> Quantizer:
    for kind in stated:
        if kind not in PARTS:
            raise RecipeError(
                f"unknown part {shown(kind)}; there are {', '.join(PARTS)}, and label; a part's "
                f"options stand in its own braces, as activations: {{name: …, {kind}: …}}"
            )
    stated.setdefault("weights", UNQUANTIZED[compute_dtype])
    parts = {
        kind: _of(registry, *_named(kind, stated[kind]), compute_dtype)
        for kind, registry in PARTS.items()
        if stated.get(kind) is not None
    }
    weights = parts["weights"]
    if not (parts.keys() - {"weights"}):
        return weights
    if weights.precision.activations is not None and "activations" in parts:
        raise RecipeError(
            f"weights: {weights.name} quantizes activations itself; leave activations out"
        )
    if "outliers" in parts:
        parts["outliers"].require_fit(parts.get("kv"))
    combined = Combined(**parts)
    if not combined.precision.quantized:
        raise RecipeError(
            f"outliers: {parts['outliers'].name} alone quantizes nothing; "
            "add weights, activations or kv"
        )
    return combined


def _named(kind: str, part: Any) -> tuple[str, dict[str, Any]]:
    options = {"name": part} if isinstance(part, str) else part
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        raise RecipeError(f"{kind}: a name, or {{name: …, option: value}}, not {shown(part)}")
    return options["name"], {k: v for k, v in options.items() if k != "name"}


def _of(registry: Presets, name: str, options: dict[str, Any], compute_dtype: str) -> Any:
    if name in registry and "compute_dtype" in registry.get(name).options:
        options = {"compute_dtype": compute_dtype, **options}
    return parse(name, options) if registry is QUANTIZERS else registry.parse(name, options)
