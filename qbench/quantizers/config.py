"""Describe a cell's precision: a :class:`QuantizationConfig`, frozen data. Imports no torch.

A config has one field per kind of method: weights, transform, activations, kv_cache. Each holds the
settings of one method, or None. Settings say what a plan, a key and the audit must know. The type
of the settings chooses the functions that do the work: those of the module that its ``backend``
names, or of the module that it is defined in. ``qbench.quantizers.quantize`` calls them:

    weights      quantize(name, layer, settings) → tensors by name, for one ``nn.Linear``; or, for a
                 method that needs the whole model, quantize_model(model, settings by layer's name,
                 calibration, progress) → (tensors by layer's name, a note)
                 from_packed(layer, tensors, settings) → the module that runs in the layer's place,
                 on the device of ``tensors``; of ``layer`` only shape and dtype may be left
                 unpack(module, settings) → PackedWeight, or None for a module of another kind
    activations  install(model, settings, tensors);
                 evidence(model, settings) → ActivationEvidence by module's name
    kv_cache     install(model, settings, tensors);
                 evidence(model, settings) → the cache, by attention's name
    transform    transform(model, settings, tensors): in place

All but weights may have calibrate(model, settings, calibration, progress) → ``tensors``. It sees
the model before its weights are quantized, and must not change it.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import to_jsonable_python

from qbench.errors import QuantizationError
from qbench.plugins import source_digest
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat, Scale
from qbench.records import Part, Precision

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["weights", "transform", "activations", "kv_cache"]
KINDS: tuple[Kind, ...] = ("weights", "transform", "activations", "kv_cache")
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
    """Raise QuantizationError, whose message begins with ``what``, for a pattern that matches no
    name."""
    names = list(names)
    for pattern in patterns:
        if not matching(names, (pattern,)):
            parts = dict.fromkeys(p for name in names for p in name.split(".") if not p.isdigit())
            raise QuantizationError(
                f"{what}: ignore: {pattern!r} matches no weight matrix; parts of their names are "
                f"{', '.join(parts)}"
            )


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
    pattern for layers that only differ in numbers if all of these are in ``names``, else full
    names."""
    all_alike = alike(every)
    patterns = [
        pattern
        for shared, members in alike(names).items()
        for pattern in ([shared] if len(members) == len(all_alike.get(shared, ())) else members)
    ]
    return "ignore: [" + ", ".join(f"'{pattern}'" for pattern in patterns) + "]"


def require_groups(what: str, features: Mapping[str, int], size: int, noun: str) -> None:
    """Raise QuantizationError, whose message begins with ``what``, if groups of ``size`` do not
    divide the ``features`` (inputs or outputs, ``noun``) of every layer."""
    misfits = {name: count for name, count in features.items() if count % size}
    if misfits:
        named = [f"{like} ({misfits[names[0]]:,})" for like, names in alike(misfits).items()]
        raise QuantizationError(
            f"{what}: group_size {size} does not divide the {noun} of {', '.join(named)}; without "
            "group_size one is taken that fits every layer, or set "
            f"{ignore_advice(misfits, features)}"
        )


def _as_tuple(value: Any) -> Any:
    """Return a text or list of texts as a tuple; other values as they are."""
    return (value,) if isinstance(value, str) else tuple(value) if type(value) is list else value


Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(pattern)], ...], BeforeValidator(_as_tuple)
]
GroupSize = Annotated[int, Field(ge=8, le=65536)] | Literal[-1]


