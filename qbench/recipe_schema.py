"""Describe recipes: their keys as JSON Schema for editors, quantizers with options for a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from qbench.quantizers.config import KINDS, UNQUANTIZED
from qbench.quantizers.registry import COMBINATIONS, Method, methods, names
from qbench.recipe import Recipe

Schema = dict[str, Any]
Row = tuple[str, str]
ABOUT = {
    "weights": "of linear layers",
    "transform": "changes the model to an equal one that is easier to quantize",
    "activations": "inputs of linear layers, without the LM head",
    "kv_cache": "keys and values that attention reads; under the key kv_cache without kv-",
}


def json_schema() -> Schema:
    """Return the JSON Schema (2020-12) of recipes, short forms included."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["description"] = "A recipe of qbench."
    schema["properties"]["quantizers"]["items"] = {"$ref": "#/$defs/Quantizer"}
    schema["$defs"]["Quantizer"] = _quantizer()
    return schema


def _quantizer() -> Schema:
    """Return the schema of a quantizer: a text, or a mapping of a name with options, or parts."""
    options = {
        option: {} for kind in KINDS for method in methods(kind) for option in method.options
    }  # fmt: skip
    parts = {
        kind: {"anyOf": [{"enum": [m.name for m in methods(kind)]}, {"type": "string"},
                         {"type": "object"}]}
        for kind in KINDS
    }  # fmt: skip
    mapping = {
        "type": "object",
        "properties": {
            "name": {"anyOf": [{"enum": names()}, {"type": "string"}]},
            "label": {"type": "string", "description": "Unique in its recipe."},
            **options,
            **parts,
        },
    }
    return {"anyOf": [{"enum": names()}, {"type": "string"}, mapping]}


def explain(method: Method, option: str) -> str:
    """Return what an option of a quantizer means and which values it takes."""
    value = TypeAdapter(method.settings).json_schema()["properties"][option]
    return f"{value.get('description', option)} ({_what(value)})"


def _what(value: Schema) -> str:
    """Return the values that a JSON Schema allows, in words."""
    if "enum" in value:
        return ", ".join(map(str, value["enum"]))
    if "const" in value:
        return str(value["const"])
    if "anyOf" in value:
        kinds = [_what(choice) for choice in value["anyOf"] if choice.get("type") != "null"]
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
    """Yield a row per method and one per option, for a list of quantizers."""
    yield "grammar:", "parts joined by +, each a name with options after a colon:"
    yield "", "gptq-4bit:group_size=64,desc_act=true+int8-token+kv4 (kv4: kv-int4-token)"
    yield "in a recipe:", "the same, or a mapping: {name: gptq-4bit, group_size: 64, label: mine},"
    yield "", "{weights: gptq-4bit, activations: int8-token, kv_cache: int4-token}"
    yield from [("", ""), ("unquantized:", "weights in a dtype")]
    yield from ((name, dtype) for dtype, name in UNQUANTIZED.items())
    for kind, about in ABOUT.items():
        yield from [("", ""), (f"{kind}:", about), *_of(methods(kind))]
    yield from [("", ""), ("combinations:", "names of several parts")]
    yield from ((name, f"{about}: {parts}") for name, (parts, about) in COMBINATIONS.items())


def _of(every: Sequence[Method]) -> Iterator[Row]:
    """Yield the rows of methods; an option is explained at the first method that has it."""
    explained: set[str] = set()
    for method in every:
        yield method.name, method.description
        as_above = []
        for option, default in method.options.items():
            value = list(default) if isinstance(default, tuple) else default
            line = f"{option}={value}: {explain(method, option)}"
            if line in explained:
                as_above.append(option)
            else:
                explained.add(line)
                yield "", line
        if as_above:
            yield "", f"as above: {', '.join(as_above)}"
