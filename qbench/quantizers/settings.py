"""What each quantizer can be told. Frozen data, JSON by ``dataclasses.asdict``. Imports no torch.

Every setting that the papers leave out is a field here, so that a recipe states it. In all methods
the embeddings and the LM head stay as they are, as is usual in the field: what is quantized is
every other linear layer, and ``bits`` speaks of those alone.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from qbench.errors import RecipeError
from qbench.record import Part, Precision

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
WHOLE_ROW = -1


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    least: float | None = None,
    between: tuple[float, float] | None = None,
    also: tuple[Any, ...] = (),
) -> Any:
    """A setting with its default, its meaning, and what values are possible.

    ``least`` is an inclusive bound, ``between`` an open interval; ``also`` are values allowed
    beside them.
    """
    limits = {"choices": choices, "least": least, "between": between, "also": also}
    return field(default=default, metadata={"help": help, **limits})


def _fixed(value: str) -> Any:
    return field(default=value, init=False)


def _bits(*choices: int) -> Any:
    return field(metadata={"help": "bits of a stored weight", "choices": choices, "kind": int})


def _compute_dtype() -> Any:
    return option(
        "bfloat16",
        "dtype of the unquantized weights, the activations and the matrix products",
        choices=COMPUTE_DTYPES,
    )


def _group_size(default: int) -> Any:
    return option(
        default,
        "weights that share a scale, along a row; -1 is the whole row",
        least=8,
        also=(WHOLE_ROW,),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Unquantized:
    """The checkpoint itself: the baseline of every damage. ``bf16`` and ``fp32``."""

    dtype: str = option(
        "bfloat16", "dtype of weights and activations", choices=("bfloat16", "float32")
    )
    method: str = _fixed("none")

    def __post_init__(self) -> None:
        _check(self)

    @property
    def name(self) -> str:
        return {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]

    @property
    def title(self) -> str:
        return "Unquantized"

    @property
    def precision(self) -> Precision:
        return Precision()

    @property
    def mixes_batches(self) -> bool:
        return False

    @property
    def compute_dtype(self) -> str:
        return self.dtype

    @property
    def needs_calibration(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Quantized:
    """What all methods share."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def name(self) -> str:
        return f"{self.method}-{self.bits}bit"  # type: ignore[attr-defined]

    @property
    def title(self) -> str:
        titles = {"bnb": "BNB", "gptq": "GPTQ", "hqq": "HQQ", "rtn": "Round to nearest"}
        return titles[self.method]  # type: ignore[attr-defined]

    @property
    def precision(self) -> Precision:
        bits = self.bits  # type: ignore[attr-defined]
        return Precision(weights=Part(bits=bits, scheme=self.name))

    @property
    def mixes_batches(self) -> bool:
        """Whether a score depends on what it is batched with."""
        return False

    @property
    def needs_calibration(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bnb4(_Quantized):
    """bitsandbytes 4-bit: blocks of 64 weights, 16 levels of a fixed table times the largest."""

    bits: int = _bits(4)
    quant_type: str = option(
        "nf4", "table of levels: normal-float or floating point", choices=("nf4", "fp4")
    )
    double_quant: bool = option(False, "also quantize the blocks' scales, to 8 bits")
    compute_dtype: str = _compute_dtype()
    method: str = _fixed("bnb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bnb8(_Quantized):
    """bitsandbytes LLM.int8: rows of int8 weights, int8 activations, outlier columns apart.

    Outlier columns are chosen over the whole batch, so a score depends on its batch-mates:
    score such cells with a fixed batching policy.
    """

    bits: int = _bits(8)
    threshold: float = option(
        6.0, "activations above this are outliers, computed unquantized; 0: no outliers", least=0.0
    )
    compute_dtype: str = _compute_dtype()
    method: str = _fixed("bnb")

    @property
    def mixes_batches(self) -> bool:
        return True

    @property
    def precision(self) -> Precision:
        return Precision(
            weights=Part(bits=8, scheme="int8 per row"),
            activations=Part(bits=8, scheme="int8 per token, outlier columns apart"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptq(_Quantized):
    """GPTQ (Frantar et al. 2022): column by column, each error passed on to the columns left."""

    bits: int = _bits(2, 3, 4, 8)
    group_size: int = _group_size(128)
    symmetric: bool = option(True, "zero point fixed in the middle; else one for each group")
    desc_act: bool = option(False, "columns in the order of falling activation size")
    group_aware: bool = option(
        False, "that order within groups and among groups alone (GPTQModel's); not with desc_act"
    )
    damp: float = option(
        0.01, "added to the Hessian's diagonal, in units of its mean", between=(0.0, 1.0)
    )
    true_sequential: bool = option(
        True, "inside a block, each layer sees inputs that earlier layers' quantization has changed"
    )
    batch_size: int = option(8, "calibration samples in one forward", least=1)
    backend: str = option(
        "gptqmodel",
        "gptqmodel (GPTQConfig, optimum), torch (our own), auto-gptq (superseded by gptqmodel)",
        choices=("gptqmodel", "torch", "auto-gptq"),
    )
    compute_dtype: str = _compute_dtype()
    method: str = _fixed("gptq")

    @property
    def needs_calibration(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Hqq(_Quantized):
    """Half-quadratic quantization (Badri & Shaji 2023): zero points fitted, no calibration."""

    bits: int = _bits(2, 3, 4, 8)
    group_size: int = option(
        64, "weights that share a scale and a zero, along `axis`; a multiple of 8", least=8
    )
    axis: int = option(1, "1: groups along a row; 0: groups across rows", choices=(0, 1))
    optimize: bool = option(True, "fit the zero points; without it, plain rounding")
    compute_dtype: str = _compute_dtype()
    method: str = _fixed("hqq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rtn(_Quantized):
    """Round to nearest in groups: the yardstick that every method must beat."""

    bits: int = _bits(2, 3, 4, 8)
    group_size: int = _group_size(128)
    symmetric: bool = option(False, "zero point fixed in the middle; else one for each group")
    compute_dtype: str = _compute_dtype()
    method: str = _fixed("rtn")


Settings = Unquantized | Bnb4 | Bnb8 | Gptq | Hqq | Rtn


def options(kind: type) -> dict[str, Field]:
    """The settings of ``kind`` that a recipe may state, bits left out (they are in the name)."""
    return {f.name: f for f in fields(kind) if f.init and f.name not in ("bits", "dtype")}


def _check(settings: Any) -> None:
    """Raise RecipeError with place, value and what is possible for the first bad field."""
    stated = [f for f in fields(settings) if f.init]
    for each in stated:
        value, limits = getattr(settings, each.name), each.metadata
        kind = limits.get("kind", type(each.default))
        if kind is float and type(value) is int:
            value = float(value)
            object.__setattr__(settings, each.name, value)  # one spelling of a value, one key
        if type(value) is not kind or not _possible(value, limits):
            if each.name == "bits":
                choices = ", ".join(map(str, limits["choices"]))
                raise RecipeError(f"{settings.method} has no {value}-bit; it has {choices}")
            raise RecipeError(
                f"{settings.name}: {each.name} must be {_possibilities(kind, limits)}, "
                f"not {value!r}"
            )
    if isinstance(settings, Gptq) and settings.desc_act and settings.group_aware:
        raise RecipeError(
            f"{settings.name}: desc_act and group_aware are two orders of the same columns; "
            "set one of them"
        )


def _possible(value: Any, limits: Any) -> bool:
    if value in limits.get("also", ()):
        return True
    if limits.get("choices") is not None:
        return value in limits["choices"]
    if limits.get("least") is not None and not value >= limits["least"]:
        return False
    between = limits.get("between")
    return between is None or between[0] < value < between[1]


def _possibilities(kind: type, limits: Any) -> str:
    if limits.get("choices") is not None:
        return " or ".join(map(str, limits["choices"]))
    noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    if limits.get("least") is not None:
        noun += f" of at least {limits['least']:g}"
    if limits.get("between") is not None:
        noun += " between {:g} and {:g}".format(*limits["between"])
    return " or ".join([noun, *map(str, limits.get("also", ()))])