class Settings(ABC):
    """Base of a method's settings: a frozen pydantic dataclass; fields are a recipe's options.

    ``batch_invariant``: no score depends on batch-mates, and no token's logits on later tokens.
    The audit fails a method that says so wrongly. ``requirements``: distributions whose versions
    can change the result, torch and transformers left out (they are part of every cell).
    ``method``: what tables group cells by; ``title``: what they call it.
    """

    kind: ClassVar[Kind]
    names: ClassVar[dict[str, dict[str, Any]]] = {}  # with the options that each fixes
    method: ClassVar[str] = ""
    title: ClassVar[str] = ""
    backend: ClassVar[str] = ""  # module of qbench.quantizers with the functions; "": its own
    needs_calibration: bool = False
    batch_invariant: bool = True
    requirements: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()  # layers to leave unquantized

    @property
    def name(self) -> str:
        """Return the name under which the settings are registered."""
        return next(
            name
            for name, fixed in self.names.items()
            if all(getattr(self, option) == value for option, value in fixed.items())
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain JSON, for keys and records. A plug-in's include a digest of
        its file; the package's own files are part of every key."""
        plain = to_jsonable_python(self)
        if not type(self).__module__.startswith("qbench."):
            plain["source"] = source_digest(type(self))
        return {"name": self.name, **plain}

    def fitted(self, shapes: Shapes) -> Self:
        """Return the settings with all choices made that depend on the ``shapes`` of a model's
        linear layers, such as a group size."""
        return self

    def check(self, config: Mapping[str, Any], device: str) -> None:  # noqa: B027
        """Raise RecipeError if a model with this ``config.json``, or ``device`` ("cpu" or "cuda"),
        cannot run the method; called when a run is planned."""

    def check_layer(self, name: str, rows: int, columns: int) -> None:  # noqa: B027
        """Raise QuantizationError, naming the layer, if the method cannot quantize a weight [rows,
        columns] = [out, in]."""

    def check_layers(self, shapes: Shapes) -> None:
        """Raise QuantizationError if a linear layer to quantize does not suit, by default by
        ``check_layer``."""
        for name, (rows, columns) in self.quantized(shapes).items():
            self.check_layer(name, rows, columns)

    def quantized(self, shapes: Shapes) -> Shapes:
        """Return the ``shapes`` of the layers to quantize: those that ``ignore`` does not match."""
        ignored = matching(shapes, self.ignore)
        return {name: shape for name, shape in shapes.items() if name not in ignored}


@settings
class WeightSettings(Settings):
    """Settings of a method that replaces every linear layer but the LM head by one of fewer bits.

    Embeddings and the LM head stay unquantized, as is usual in the field, unless a mix names them
    (``of_ends``: the method can quantize them). A subclass gives ``method``, ``title``,
    ``num_bits``, ``scheme`` and ``shared_bits``.
    """

    kind: ClassVar[Kind] = "weights"
    prequantized: ClassVar[bool] = False  # the model is loaded quantized, not quantized here
    runtime: ClassVar[Runtime] = "transformers"
    ends_quantized: ClassVar[bool] = False  # embeddings and LM head too
    of_ends: ClassVar[bool] = False
    unrounded: ClassVar[bool] = False  # its weights may equal the original's: another runtime's
    note: ClassVar[str] = ""  # what did it, in a few words

    compute_dtype: Annotated[
        Dtype,
        Field(description="dtype of the unquantized weights, activations and matrix products"),
    ] = "bfloat16"
    ignore: Annotated[
        Patterns,
        Field(
            description="weight matrices to leave unquantized: parts of their names, such as "
            "experts, or patterns over full names, such as '*.o_proj'",
        ),
    ] = ()

    @property
    @abstractmethod
    def scheme(self) -> str:
        """Return the format of a stored weight in the field's words: ``int4 in groups of 128``."""

    @property
    def precision(self) -> Precision:
        return Precision(weights=Part(bits=self.num_bits, scheme=self.scheme))

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, **super().to_dict()}

    def for_layer(self, name: str) -> WeightSettings | None:
        """Return the settings for the linear layer ``name``: these, unless settings are mixed; None
        if a mix has none for it."""
        return self

    @property
    def end_names(self) -> tuple[str, ...]:
        """Return which of LM head and embeddings are quantized too, by name."""
        return ()

    def group_length(self, columns: int) -> int:
        """Return how many weights share a scale along a row of ``columns``."""
        size: int = self.group_size
        return columns if size == WHOLE_ROW else size

    # What the audit may expect

    @property
    def levels(self) -> int:
        """Return how many distinct values the weights of a group may have."""
        return int(2**self.num_bits)

    @abstractmethod
    def shared_bits(self, rows: int, columns: int) -> float:
        """Return the bits per weight beside its code: of scales, zeros and indices."""

    def bits_bounds(self, rows: int, columns: int) -> tuple[float, float]:
        """Return the fewest and most bits per weight that a matrix [rows, columns] may store: 0.99
        of the code; 1.01 of the code with its share of scales, zeros and a column index, and
        padding."""
        shared = self.shared_bits(rows, columns) + 32 / rows
        most = 1.01 * (self.num_bits + shared) + 512 / (rows * columns)
        return 0.99 * self.num_bits, most

    def error_bound(self) -> float:
        """Return the largest relative error ‖W' − W‖ / ‖W‖ that one matrix can have.

        Rounding to evenly spaced levels gives √(step² / 12) (Bennett 1948). Take Gaussian weights
        in groups of 128, whose largest is about 2.7 standard deviations: the error is 0.52, 0.22,
        0.10 and 0.006 of the weights at 2, 3, 4 and 8 bits. The bounds are at least twice that, for
        heavy tails and long groups; 1 is as bad as a matrix of zeros."""
        return ROUNDING_BOUND[self.num_bits]

    def agreement(self, dtype: str) -> tuple[float, float]:
        """Return two bounds on how far, relative, a forward in ``dtype`` may differ from the
        product with the stored weights: on rows of the identity, and on random inputs."""
        identity = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
        random = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
        return identity[dtype], random[dtype]


