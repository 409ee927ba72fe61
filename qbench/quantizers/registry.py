"""Register quantizers by name, and read a quantizer as a recipe or an option writes it. No torch.

A quantizer is written as parts joined by ``+``, each a name with options after a colon::

    gptq-4bit        gptq-4bit:group_size=64,desc_act=true        gptq-4bit+int8-token+kv4

A recipe may write a mapping instead, with the same names and options::

    {name: gptq-4bit, group_size: 64}        {weights: gptq-4bit, kv_cache: {name: int4-token}}"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from qbench import removed
from qbench.errors import RecipeError, shown
from qbench.plugins import Registry
from qbench.quantizers.config import (
    KINDS,
    UNQUANTIZED,
    Dtype,
    QuantizationConfig,
    Settings,
    settings,
)

S = TypeVar("S", bound=type[Settings])
CLOSEST = 0.6  # similarity of an unknown name to a known one, from which on it is suggested
HOW = "a quantizer is a name, or {name: …, option: value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Holds a registered name: the class of its settings, the options that the name fixes, and a
    line that describes it. ``options``: those that may be set beside it, with pydantic's fields."""

    name: str
    settings: type[Settings]
    fixed: dict[str, Any]
    description: str
    options: dict[str, Any]


METHODS: Registry[Method] = Registry("quantizer")
# Names of several parts, in the same grammar: {name: (parts, description)}.
COMBINATIONS: dict[str, tuple[str, str]] = {
    "w8a8-int8": ("int8-row+int8-token", "int8: weights per row, activations per token"),
    "w8a8-int8-static": ("int8-row+int8-static", "int8: weights per row, activations fixed"),
    "w8a8-fp8": ("fp8-row+fp8-token", "fp8 e4m3: weights per row, activations per token"),
    "w8a8-fp8-tensor": ("fp8-matrix+fp8-tensor", "fp8 e4m3: one scale per matrix and per batch"),
    "w8a8-mxfp8": ("mxfp8+mxfp8-token", "MXFP8: weights and activations in blocks of 32"),
    "w4a4-mxfp4": ("mxfp4+mxfp4-token", "MXFP4: weights and activations in blocks of 32"),
    "w4a4-nvfp4": ("nvfp4+nvfp4-token", "NVFP4: weights and activations in blocks of 16"),
    "noise-floor": (
        "rounding-noise",
        "the unquantized model with rounding noise of its dtype after each layer",
    ),
}
# Other spellings of a part: a pattern of all of it, and its usual spelling.
SPELLINGS = (
    (r"kv([2-8])", r"kv-int\1-token"),
    (r"fp8", "fp8-row"),
    (r"(int\d-\w+)-asymmetric", r"\1:symmetric=false"),
)


def register(template: str, description: str, **choices: Any) -> Callable[[S], S]:
    """Return a decorator that registers a class of settings; a class may have several.

    ``choices`` are options that a name fixes: a value, or a tuple of values. Each combination gets
    a name by ``template``, formatted with it, as does ``description``. Raises TypeError for an
    option that the class does not have, and for an option ``source``::

        @register("hqq-{num_bits}bit", "HQQ, {num_bits} bits", num_bits=(2, 3, 4, 8))
        @settings
        class Hqq(WeightSettings): ..."""
    values = [v if isinstance(v, tuple) else (v,) for v in choices.values()]

    def add(kind: S) -> S:
        if unknown := sorted(choices.keys() - kind.__pydantic_fields__.keys()):
            raise TypeError(f"{kind.__name__} has no option {unknown[0]}, which register() fixes")
        if "source" in kind.__pydantic_fields__:  # in records the digest of a plug-in's file
            raise TypeError(f"{kind.__name__}: an option cannot be called source; rename it")
        fields = {n: f for n, f in kind.__pydantic_fields__.items() if n not in {"name", *choices}}
        for combination in itertools.product(*values):
            fixed = dict(zip(choices, combination, strict=True))
            name = template.format(**fixed)
            METHODS.add(name, Method(name=name, settings=kind, fixed=fixed, options=fields,
                                     description=description.format(**fixed)))  # fmt: skip
        return kind

    return add


@register("fp16", "float16", compute_dtype="float16")
@register("fp32", "float32", compute_dtype="float32")
@register("bf16", "bfloat16", compute_dtype="bfloat16")
@settings
class Unquantized(Settings):
    """Weights in a dtype."""

    kind: ClassVar = "unquantized"
    compute_dtype: Dtype


