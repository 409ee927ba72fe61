"""Quantizers by name: ``bf16``, ``bnb-4bit``, ``gptq-3bit``, … Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from qbench.errors import RecipeError, shown
from qbench.quantizers.quantizer import Quantizer
from qbench.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One name: the class of its settings, what the name itself states, and a line about it."""

    name: str
    kind: type[Any]
    fixed: dict[str, Any]
    description: str

    @property
    def options(self) -> dict[str, Any]:
        """The settings that a recipe may state beside the name, with their defaults."""
        return {f.name: f.default for f in fields(self.kind) if f.name not in self.fixed}

    def explain(self, option: str) -> str:
        """What ``option`` means and what it may be."""
        schema = _schema(self.kind)[option]
        return f"{schema.get('description', option)} ({_possibilities(schema)})"


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
        stated, known = dict(stated or {}), preset.options
        for key in stated:
            if key not in known:
                offer = f"it has {', '.join(known)}" if known else "it has no options"
                raise RecipeError(f"{name}: unknown option {key!r}; {offer}")
        try:
            return preset.kind(**preset.fixed, **stated)
        except ValidationError as error:
            raise RecipeError(f"{name}: {_first(error, preset.kind)}") from None


QUANTIZERS = Presets("quantizer")


def register(name: str, kind: type[Quantizer], description: str, **fixed: Any) -> None:
    """Give ``kind`` a name that recipes can say; ``fixed`` are the settings that it stands for."""
    QUANTIZERS.register(name, kind, description, **fixed)


def parse(name: str, stated: Mapping[str, Any] | None = None) -> Quantizer:
    """The quantizer that ``name`` and ``stated`` options give, defaults filled in.

    Raises RecipeError as ``Presets.parse``.
    """
    if name not in QUANTIZERS:
        _refuse_bits(str(name))
    return QUANTIZERS.parse(name, stated)


def _refuse_bits(name: str) -> None:
    """Raise where ``name`` is a known method at a width that it does not have."""
    attempt = re.fullmatch(r"([a-z]+)-(\w+)bit", name)
    if attempt is None:
        return
    method, bits = attempt.groups()
    widths = [n.split("-")[1].removesuffix("bit") for n in QUANTIZERS if n.startswith(f"{method}-")]
    if widths:
        raise RecipeError(f"{method} has no {bits}-bit; it has {', '.join(widths)}")


def _first(error: ValidationError, kind: type) -> str:
    """The first problem in one line: the option, what it may be, and what it is."""
    problem = error.errors()[0]
    if not problem["loc"]:  # of several options together
        return problem["msg"].removeprefix("Value error, ")
    option, *inside = problem["loc"]
    schema, value = _schema(kind)[str(option)], problem["input"]
    if inside and isinstance(inside[0], int):  # of an item of a list
        refusal = problem["msg"].removeprefix("Value error, ")
        wanted = refusal if problem["type"] == "value_error" else _possibilities(schema["items"])
        return f"{option}[{inside[0]}] must be {wanted}, not {shown(value)}"
    return f"{option} must be {_possibilities(schema)}, not {shown(value)}"


def _schema(kind: type) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema()["properties"]


def _possibilities(schema: dict[str, Any]) -> str:
    """What a JSON schema allows, in words: ``a whole number of at least 8 or -1``."""
    if "anyOf" in schema:
        return " or ".join(_possibilities(each) for each in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    nouns = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "array": "a list",
    }
    noun = nouns[schema["type"]]
    if "minimum" in schema:
        noun += f" of at least {schema['minimum']:g}"
    if "maximum" in schema:
        noun += f" and at most {schema['maximum']:g}"
    if "exclusiveMinimum" in schema:
        noun += " between {exclusiveMinimum:g} and {exclusiveMaximum:g}".format(**schema)
    return noun
