"""Describe a cell's precision: a :class:`QuantizationConfig`, frozen data. Imports no torch.

A config has one field per kind of method: weights, transform, activations, kv_cache. Each holds the
settings of one method, or None. Settings say what a plan, a key and the audit must know. The type
of the settings chooses the functions that do the work: those of the module that its ``backend``
names, or of the module that it is defined in. ``qbench.quantizers.quantize`` calls them:

    weights      quantize(name, layer, settings) → tensors by name, for one ``nn.Linear``; or, for a
                 method that needs the whole model, quantize_model(model, settings by layer's name,
                 calibration, progress) → (tensors by layer's name, a note)
                 dequantize(module, settings) → the weight [out, in] of a ``DequantizedLinear``,
                 whose attributes are the tensors. Or instead, for a layer of another class:
                 from_packed(layer, tensors, settings) → the module that runs in the layer's place,
                 on the device of ``tensors``; of ``layer`` only shape and dtype may be left;
                 unpack(module, settings) → PackedWeight, or None for a module of another kind; not
                 needed if from_packed is a subclass of ``DequantizedLinear``
    activations  install(model, settings, tensors);
                 evidence(model, settings) → ActivationEvidence by module's name
    kv_cache     install(model, settings, tensors);
                 evidence(model, settings) → the cache, by attention's name
    transform    transform(model, settings, tensors): in place

All but weights may have calibrate(model, settings, calibration, progress) → ``tensors``. It sees
the model before its weights are quantized, and must not change it."""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import to_jsonable_python

from qbench.errors import QuantizationError
from qbench.plugins import source_digest
from qbench.quantizers.formats import QuantFormat, Scale
from qbench.records import Part, Precision

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["weights", "transform", "activations", "kv_cache", "unquantized"]
KINDS = ("weights", "transform", "activations", "kv_cache")
Shapes = Mapping[str, tuple[int, int]]  # [out, in] of linear layers by name
SETTINGS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
settings = pydantic_dataclass(frozen=True, kw_only=True, config=SETTINGS)  # decorates a class
Dtype = Literal["bfloat16", "float16", "float32"]
Runtime = Literal["transformers", "llama.cpp", "lm-eval"]  # what runs a cell's model
UNQUANTIZED: dict[str, str] = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
ROUNDING_BOUND = {2: 1.0, 3: 0.7, 4: 0.4, 8: 0.05}


def pattern(text: str) -> str:
    """Return ``text``. Raises ValueError unless it is a pattern of ``ignore``: a part of names, or
    a shell pattern over full names."""
    if not re.fullmatch(r"[\w.*?\[\]!-]+", text):
        raise ValueError("a part of names, such as experts, or a pattern, such as '*.o_proj'")
    return text


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Return the ``names`` that a pattern matches: a full name, consecutive parts of it between
    dots (``experts``, ``mlp.gate``), or a shell pattern over all of it (``*.o_proj``)."""
    return {
        name
        for name in names
        if any(f".{p}." in f".{name}." or fnmatch.fnmatchcase(name, p) for p in patterns)
    }


def require_matches(names: Iterable[str], patterns: tuple[str, ...], what: str) -> None:
    """Raise QuantizationError, beginning with ``what``, for a pattern that matches no name."""
    names = list(names)
    for pattern in patterns:
        if not matching(names, (pattern,)):
            raise QuantizationError(
                f"{what}: ignore: {pattern!r} matches no weight matrix; {name_parts(names)}"
            )


def name_parts(names: Iterable[str]) -> str:
    """Return a message's end that lists the parts of ``names``, which patterns can name."""
    parts = dict.fromkeys(p for name in names for p in name.split(".") if not p.isdigit())
    return f"possible parts of names: {', '.join(parts)}"


