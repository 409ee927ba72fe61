"""Methods by the names that recipes say, and a recipe's entry as a config. Imports no torch.

One registry a field of :class:`~qbench.quantizers.config.QuantizationConfig`. A name stands for a
class of settings, some of them fixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from qbench import removed
from qbench.errors import RecipeError, shown
from qbench.plugins import Registry
from qbench.quantizers.config import (
    RECIPE_KEYS,
    SETTINGS,
    UNQUANTIZED,
    Dtype,
    QuantizationConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One name: the class of its settings, what the name itself states (of a combination, its
    parts), and a line about it."""

    name: str
    kind: type[Any]
    fixed: dict[str, Any]
    description: str

    @property
    def options(self) -> dict[str, Any]:
        """The settings that a recipe may state beside the name, with their defaults."""
        return {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(self.kind)
            if f.name not in self.fixed
        }


class Presets(Registry[Preset]):
    """Names of one kind of settings, and how what a recipe states beside one becomes settings."""

    def register(self, name: str, kind: type, description: str, **fixed: Any) -> None:
        """Give ``kind`` a name that recipes can say; ``fixed`` are the settings that it stands
        for."""
        self.add(name, Preset(name=name, kind=kind, fixed=fixed, description=description))

    def parse(self, name: str, stated: Mapping[str, Any] | None = None) -> Any:
        """The settings that ``name`` and ``stated`` options give, defaults filled in.

        Raises RecipeError for an unknown name or option, a wrong type or an impossible value,
        saying what is possible.
        """
        preset = self.get(name)
        known = preset.options
        stated = dict(stated or {})
        for older, option in removed.RENAMED_OPTIONS.items():
            if older in stated and option not in stated:
                stated[option] = stated.pop(older)
        for key in stated:
            if key in removed.QUANTIZER_OPTIONS:
                raise RecipeError(f"{name}: {key}: {removed.QUANTIZER_OPTIONS[key]}")
            if key not in known:
                offer = f"it has {', '.join(known)}" if known else "it has no options"
                raise RecipeError(f"{name}: unknown option {key!r}; {offer}")
        try:
            return preset.kind(**preset.fixed, **stated)
        except ValidationError as error:
            raise RecipeError(f"{name}: {_first(error)}") from None


QUANTIZERS = Presets("quantizer")
ACTIVATIONS = Presets("activation quantizer")
KV_CACHES = Presets("KV cache quantizer")
TRANSFORMS = Presets("outlier treatment")
# by the keys of a recipe
PARTS: dict[str, Presets] = {
    "weights": QUANTIZERS,
    "activations": ACTIVATIONS,
    "kv": KV_CACHES,
    "outliers": TRANSFORMS,
}


register = QUANTIZERS.register  # settings of weights
COMBINATIONS: Registry[Preset] = Registry("combination")


def register_combination(name: str, description: str, **parts: Any) -> None:
    """Give ``parts`` (``weights``, ``activations``, ``kv``, ``outliers``) one name."""
    preset = Preset(name=name, kind=QuantizationConfig, fixed=parts, description=description)
    COMBINATIONS.add(name, preset)


@pydantic_dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Unquantized:
    """What ``bf16`` and the like stand for: no settings of weights, and a dtype."""

    dtype: Dtype


for _dtype, _line in (("bfloat16", ""), ("float16", ""), ("float32", " (for CPUs)")):
    register(UNQUANTIZED[_dtype], Unquantized, f"unquantized, {_dtype}{_line}", dtype=_dtype)


def unquantized_dtype(entries: Sequence[Any]) -> str:
    """Of the one unquantized entry of a recipe's list, so that damage against it is that of
    quantization alone; bfloat16 where there is none, or more than one."""
    named = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    found = [dtype for dtype, name in UNQUANTIZED.items() if name in named]
    return found[0] if len(found) == 1 else "bfloat16"


