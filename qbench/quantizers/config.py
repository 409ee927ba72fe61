"""What a cell's precision is: one :class:`QuantizationConfig`, plain frozen data. Imports no torch.

A config has four fields (weights, activations, kv_cache, transform), each the settings of
one method or None. Settings say what a plan, a key and the audit must know; the functions that do
the work stand in the method's ``backend``, a module that ``qbench.quantizers.quantize`` imports
when a model is there; of settings that are none of qbench's own, the module that they are in:

    weights      quantize(name, layer, settings) → tensors by name, for one ``nn.Linear``; or, for a
                 method that goes through a whole model, quantize_model(model, settings,
                 calibration, progress) → (tensors by layer's name, a note)
                 from_packed(layer, tensors, settings) → the module that runs in its place, where
                 the ``tensors`` lie; the layer's own weight may be gone, but for shape and dtype
                 unpack(module, settings) → PackedWeight, or None for a module of another kind
    activations  install(model, settings, tensors);
                 evidence(model, settings) → ActivationEvidence by module's name
    kv_cache     install(model, settings, tensors);
                 evidence(model, settings) → the cache that it carries, by attention's name
    transform    transform(model, settings, tensors): in place

All but weights may have calibrate(model, settings, calibration, progress) → what ``tensors`` are:
it sees the model before its weights are quantized, and leaves it as it was.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import to_jsonable_python

from qbench.errors import QuantizationError
from qbench.plugins import source_digest
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat, Scale
from qbench.records import Part, Precision

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Dtype = Literal["bfloat16", "float16", "float32"]
Runtime = Literal["transformers", "llama.cpp", "lm-eval"]  # what runs a cell's model
UNQUANTIZED: dict[str, str] = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}

WIDEST = 65536  # group; a longer row is one group as WHOLE_ROW
GroupSize = Annotated[
    Annotated[int, Field(ge=8, le=WIDEST)] | Literal[-1],
    Field(description="weights that share a scale, along a row; -1 is the whole row"),
]
ROUNDING_BOUND = {2: 1.0, 3: 0.7, 4: 0.4, 8: 0.05}


def pattern(text: str) -> str:
    """A part of names or a shell pattern over whole ones, as ``ignore`` takes it."""
    if not re.fullmatch(r"[\w.*?\[\]!-]+", text):
        raise ValueError("a part of names, such as experts, or a pattern, such as '*.o_proj'")
    return text


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> set[str]:
    """Those of ``names`` that ``patterns`` say: a name, consecutive parts of one between dots
    (``experts``, ``mlp.gate``), or a shell pattern of all of one (``*.o_proj``)."""
    return {
        name
        for name in names
        if any(f".{p}." in f".{name}." or fnmatch.fnmatchcase(name, p) for p in patterns)
    }


def require_matches(names: Iterable[str], patterns: tuple[str, ...], what: str) -> None:
    """Raise QuantizationError, in the name of ``what``, for a pattern that none of ``names`` is."""
    names = list(names)
    for pattern in patterns:
        if not matching(names, (pattern,)):
            parts = dict.fromkeys(p for name in names for p in name.split(".") if not p.isdigit())
            raise QuantizationError(
                f"{what}: ignore: {pattern!r} matches no weight matrix; parts of their names are "
                f"{', '.join(parts)}"
            )


Patterns = tuple[Annotated[str, AfterValidator(pattern)], ...]


def strategy(group_size: int) -> str:
    """What shares a scale, in the words of a scheme."""
    return "per row" if group_size == WHOLE_ROW else f"in groups of {group_size}"


class Settings(ABC):
    """Settings of one method: a frozen pydantic dataclass, whose fields are a recipe's options.

    ``batch_invariant``: a score does not depend on what it is batched with, nor a token's logits on
    later tokens; what sees the one sees the other. What is not declared here fails the audit.
    ``requirements``: distributions whose versions can change what it gives, torch and transformers
    left out (they are part of every cell). ``method``: what tables group cells by, and ``title``
    what they write of it.
    """

    method: ClassVar[str] = ""
    title: ClassVar[str] = ""
    backend: ClassVar[str] = ""  # of qbench.quantizers: where its functions are
    needs_calibration: bool = False
    batch_invariant: bool = True
    requirements: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()  # layers that it leaves as they are

    @property
    @abstractmethod
    def name(self) -> str:
        """As its registry has it."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON, for keys and records; with a digest of the file that it is
        written in, where that is none of qbench's own, whose digest every key holds."""
        plain = to_jsonable_python(self)
        if not type(self).__module__.startswith("qbench."):
            plain["source"] = source_digest(type(self))
        return {"name": self.name, **plain}

    def check(self, config: Mapping[str, Any], device: str) -> None:  # noqa: B027
        """Raise RecipeError for what a model of this ``config.json``, or this ``device`` ("cpu" or
        "cuda"), cannot do; asked before any work starts."""

    def check_layer(self, name: str, rows: int, columns: int) -> None:  # noqa: B027
        """Raise QuantizationError, naming the layer, for a shape [out, in] of its weight that the
        method does not take."""

    def check_layers(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """``check_layer`` of all linear layers, by name, that ``ignore`` does not name."""
        ignored = matching(shapes, self.ignore)
        for name, (rows, columns) in shapes.items():
            if name not in ignored:
                self.check_layer(name, rows, columns)


@pydantic_dataclass(frozen=True, kw_only=True, config=SETTINGS)
class WeightSettings(Settings):
    """Every linear layer but the LM head, each replaced by a module that holds fewer bits.

    Embeddings and the LM head stay as they are, as is usual in the field. A subclass gives
    ``method``, ``title``, ``num_bits``, ``scheme`` and ``shared_bits``.
    """

    prequantized: ClassVar[bool] = False  # the model is loaded as it is, and not quantized here
    runtime: ClassVar[Runtime] = "transformers"
    ends_quantized: ClassVar[bool] = False  # embeddings and LM head too
    whole: ClassVar[bool] = False  # its weights may be the original's: another runtime's column

    compute_dtype: Annotated[
        Dtype,
        Field(description="dtype of the unquantized weights, activations and matrix products"),
    ] = "bfloat16"
    ignore: Annotated[
        Patterns,
        Field(
            strict=False,
            description="weight matrices to leave unquantized: parts of their names, such as "
            "experts, or patterns over whole names, such as '*.o_proj'",
        ),
    ] = ()

    @property
    def name(self) -> str:
        return f"{self.method}-{self.num_bits}bit"

    @property
    @abstractmethod
    def scheme(self) -> str:
        """The format of a stored weight in the field's words: ``int4 in groups of 128``."""

    @property
    def precision(self) -> Precision:
        return Precision(weights=Part(bits=self.num_bits, scheme=self.scheme))

    note: ClassVar[str] = ""  # what did it, in a few words

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, **super().to_dict()}

    def group_length(self, columns: int) -> int:
        """Weights in a group along a row of ``columns``."""
        size: int = self.group_size
        return columns if size == WHOLE_ROW else size

    # What it takes, and what the audit may expect

    @property
    def levels(self) -> int:
        """The most distinct values of the weights in a group."""
        return int(2**self.num_bits)

    def require_whole_groups(self, layer: str, features: int, what: str, size: int) -> None:
        """Raise QuantizationError where ``features`` are no whole number of groups of ``size``."""
        if features % size:
            raise QuantizationError(
                f"{self.name}: {layer} has {features} {what}, which group_size {size} does not "
                "divide; choose one that does, or leave it out: "
                f"ignore: [{layer.rpartition('.')[2]}]"
            )

    @abstractmethod
    def shared_bits(self, rows: int, columns: int) -> float:
        """Bits that a weight takes beside its code: its share of scales, zeros and indices."""

    def bits_bounds(self, rows: int, columns: int) -> tuple[float, float]:
        """Fewest and most bits that a weight of a matrix [rows, columns] may take: the code; its
        share of scales, zeros and an index of the columns; one in a hundred, and padding that
        small layers feel."""
        shared = self.shared_bits(rows, columns) + 32 / rows
        most = 1.01 * (self.num_bits + shared) + 512 / (rows * columns)
        return 0.99 * self.num_bits, most

    def error_bound(self) -> float:
        """The largest relative error ‖W' − W‖ / ‖W‖ of one matrix that can be right.

        Rounding to evenly spaced levels gives √(step² / 12) (Bennett 1948). Take Gaussian weights
        in groups of 128, whose largest is about 2.7 standard deviations: the error is 0.52, 0.22,
        0.10 and 0.006 of the weights at 2, 3, 4 and 8 bits. The bounds are at least twice that, for
        heavy tails and long groups; 1 is as bad as a matrix of zeros."""
        return ROUNDING_BOUND[self.num_bits]

    def agreement(self, dtype: str) -> tuple[float, float]:
        """How far, relative, a forward in ``dtype`` may lie from the product with the stored
        weights: on rows of the identity, and on random inputs."""
        identity = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
        random = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
        return identity[dtype], random[dtype]