def alike(names: Iterable[str]) -> dict[str, list[str]]:
    """Return pattern → names, the pattern being the name with numbers replaced by ``*``:
    ``model.layers.*.mlp.down_proj``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        shared = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(shared, []).append(name)
    return groups


def ignore_advice(names: Iterable[str], every: Iterable[str]) -> str:
    """Return the ``ignore`` setting that leaves out ``names`` and no other layer of ``every``: a
    pattern for layers that only differ in numbers if all are in ``names``, else names."""
    all_alike = alike(every)
    patterns = [
        pattern
        for shared, members in alike(names).items()
        for pattern in ([shared] if len(members) == len(all_alike.get(shared, ())) else members)
    ]
    return "ignore: [" + ", ".join(f"'{pattern}'" for pattern in patterns) + "]"


Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(pattern)], ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(strict=False),  # a recipe has a list
]
GroupSize = Annotated[int, Field(ge=8, le=65536)] | Literal[-1]


@settings
class Settings:
    """Holds the settings of a method: the fields that its name does not fix are a recipe's options.
    ``name``: as registered. ``method``: what tables group cells by; ``title``: what they call it.
    ``needs_calibration``: calibration text is read. ``batch_invariant``: no score depends on
    batch-mates, and no token's logits on later tokens; the audit fails a method that says so
    wrongly. ``requirements``: distributions beside torch and transformers whose versions can change
    the result. ``blocks``: outputs and inputs of each quantized layer must be multiples of these;
    ``misfit`` says what to do otherwise."""

    kind: ClassVar[Kind]
    method: ClassVar[str] = ""
    title: ClassVar[str] = ""
    backend: ClassVar[str] = ""  # module of qbench.quantizers with the functions; "": its own
    needs_calibration: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = True
    requirements: ClassVar[tuple[str, ...]] = ()
    ignore: ClassVar[tuple[str, ...]] = ()  # layers to leave unquantized
    blocks: ClassVar[tuple[int, int]] = (1, 1)
    misfit: ClassVar[str] = "leave them out: {ignore}"
    precision: ClassVar[Precision] = Precision()  # of what it quantizes

    name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain JSON, for keys and records. A plug-in's include a digest of
        its file; the package's own files are part of every key."""
        plain = {"method": self.method, **to_jsonable_python(self)}
        if not type(self).__module__.startswith("qbench."):
            plain["source"] = source_digest(type(self))
        return plain

    def fitted(self, shapes: Shapes) -> Self:
        """Return the settings with all choices made that depend on the ``shapes`` of a model's
        linear layers, such as a group size; by default these settings."""
        return self

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if a model with this ``config.json``, or ``device`` ("cpu" or "cuda"),
        cannot run the method; called when a run is planned. By default nothing is checked."""

    def check_layers(self, shapes: Shapes) -> None:
        """Raise QuantizationError for linear layers that are no whole ``blocks``."""
        layers = self.quantized(shapes)
        for axis, (noun, size) in enumerate(zip(("outputs", "inputs"), self.blocks, strict=True)):
            misfits = {name: shape[axis] for name, shape in layers.items() if shape[axis] % size}
            if misfits:
                named = [f"{like} ({misfits[each[0]]:,})" for like, each in alike(misfits).items()]
                remedy = self.misfit.format(ignore=ignore_advice(misfits, layers))
                raise QuantizationError(
                    f"{self.name}: groups of {size} do not divide the {noun} of "
                    f"{', '.join(named)}; {remedy}"
                )

    def quantized(self, shapes: Shapes) -> Shapes:
        """Return the ``shapes`` of the layers to quantize: those that ``ignore`` does not match."""
        ignored = matching(shapes, self.ignore)
        return {name: shape for name, shape in shapes.items() if name not in ignored}


def backend(settings: Settings) -> Any:
    """Return the module with the functions of a method: the one that the settings' ``backend``
    names; without a ``backend``, and always for a plug-in, the one that defines the settings."""
    module = type(settings).__module__
    if settings.backend and module.startswith("qbench."):
        module = f"qbench.quantizers.{settings.backend}"
    return importlib.import_module(module)


@settings
class WeightSettings(Settings):
    """Settings of a method that replaces every linear layer but the LM head by one of fewer bits.
    Embeddings and the LM head stay unquantized, as is usual in the field, unless a mix names them
    (``of_ends``: the method can quantize them). A subclass gives ``method``, ``title``,
    ``num_bits``, the ``scheme`` of a stored weight in the field's words (``int4 in groups of
    128``), and ``shared_bits``."""

    kind: ClassVar[Kind] = "weights"
    prequantized: ClassVar[bool] = False  # the model is loaded quantized, not quantized here
    runtime: ClassVar[Runtime] = "transformers"
    end_names: ClassVar[tuple[str, ...]] = ()  # of LM head and embeddings that are quantized too
    ends_quantized: ClassVar[bool] = False  # embeddings and LM head too, by files
    of_ends: ClassVar[bool] = False
    unrounded: ClassVar[bool] = False  # its weights may equal the original's: another runtime's
    note: ClassVar[str] = ""  # what did it, in a few words
    # How far, relative, a forward in a dtype may lie from the product with the stored weights: on
    # rows of the identity, and on random inputs.
    agreement: ClassVar[Mapping[str, tuple[float, float]]] = {
        "bfloat16": (5e-3, 1e-2), "float16": (1e-3, 2e-3), "float32": (1e-5, 1e-4),
    }  # fmt: skip

    compute_dtype: Dtype = Field(
        "bfloat16", description="dtype of the unquantized weights, activations and matrix products"
    )
    ignore: Patterns = Field(
        (), description="weight matrices to leave unquantized: parts of their names, such as "
        "experts, or patterns over full names, such as '*.o_proj'",
    )  # fmt: skip

    @property
    def precision(self) -> Precision:
        """Return bits and scheme of the weights, for records; no other part is quantized."""
        return Precision(weights=Part(bits=self.num_bits, scheme=self.scheme))

    def for_layer(self, name: str) -> WeightSettings | None:
        """Return the settings for the linear layer ``name``; None if a mix has none for it."""
        return self

    def group_length(self, columns: int) -> int:
        """Return how many weights of a row of ``columns`` share their levels: by default all."""
        return columns

    # What the audit may expect

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight of a matrix [rows, columns] for scales, zeros and indices."""
        raise NotImplementedError

    @property
    def error_bound(self) -> float:
        """Return the largest relative error ‖W' − W‖ / ‖W‖ that one matrix can have.

        Rounding to evenly spaced levels gives √(step² / 12) (Bennett 1948). Take Gaussian weights
        in groups of 128, whose largest is about 2.7 standard deviations: the error is 0.52, 0.22,
        0.10 and 0.006 of the weights at 2, 3, 4 and 8 bits. The bounds are at least twice that, for
        heavy tails and long groups; 1 is as bad as a matrix of zeros."""
        return ROUNDING_BOUND[self.num_bits]


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Holds the precision of a cell, and what follows from it. ``weights`` None: unquantized, in
    ``dtype``. A transform comes first. Then activations and KV cache are calibrated on the
    transformed model with unquantized weights. The weights are quantized last."""

    weights: WeightSettings | None = None
    activations: Settings | None = None
    kv_cache: Settings | None = None
    transform: Settings | None = None
    dtype: Dtype = "bfloat16"

    # Computed from the settings
    parts: dict[str, Settings] = field(init=False, compare=False, repr=False)  # by kind, no None
    beside_weights: dict[str, Settings] = field(init=False, compare=False, repr=False)
    name: str = field(init=False, compare=False)  # of the parts: gptq-4bit+int8-token; else bf16
    method: str = field(init=False, compare=False)  # what tables group by: gptq+kv; none
    title: str = field(init=False, compare=False)  # what tables write: GPTQ + KV cache
    precision: Precision = field(init=False, compare=False, repr=False)
    compute_dtype: Dtype = field(init=False, compare=False)
    runtime: Runtime = field(init=False, compare=False)
    ignore: tuple[str, ...] = field(init=False, compare=False)  # of the weights
    needs_calibration: bool = field(init=False, compare=False)
    batch_invariant: bool = field(init=False, compare=False)
    requirements: tuple[str, ...] = field(init=False, compare=False)
    # Whether values are rounded in coarse steps while the model runs. Then two correct computations
    # that round differently may differ by as much as quantization costs: a value near the border of
    # two codes moves by a whole step.
    amplifies_rounding: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        weights = self.weights
        every = {kind: part for kind in KINDS if (part := getattr(self, kind)) is not None}
        parts = every.values()
        title = " + ".join(part.title for part in parts if part.title) or "unquantized"
        formats = {key: each for part in parts for key, each in part.precision if each}
        vars(self).update(
            parts=every,
            beside_weights={kind: part for kind, part in every.items() if kind != "weights"},
            name="+".join(part.name for part in parts) or UNQUANTIZED[self.dtype],
            method="+".join(part.method for part in parts if part.method) or "none",
            title=title[0].upper() + title[1:],
            precision=Precision(**formats),
            compute_dtype=weights.compute_dtype if weights else self.dtype,
            runtime=weights.runtime if weights else "transformers",
            ignore=weights.ignore if weights else (),
            needs_calibration=any(part.needs_calibration for part in parts),
            batch_invariant=all(part.batch_invariant for part in parts),
            requirements=tuple(dict.fromkeys(each for part in parts for each in part.requirements)),
            amplifies_rounding=bool({"activations", "kv_cache"} & formats.keys()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain JSON, for keys and records: those of the weights alone if
        nothing else is quantized, else name, method, ``weights`` and a part per other kind."""
        none = {"name": UNQUANTIZED[self.dtype], "method": "none", "dtype": self.dtype}
        weights = self.weights.to_dict() if self.weights else none
        parts = {kind: part.to_dict() for kind, part in self.beside_weights.items()}
        if not parts:
            return weights
        return {"name": self.name, "method": self.method, "weights": weights, **parts}

    def fitted(self, shapes: Shapes) -> QuantizationConfig:
        """Return the config with all choices made that depend on the ``shapes`` of a model's linear
        layers, such as a group size that divides them all; none if ``shapes`` are empty."""
        return replace(self, **{k: p.fitted(shapes) for k, p in self.parts.items() if shapes})


# What backends show the audit


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """Holds one weight matrix as it is stored. ``tensors``: all that is stored for it, by name;
    biases and constant tables left out. ``dequantize`` returns the matrix [out, in] that they
    encode; None if only the module's forward shows it. ``groups`` rearranges a matrix [out, in]
    into [groups, weights per group]; weights of a group share their levels."""

    tensors: Mapping[str, Tensor]
    dequantize: Callable[[], Tensor] | None
    groups: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ActivationEvidence:
    """Says how a module's input is quantized. ``fixed``: its scale, if ``format`` is static."""

    format: QuantFormat
    fixed: Scale | None = None