def config_of(entry: Mapping[str, Any], *, compute_dtype: str = "bfloat16") -> QuantizationConfig:
    """The config that an entry of a recipe gives, its label taken off.

    ``entry``: ``{name: …, option: …}``, or parts (``{weights: …, activations: …, kv: …,
    outliers: …}``), or the name of a combination with parts that replace its own.
    Each part is a name or ``{name: …, option: …}``. Weights that are left out are not quantized.
    Computed in ``compute_dtype`` unless an entry says otherwise. Raises RecipeError, one line.
    """
    stated = dict(entry)
    name = stated.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise RecipeError("a quantizer is a name, or {name: …, option: value}")
    if name in COMBINATIONS:
        stated = {**COMBINATIONS.get(name).fixed, **stated}
    elif name is not None:
        if both := [kind for kind in stated if kind in PARTS]:
            raise RecipeError(f"{name}: write weights: {name} if {both[0]} is there too")
        stated = {"weights": {"name": name, **stated}}
    elif not any(kind in PARTS for kind in stated):
        raise RecipeError("a quantizer is a name, or {name: …, option: value}")
    for kind in stated:
        if kind in removed.QUANTIZER_OPTIONS:
            raise RecipeError(f"{kind}: {removed.QUANTIZER_OPTIONS[kind]}")
        if kind not in PARTS:
            raise RecipeError(
                f"unknown part {shown(kind)}; known: {', '.join(PARTS)}, label; a part's options "
                f"go into its own braces, as in activations: {{name: …, {kind}: …}}"
            )
    stated.setdefault("weights", UNQUANTIZED[compute_dtype])
    parts = {
        kind: _settings(kind, registry, stated[kind], compute_dtype)
        for kind, registry in PARTS.items()
        if stated.get(kind) is not None
    }
    return _checked(parts, compute_dtype)


def _checked(parts: dict[str, Any], compute_dtype: str) -> QuantizationConfig:
    weights, dtype = parts.pop("weights", None), compute_dtype
    if isinstance(weights, Unquantized):
        weights, dtype = None, weights.dtype
    if weights and weights.precision.activations is not None and "activations" in parts:
        raise RecipeError(
            f"weights: {weights.name} quantizes activations itself; leave activations out"
        )
    if weights and weights.prequantized and parts:
        raise RecipeError(
            f"{weights.name}: it is scored as published; leave {next(iter(parts))} out"
        )
    if "outliers" in parts:
        parts["outliers"].require_fit(parts.get("kv"))
    fields_of = {key: field for field, key in RECIPE_KEYS.items()}
    named = {fields_of[kind]: settings for kind, settings in parts.items()}
    config = QuantizationConfig(weights=weights, dtype=dtype, **named)
    if "outliers" in parts and not config.precision.quantized:
        raise RecipeError(
            f"outliers: {parts['outliers'].name} alone quantizes nothing; add weights, activations "
            "or kv"
        )
    return config


def _settings(kind: str, registry: Presets, part: Any, compute_dtype: str) -> Any:
    options = {"name": part} if isinstance(part, str) else part
    options = dict(options) if isinstance(options, Mapping) else {}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise RecipeError(f"{kind}: a name, or {{name: …, option: value}}, not {shown(part)}")
    if registry is QUANTIZERS and name not in registry:
        raise RecipeError(_unknown(name))
    if name in registry and "compute_dtype" in registry.get(name).options:
        options = {"compute_dtype": compute_dtype, **options}
    return registry.parse(name, options)


def _unknown(name: str) -> str:
    """What to say of a name that no quantizer has: a known method may lack that width."""
    if attempt := re.fullmatch(r"([a-z]+)-(\w+)bit", name):
        method, bits = attempt.groups()
        alike = [one for one in QUANTIZERS if one.startswith(f"{method}-")]
        if widths := [one.split("-")[1].removesuffix("bit") for one in alike]:
            return f"{method} has no {bits}-bit; it has {', '.join(widths)}"
    return (
        f"unknown quantizer {name!r}; known: {', '.join((*QUANTIZERS, *COMBINATIONS))}; on the "
        "command line activations (int8-token), KV caches (kv4) and parts joined by + "
        "(gptq-4bit+kv4) too: `qbench list quantizers`"
    )


def _first(error: ValidationError) -> str:
    """The first problem in one line: the option, what it may be, and what it is."""
    first = error.errors()[0]
    wanted = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not first["loc"]:  # of several options together
        return wanted
    option, *parts = first["loc"]
    item = "".join(f"[{part}]" for part in parts if isinstance(part, int))  # a union's have names
    return f"{option}{item} must be {wanted}, not {shown(first['input'])}"