class ActivationSettings(Settings):
    """What products with weight matrices take in, the LM head's left out."""

    method: ClassVar[str] = "activations"
    title: ClassVar[str] = "activations"

    @property
    @abstractmethod
    def precision(self) -> Part: ...


class KVCacheSettings(Settings):
    """Keys and values that attention reads."""

    method: ClassVar[str] = "kv"
    title: ClassVar[str] = "KV cache"
    two_sources: bool = False

    @property
    @abstractmethod
    def precision(self) -> Part: ...


class TransformSettings(Settings):
    """A model is changed to an equal one that is easier to quantize, before all else."""

    def require_fit(self, kv_cache: KVCacheSettings | None) -> None:
        """Raise RecipeError where it cannot stand beside ``kv_cache``."""


# Field of a config → key of a recipe and of a record, in the order in which names have them.
RECIPE_KEYS = {
    "weights": "weights",
    "transform": "outliers",
    "activations": "activations",
    "kv_cache": "kv",
}


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """The precision of a cell. ``weights`` None: unquantized, in ``dtype``.

    A transform comes first. Then activations and KV cache are calibrated on the transformed
    model with unquantized weights. The weights are quantized last.
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
        """Weight matrices that stay unquantized, as ``WeightSettings.ignore`` names them."""
        return self.weights.ignore if self.weights else ()

    @property
    def parts(self) -> dict[str, Settings]:
        """Settings by field, of those that there are, in the order of names."""
        found = ((kind, getattr(self, kind)) for kind in RECIPE_KEYS)
        return {kind: settings for kind, settings in found if settings is not None}

    @property
    def beside_weights(self) -> dict[str, Settings]:
        return {kind: settings for kind, settings in self.parts.items() if kind != "weights"}

    @property
    def name(self) -> str:
        """``gptq-4bit+int8-token+kv-int4-token``: weights that are not quantized have no place."""
        named = [
            f"{'kv-' if kind == 'kv_cache' else ''}{part.name}" for kind, part in self.parts.items()
        ]
        return "+".join(named) or UNQUANTIZED[self.dtype]

    @property
    def method(self) -> str:
        """What tables group by: ``gptq``, ``gptq+activations+kv``; ``none``."""
        return "+".join(part.method for part in self.parts.values() if part.method) or "none"

    @property
    def title(self) -> str:
        """What tables write: ``GPTQ + KV cache``."""
        titles = [part.title for part in self.parts.values() if part.title]
        title = " + ".join(titles) or "unquantized"
        return title[0].upper() + title[1:]

    @property
    def precision(self) -> Precision:
        inner = self.weights.precision if self.weights else Precision()
        return Precision(
            weights=inner.weights,
            activations=self.activations.precision if self.activations else inner.activations,
            kv_cache=self.kv_cache.precision if self.kv_cache else inner.kv_cache,
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON, for keys and records, by the keys of a recipe."""
        none = {"name": UNQUANTIZED[self.dtype], "method": "none", "dtype": self.dtype}
        weights = self.weights.to_dict() if self.weights else none
        parts = {RECIPE_KEYS[kind]: part.to_dict() for kind, part in self.beside_weights.items()}
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
        """Whether what a model computes is rounded in coarse steps while it runs. Then two correct
        computations that round differently may differ by as much as quantization costs: a value
        near the border of two codes moves by a whole step."""
        precision = self.precision
        return precision.activations is not None or precision.kv_cache is not None

    @property
    def stages(self) -> tuple[QuantizationConfig, ...]:
        """What is made and kept on disk by itself, in order: cells that share a stage make it once.

        Weights that are not transformed are those of any other cell. What is calibrated beside them
        comes first, for quantizing the weights consumes the model."""
        if self.transform or not self.weights:
            return (self,)
        beside = replace(self, weights=None, dtype=self.compute_dtype)
        calibrated = (beside,) if beside.needs_calibration else ()
        return (*calibrated, QuantizationConfig(weights=self.weights))

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError for what a model of this ``config.json``, or ``device`` ("cpu" or
        "cuda"), cannot do; called when a run is planned."""
        for part in self.parts.values():
            part.check(config, device)


# What backends show the audit


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One weight matrix as it is stored.

    ``tensors``: all that is kept for it, by name; biases and constant tables left out.
    ``dequantize`` gives the matrix [out, in] that they stand for; None where nothing but the
    module's forward shows it. ``groups`` rearranges a matrix [out, in] into [groups, weights in a
    group]; weights in a group share their levels.
    """

    tensors: Mapping[str, Tensor]
    dequantize: Callable[[], Tensor] | None
    groups: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ActivationEvidence:
    """How the input of one module is quantized, as far as the audit must be told.

    ``fixed``: the scale, if ``format`` is not dynamic.
    """

    format: QuantFormat
    fixed: Scale | None = None
