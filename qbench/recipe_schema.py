"""Describe recipes: their keys as JSON Schema for editors, quantizers with options for a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from qbench.quantizers.names import COMBINATIONS, PARTS, Preset, Presets
from qbench.recipe import Recipe

Schema = dict[str, Any]
Row = tuple[str, str]
ABOUT = {
    "weights": "by its name alone, or as weights: of an entry in parts",
    "activations": "inputs of linear layers, without the LM head",
    "kv": "keys and values that attention reads",
    "outliers": "changes the model to an equivalent one that is easier to quantize",
}
EXAMPLE = "{weights: gptq-4bit, activations: int8-token, kv: int4-token, label: w4a8kv4}"


def json_schema() -> Schema:
    """JSON Schema (2020-12) of what ``Recipe.load`` reads, short forms included."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["description"] = "A recipe of qbench."
    schema["properties"]["quantizers"]["items"] = {"$ref": "#/$defs/Quantizer"}
    schema["$defs"]["Quantizer"] = _quantizer()
    return schema


def _quantizer() -> Schema:
    """A name, or a mapping: of a name with its options, or of parts."""
    names = [*PARTS["weights"], *COMBINATIONS]
    options = {
        field.name: {} for preset in map(PARTS["weights"].get, PARTS["weights"])
        for field in fields(preset.kind)
    }  # fmt: skip
    parts = {
        kind: {"anyOf": [{"enum": [*PARTS[kind]]}, {"type": "object"}]} for kind in PARTS
    }  # fmt: skip
    mapping = {
        "type": "object",
        "properties": {
            "name": {"enum": names},
            "label": {"type": "string", "description": "Unique in its recipe."},
            **parts,
            **options,
        },
    }
    return {"anyOf": [{"enum": names}, {"type": "string"}, mapping]}


def explain(preset: Preset, option: str) -> str:
    """What an option of a quantizer means and what it may be."""
    value = TypeAdapter(preset.kind).json_schema()["properties"][option]
    return f"{value.get('description', option)} ({_what(value)})"


def _what(value: Schema) -> str:
    """Return the values that a JSON Schema allows, in words."""
    if "enum" in value:
        return ", ".join(map(str, value["enum"]))
    if "const" in value:
        return str(value["const"])
    if "anyOf" in value:
        kinds = [_what(one) for one in value["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if value.get("type") == "array":
        return f"a list of: {_what(value.get('items', {}))}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    text = words.get(value.get("type", ""), "text")
    if {"exclusiveMinimum", "exclusiveMaximum"} <= value.keys():
        return text + " between {exclusiveMinimum:g} and {exclusiveMaximum:g}".format(**value)
    least, most = value.get("minimum"), value.get("maximum")
    return text + (f" ≥ {least:,}" if least is not None else "") + (
        f", ≤ {most:,}" if most is not None else ""
    )  # fmt: skip


def quantizer_rows() -> Iterator[Row]:
    """Parts and ready combinations, a row a name and one an option."""
    yield "in a recipe:", f"a name, or a mapping of parts: {EXAMPLE}"
    yield "--quantizers:", "names, and parts joined by +: kv4, gptq-4bit+int8-token+kv4"
    for kind, about in ABOUT.items():
        yield from [("", ""), (f"{kind}:", about), *_of(PARTS[kind])]
    yield from [("", ""), ("combinations:", "several parts under one name; each can be replaced")]
    for name in COMBINATIONS:
        one = COMBINATIONS.get(name)
        parts = ", ".join(f"{kind}: {_shown(part)}" for kind, part in one.fixed.items())
        yield from [(name, one.description), ("", f"{{{parts}}}")]


def _of(registry: Presets) -> Iterator[Row]:
    """Options are explained where they first stand."""
    explained: set[str] = set()
    for preset in map(registry.get, registry):
        yield preset.name, preset.description
        as_above = []
        for option, default in preset.options.items():
            told = list(default) if isinstance(default, tuple) else default
            line = f"{option}={told}: {explain(preset, option)}"
            if line in explained:
                as_above.append(option)
            else:
                explained.add(line)
                yield "", line
        if as_above:
            yield "", f"as above: {', '.join(as_above)}"


def _shown(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return "{" + ", ".join(f"{key}: {value}" for key, value in part.items()) + "}"