def methods(kind: str) -> list[Method]:
    """Return the methods of a ``kind``, such as ``weights``, in the order of registration."""
    return [method for method in METHODS.values() if method.settings.kind == kind]


def settings_of(
    name: str, options: Mapping[str, Any] | None = None, *, compute_dtype: str | None = None
) -> Any:
    """Return the settings of a registered ``name`` with ``options``, defaults filled in;
    ``compute_dtype`` is the default of that option. Raises RecipeError, which lists the possible
    ones, for an unknown name or option, a wrong type or an impossible value."""
    if name not in METHODS:
        raise RecipeError(_unknown(name))
    method, options = METHODS[name], dict(options or {})
    for earlier, option in removed.RENAMED_OPTIONS.items():
        if earlier in options and option not in options:
            options[option] = options.pop(earlier)
    for key in (key for key in options if key not in method.options):
        allowed = ", ".join(method.options) or "no options"
        raise RecipeError(f"{name}: unknown option {shown(key)}; it has {allowed}")
    if compute_dtype is not None and "compute_dtype" in method.options:
        options = {"compute_dtype": compute_dtype, **options}
    try:
        return method.settings(name=name, **method.fixed, **options)
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if first["loc"]:  # else it is of several options together
            option, *parts = first["loc"]
            item = "".join(f"[{part}]" for part in parts if isinstance(part, int))
            problem = f"{option}{item} must be {problem}, not {shown(first['input'])}"
        raise RecipeError(f"{name}: {problem}") from None


def config_of(
    entry: str | Mapping[str, Any], *, compute_dtype: str = "bfloat16"
) -> QuantizationConfig:
    """Return the config of a quantizer: a text of this module's grammar, or a recipe's mapping
    without its label. Without weights the model stays unquantized, in ``compute_dtype``. Raises
    RecipeError for an unknown name, part or option, and for parts that do not go together."""
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    for earlier, key in removed.RENAMED_PARTS.items():
        if earlier in options and key not in options:
            options[key] = options.pop(earlier)
    by_name = options.pop("name", None)
    keyed = {kind: value for kind in KINDS if (value := options.pop(kind, None)) is not None}
    parts = [] if by_name is None else _split(by_name)
    if options and len(parts) != 1:
        key = next(iter(options))
        raise RecipeError(
            f"unknown part {shown(key)}; known: {', '.join(KINDS)}, label; an option goes "
            f"beside its part's name, as in NAME:{key}=… or weights: {{name: NAME, {key}: …}}"
        )
    every = [settings_of(name, {**given, **options}, compute_dtype=compute_dtype)
             for name, given in parts]  # fmt: skip
    every += [_keyed(kind, value, compute_dtype) for kind, value in keyed.items()]
    chosen: dict[str, Any] = {}
    for part in every:
        kind = "weights" if part.kind == "unquantized" else part.kind
        if kind in chosen:
            raise RecipeError(f"{by_name}: two parts quantize {kind}; leave one out")
        chosen[kind] = part
    if not chosen:
        raise RecipeError(HOW)
    weights = chosen.get("weights")
    if weights and weights.kind == "unquantized":
        compute_dtype = chosen.pop("weights").compute_dtype
    config = QuantizationConfig(**chosen, dtype=compute_dtype)
    weights, beside, transform = config.weights, config.beside_weights, config.transform
    if weights and weights.prequantized and beside:
        raise RecipeError(f"{weights.name}: such a copy is scored as it is; leave "
                          f"{next(iter(beside))} out")  # fmt: skip
    if weights and weights.precision.activations and config.activations:
        raise RecipeError(
            f"weights: {weights.name} quantizes activations itself; leave activations out"
        )
    if transform and not config.precision.quantized:
        raise RecipeError(
            f"transform: {transform.name} alone quantizes nothing; add weights, activations or "
            "kv_cache"
        )
    return config