class ActivationSettings(Settings):
    """Settings of a format for the inputs of linear layers, the LM head's left out."""

    kind: ClassVar[Kind] = "activations"
    method: ClassVar[str] = "activations"
    title: ClassVar[str] = "activations"

    @property
    @abstractmethod
    def precision(self) -> Part: ...


class KVCacheSettings(Settings):
    """Settings of a format for the keys and values that attention reads."""

    kind: ClassVar[Kind] = "kv_cache"
    method: ClassVar[str] = "kv"
    title: ClassVar[str] = "KV cache"

    @property
    @abstractmethod
    def precision(self) -> Part: ...


class TransformSettings(Settings):
    """Settings of a change, made first, to an equal model that is easier to quantize."""

    kind: ClassVar[Kind] = "transform"


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Holds the precision of a cell. ``weights`` None: unquantized, in ``dtype``.

    A transform comes first. Then activations and KV cache are calibrated on the transformed model
    with unquantized weights. The weights are quantized last.
    """

    weights: WeightSettings | None = None
    activations: ActivationSettings | None = None
    kv_cache: KVCacheSettings | None = None
    transform: TransformSettings | None = None
    dtype: Dtype = "bfloat16"

    @property
    def compute_dtype(self) -> str:
        return self.weights.compute_dtype if self.weights else self.dtype

    @property
    def runtime(self) -> Runtime:
        return self.weights.runtime if self.weights else "transformers"

    @property
    def ignore(self) -> tuple[str, ...]:
        """Return the patterns of weight matrices that stay unquantized; see
        ``WeightSettings.ignore``."""
        return self.weights.ignore if self.weights else ()

    @property
    def parts(self) -> dict[str, Settings]:
        """Return the settings that are not None, by kind, in the order of names."""
        present = ((kind, getattr(self, kind)) for kind in KINDS)
        return {kind: part for kind, part in present if part is not None}

    @property
    def beside_weights(self) -> dict[str, Settings]:
        return {kind: part for kind, part in self.parts.items() if kind != "weights"}

    @property
    def name(self) -> str:
        """Return the parts' names joined by ``+``, such as ``gptq-4bit+int8-token+kv-int4-token``;
        ``bf16`` without parts."""
        return "+".join(part.name for part in self.parts.values()) or UNQUANTIZED[self.dtype]

    @property
    def method(self) -> str:
        """Return the method in tables: ``gptq``, ``gptq+activations+kv``; ``none``."""
        return "+".join(part.method for part in self.parts.values() if part.method) or "none"

    @property
    def title(self) -> str:
        """Return the method's name in tables: ``GPTQ + KV cache``."""
        titles = [part.title for part in self.parts.values() if part.title]
        title = " + ".join(titles) or "unquantized"
        return title[0].upper() + title[1:]

    @property
    def precision(self) -> Precision:
        """Return the format of weights, activations and KV cache; activations may be part of the
        weights' method."""
        inner = self.weights.precision if self.weights else Precision()
        return Precision(
            weights=inner.weights,
            activations=self.activations.precision if self.activations else inner.activations,
            kv_cache=self.kv_cache.precision if self.kv_cache else inner.kv_cache,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain JSON, for keys and records, by the keys of a recipe."""
        none = {"name": UNQUANTIZED[self.dtype], "method": "none", "dtype": self.dtype}
        weights = self.weights.to_dict() if self.weights else none
        parts = {kind: part.to_dict() for kind, part in self.beside_weights.items()}
        if not parts:
            return weights
        return {"name": self.name, "method": self.method, "weights": weights, **parts}

    @property
    def needs_calibration(self) -> bool:
        return any(part.needs_calibration for part in self.parts.values())

    @property
    def batch_invariant(self) -> bool:
        return all(part.batch_invariant for part in self.parts.values())

    @property
    def requirements(self) -> tuple[str, ...]:
        named = [name for part in self.parts.values() for name in part.requirements]
        return tuple(dict.fromkeys(named))

    @property
    def amplifies_rounding(self) -> bool:
        """Return whether values are rounded in coarse steps while the model runs. Then two correct
        computations that round differently may differ by as much as quantization costs: a value
        near the border of two codes moves by a step."""
        precision = self.precision
        return precision.activations is not None or precision.kv_cache is not None

    @property
    def stages(self) -> tuple[QuantizationConfig, ...]:
        """Return the parts that are computed and stored separately, in order. Cells that share a
        stage compute it once.

        Weights that are not transformed are those of any other cell. What is calibrated beside them
        comes first, since quantizing the weights consumes the model.
        """
        if self.transform or not self.weights:
            return (self,)
        beside = replace(self, weights=None, dtype=self.compute_dtype)
        calibrated = (beside,) if beside.needs_calibration else ()
        return (*calibrated, QuantizationConfig(weights=self.weights))

    def fitted(self, shapes: Shapes) -> QuantizationConfig:
        """Return the config with all choices made that depend on the ``shapes`` of a model's linear
        layers, such as a group size that divides them all. ``shapes`` is empty if unknown."""
        return replace(self, **{k: p.fitted(shapes) for k, p in self.parts.items() if shapes})

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if a model of this ``config.json``, or ``device`` ("cpu" or "cuda"),
        cannot run a part; called when a run is planned."""
        for part in self.parts.values():
            part.check(config, device)


# What backends show the audit


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """Holds one weight matrix as it is stored.

    ``tensors``: all that is stored for it, by name; biases and constant tables left out.
    ``dequantize`` returns the matrix [out, in] that they encode; None if only the module's forward
    shows it. ``groups`` rearranges a matrix [out, in] into [groups, weights per group]; weights of
    a group share their levels.
    """

    tensors: Mapping[str, Tensor]
    dequantize: Callable[[], Tensor] | None
    groups: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ActivationEvidence:
    """Says how a module's input is quantized. ``fixed``: its scale, if ``format`` is static."""

    format: QuantFormat
    fixed: Scale | None = None
