"""What ``qbench list quantizers`` says: every part of a cell's precision, with its options."""

from __future__ import annotations

from qbench.quantizers.names import (
    ACTIVATIONS,
    COMBINATIONS,
    KV_CACHES,
    PRUNINGS,
    QUANTIZERS,
    TRANSFORMS,
    Preset,
    Presets,
)

WIDTH = 22
PARTS = (
    ("weights", QUANTIZERS, "by its name alone, or as weights: of an entry in parts"),
    ("activations", ACTIVATIONS, "what linear layers take in, the LM head aside"),
    ("kv", KV_CACHES, "keys and values that attention reads"),
    ("outliers", TRANSFORMS, "changes the model to an equal one that is easier to quantize"),
    ("prune_heads", PRUNINGS, "attention heads that are cut out"),
)
EXAMPLE = "{weights: gptq-4bit, activations: int8-token, kv: int4-token, label: w4a8kv4}"


def quantizer_lines() -> list[str]:
    """Parts and ready combinations, one line a name and one an option."""
    lines = [f"a quantizer of a recipe is a name, or has parts: {EXAMPLE}", ""]
    for kind, registry, about in PARTS:
        lines += [f"{kind}: {about}", *_of(registry), ""]
    lines.append("combinations: several parts under one name, each of which may be stated anew")
    for name in COMBINATIONS:
        one = COMBINATIONS.get(name)
        parts = ", ".join(f"{kind}: {_shown(part)}" for kind, part in one.parts.items())
        lines += [f"{name:{WIDTH}} {one.description}", f"{'':{WIDTH}}   {{{parts}}}"]
    return lines


def _of(registry: Presets) -> list[str]:
    """Options are explained where they first stand."""
    lines: list[str] = []
    explained: list[Preset] = []
    for preset in map(registry.get, registry):
        lines.append(f"{preset.name:{WIDTH}} {preset.description}")
        same = (o for o in explained if o.kind is preset.kind and o.options == preset.options)
        first = next(same, None)
        if first and preset.options:
            lines.append(f"{'':{WIDTH}}   options as of {first.name}")
            continue
        explained.append(preset)
        for option, default in preset.options.items():
            told = list(default) if isinstance(default, tuple) else default
            lines.append(f"{'':{WIDTH}}   {option}={told}: {preset.explain(option)}")
    return lines


def _shown(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return "{" + ", ".join(f"{key}: {value}" for key, value in part.items()) + "}"