def _keyed(kind: str, value: Any, compute_dtype: str) -> Settings:
    """Return the settings for a recipe's key ``kind`` (weights, …) with this ``value``."""
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = options.pop("name", None)
    try:
        if not isinstance(name, str):
            raise RecipeError(f"a name, or {{name: …, option: value}}, not {shown(value)}")
        name, colon, rest = name.partition(":")
        name = removed.RENAMED_METHODS.get((kind, name), name)
        if kind == "kv_cache" and f"kv-{name}" in METHODS:
            name = f"kv-{name}"
        (name, given), *more = _split(name + colon + rest)
        part = settings_of(name, {**given, **options}, compute_dtype=compute_dtype)
        if more or part.kind not in (kind, "unquantized" if kind == "weights" else kind):
            names = ", ".join(method.name for method in methods(kind))
            raise RecipeError(f"{shown(value)} is no method for {kind}; known: {names}")
    except RecipeError as error:
        raise RecipeError(f"{kind}: {error}") from None
    return part


def config_of_record(quantizer: Mapping[str, Any]) -> QuantizationConfig:
    """Return the config from its ``to_dict``, as a record's key has it; options that are gone are
    left out. Raises RecipeError for a method that is gone."""
    parts = {kind: quantizer[kind] for kind in KINDS if kind in quantizer}
    parts = parts or {"weights": quantizer}
    return config_of({kind: _entry_of(part) for kind, part in parts.items()})


def _entry_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's mapping for settings from their ``to_dict``; for a mix of each layer."""
    name = part["name"]
    options = METHODS[name].options if name in METHODS else ()
    set_options = {option: part[option] for option in options if part.get(option) is not None}
    entry = {"name": name, **set_options}
    if name == "mixed":
        entry["layers"] = {names: _entry_of(chosen) for names, chosen in part["layers"].items()}
    return entry


def unquantized_dtype(entries: Sequence[Any]) -> str:
    """Return the dtype of the only unquantized entry of a recipe's list; bfloat16 if there is none,
    or more than one. Quantized cells take it too, so that only quantization does damage."""
    named = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    dtypes = [dtype for dtype, name in UNQUANTIZED.items() if name in named]
    return dtypes[0] if len(dtypes) == 1 else "bfloat16"


def split_commas(text: str) -> list[str]:
    """Return the parts of ``text`` between commas outside brackets; ``option=value`` stays with the
    name before it: "a:x=1,y=2,b" gives ["a:x=1,y=2", "b"]."""
    items: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])*", text):
        if items and re.match(r"\s*\w+=", item):
            items[-1] += "," + item.strip()
        elif item:
            items.append(item.strip())
    return items


def _split(text: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, options) of each part of ``text``, in today's spelling."""
    if not isinstance(text, str):
        raise RecipeError(HOW)
    parts: list[tuple[str, dict[str, Any]]] = []
    for part in text.split("+"):
        for spelling, standing in SPELLINGS:
            part = re.sub(f"^{spelling}(?=:|$)", standing, part)
        name, _, rest = part.partition(":")
        if name in COMBINATIONS:
            if rest:
                raise RecipeError(f"{part}: {name} is {COMBINATIONS[name][0]}; "
                                  "write its parts to give them options")  # fmt: skip
            parts += _split(COMBINATIONS[name][0])
            continue
        options: dict[str, Any] = {}
        for item in re.split(r"[:,](?![^\[]*\])", rest) if rest else []:
            option, equals, value = item.partition("=")
            if not equals:
                raise RecipeError(f"{part}: write {name}:option=value, not {shown(item)}")
            options[option.strip()] = _value(value.strip())
        parts.append((name, options))
    return parts


def _value(text: str) -> Any:
    """Return the value of an option: a list in brackets, true or false, a number, or text."""
    if text.startswith("[") and text.endswith("]"):
        return [_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _unknown(name: str) -> str:
    """Return the message for an unknown quantizer: widths that its method has, or similar names."""
    if attempt := re.fullmatch(r"([a-z]+)-(\w+)bit", name):
        method, bits = attempt.groups()
        alike = [name for name in METHODS if name.startswith(f"{method}-")]
        if widths := [name.split("-")[1].removesuffix("bit") for name in alike]:
            return f"{method} has no {bits}-bit; it has {', '.join(widths)}"
    names = [*METHODS, *COMBINATIONS]
    close = [each for each in names if each.startswith(f"{name}-")]  # awq: awq-4bit
    close = (close or difflib.get_close_matches(name, names, n=3, cutoff=CLOSEST))[:4]
    near = f"did you mean {' or '.join(close)}? " if close else ""
    return f"unknown quantizer {shown(name)}; {near}`qbench list quantizers` lists all"
