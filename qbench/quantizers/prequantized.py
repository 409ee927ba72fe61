"""Checkpoints that somebody quantized already: what a recipe says of one, and what its own
``quantization_config`` says. Settings alone, no torch; ``qbench.prequantized`` finds the files.

transformers names a format by ``quant_method`` and loads it with the library in ``requirements``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from qbench import machine
from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers.config import (
    ROUNDING_BOUND,
    SETTINGS,
    WHOLE_ROW,
    Runtime,
    WeightSettings,
    strategy,
)
from qbench.quantizers.gguf_file import bits_of as type_bits
from qbench.quantizers.gguf_file import levels_of
from qbench.quantizers.names import register
from qbench.records import UNQUANTIZED_BITS, Part, Precision

WEIGHTS_ONLY = "weights only: they are multiplied dequantized"
KERNELS = "kernels"  # the package with which transformers multiplies FP8 on a GPU
ACTIVATION_AGREEMENT = 0.3  # relative, of products whose inputs are rounded to as few as 4 bits


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a ``quantization_config`` says of its weights. ``bits``: what its layers have, what a
    table shows first; ``groups``: weights of a row that share a scale; ``block``: rows and columns
    that are dequantized together; ``refusal``: why its library does not load it, and what to do."""

    bits: tuple[Annotated[int | float, Field(gt=0, le=32)], ...]
    words: str
    groups: int = WHOLE_ROW
    levels: int | None = None  # under one scale, where they are not 2^num_bits
    activations: Part | None = None
    kv_cache: Part | None = None
    independent: bool = True  # a score of batch-mates, and logits of later tokens
    int8_products: bool = False  # int8 codes are multiplied by int8 codes
    block: tuple[PositiveInt, PositiveInt] = (1, 1)
    refusal: str = ""

    def __post_init__(self) -> None:
        if self.groups < 1 and self.groups != WHOLE_ROW:
            raise ValueError(f"groups of {self.groups} weights")


class Format(NamedTuple):
    """One ``quant_method``. ``read`` raises errors of Python for what is none of its
    configurations; ``modules``: what is imported to load it, by the name to install."""

    title: str
    read: Callable[[Mapping[str, Any]], Scheme]
    modules: Mapping[str, str]

    @property
    def missing(self) -> list[str]:
        return [name for name, module in self.modules.items() if find_spec(module) is None]


def _bits(config: Mapping[str, Any], key: str, read: tuple[str, ...]) -> Scheme:
    """``key`` states the layout of the files; ``read``: those that the kernel in torch reads."""
    bits, group, refusal = config["bits"], config.get("group_size", 128), ""
    if (layout := str(config.get(key) or read[0]).lower()) not in read:
        refusal = f"{key} {layout!r}, and {' and '.join(read)} alone load here; take another copy"
    if unread := [name for name in ("dynamic", "lm_head") if config.get(name)]:
        refusal = (
            f"its config.json has {' and '.join(unread)}: layers of other bits, or a quantized LM "
            "head, which transformers does not read from such files; take another copy"
        )
    words = f"int{bits} {strategy(group)}"
    return Scheme(bits=(bits,), groups=group, words=words, refusal=refusal)


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    if config.get("load_in_8bit"):
        part = Part(bits=8, scheme="int8 per token, outlier columns apart")
        return Scheme(bits=(8,), words="int8 per row", activations=part, independent=False)
    kind = config.get("bnb_4bit_quant_type", "fp4")
    return Scheme(bits=(4,), groups=64, words=f"{kind} in blocks of 64")


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = list((config.get("config_groups") or {}).values())
    weights = [group["weights"] for group in groups if group.get("weights")]
    if not weights:
        raise ValueError("it quantizes no weights")
    inputs = [group["input_activations"] for group in groups if group.get("input_activations")]
    cache = config.get("kv_cache_scheme")
    weights.sort(key=lambda args: args["num_bits"])
    words = dict.fromkeys(f"{_element(args)} {_shared(args)}" for args in weights)
    sizes = [args.get("group_size") or _block(args)[1] for args in weights]
    rounded = (*inputs, cache) if cache else inputs
    mixes = any(args.get("strategy") == "tensor" and args.get("dynamic") for args in rounded)
    refusal = ""
    if any(args.get("actorder") in ("group", True) for args in weights):
        refusal = (
            "its weights are in the order of activations (actorder: group), which "
            "compressed-tensors 0.20 no longer loads; take another copy"
        )
    elif cache and cache.get("strategy") == "token" and cache.get("dynamic"):
        refusal = (
            "its config.json has a dynamic kv_cache_scheme of strategy token: compressed-tensors "
            "takes one scale for all tokens of a sequence, so later tokens would change the scores "
            "of earlier ones; take a copy whose scheme is static, or of strategy group"
        )
    return Scheme(
        bits=tuple(args["num_bits"] for args in reversed(weights)),
        groups=min((size for size in sizes if size != WHOLE_ROW), default=WHOLE_ROW),
        words=" and ".join(words),
        activations=_part(inputs[0]) if inputs else None,
        kv_cache=_part(cache) if cache else None,
        independent=not mixes,
        refusal=refusal,
    )


def _part(args: Mapping[str, Any]) -> Part:
    when = "dynamic" if args.get("dynamic") else "static"
    words = f"{_element(args)} {_shared(args)}, {when}"
    return Part(bits=args["num_bits"], scheme=words, simulated=True)


def _element(args: Mapping[str, Any]) -> str:
    kind = {"float": "fp", "int": "int"}.get(args.get("type", "int"), str(args.get("type")))
    return f"{kind}{args['num_bits']}"


def _block(args: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale; older files write them as 128x128."""
    stated = args.get("block_structure") or (1, WHOLE_ROW)
    rows, columns = map(int, stated.split("x") if isinstance(stated, str) else stated)
    return rows, columns


def _shared(args: Mapping[str, Any]) -> str:
    if args.get("strategy") == "block":
        return "in blocks of {} × {}".format(*_block(args))
    if args.get("group_size"):
        return f"in groups of {args['group_size']}"
    return f"per {'row' if args.get('strategy') == 'channel' else args.get('strategy') or 'tensor'}"


def _torchao(config: Mapping[str, Any]) -> Scheme:
    stated = config.get("quant_type")
    stated = stated.get("default") if isinstance(stated, Mapping) else {"_type": stated}
    kind, data = str((stated or {}).get("_type")), (stated or {}).get("_data") or {}
    found = re.search(r"(int|float)(\d)_?weight", kind, re.IGNORECASE)
    width = re.search(r"\d", str(data.get("weight_dtype", "")))
    if found is None and width is None:
        raise ValueError(f"its type {kind} is not known here")
    bits = int(found[2] if found else width[0])
    floats = found is not None and found[1].lower() == "float"
    granularity = data.get("granularity") or data.get("weight_granularity") or {}
    of_inputs, of_weights = granularity if isinstance(granularity, list) else [granularity] * 2
    size = data.get("group_size") or (of_weights.get("_data") or {}).get("group_size") or WHOLE_ROW
    part, whole = None, of_inputs.get("_type") == "PerTensor"
    if "dynamic" in kind.lower():
        element = "fp8" if "float8" in kind.lower() else "int8"
        words = f"{element} per {'tensor' if whole else 'token'}, dynamic"
        part = Part(bits=8, scheme=words, simulated=False)
    share = "per tensor" if of_weights.get("_type") == "PerTensor" else strategy(size)
    words = f"{'fp' if floats else 'int'}{bits} {share}"
    return Scheme(
        bits=(bits,),
        groups=size,
        words=words,
        activations=part,
        independent=part is None or not whole,
        int8_products="int8dynamicactivationint8weight" in kind.lower().replace("_", ""),
    )


def _fp8(config: Mapping[str, Any]) -> Scheme:
    rows, columns = config.get("weight_block_size") or (1, WHOLE_ROW)
    blocks = columns != WHOLE_ROW
    share = f"in groups of {columns}, dynamic" if blocks else "per token, dynamic"
    if config.get("activation_scheme") == "static":
        share = "per tensor, static"
    return Scheme(
        bits=(8,),
        groups=columns,
        words=f"fp8 in blocks of {rows} × {columns}" if blocks else "fp8 per tensor",
        activations=Part(bits=8, scheme=f"fp8 {share}", simulated=False),
        block=(rows, columns) if blocks else (1, 1),
    )


def _gguf(config: Mapping[str, Any]) -> Scheme:
    types = sorted(config["types"].items(), key=lambda one: -one[1])
    whole = sum(count for _, count in types)
    words = ", ".join(f"{name} {count / whole:.0%}" for name, count in types)
    return Scheme(
        bits=tuple(type_bits(name) for name, _ in types),
        levels=max(levels_of(name) for name, _ in types),
        words=words.removesuffix(" 100%"),
    )


def _mxfp4(config: Mapping[str, Any]) -> Scheme:
    return Scheme(bits=(4,), groups=32, words="fp4 in blocks of 32, scales e8m0")


GPTQMODEL = {"gptqmodel": "gptqmodel", "optimum": "optimum"}
ACCELERATE = {"accelerate": "accelerate"}
FORMATS: dict[str, Format] = {
    "gptq": Format(
        "GPTQ", partial(_bits, key="checkpoint_format", read=("gptq", "gptq_v2")), GPTQMODEL
    ),
    "awq": Format("AWQ", partial(_bits, key="version", read=("gemm",)), GPTQMODEL | ACCELERATE),
    "compressed-tensors": Format(
        "compressed-tensors", _compressed_tensors, {"compressed-tensors": "compressed_tensors"}
    ),
    "bitsandbytes": Format("bitsandbytes", _bitsandbytes, {"bitsandbytes": "bitsandbytes"}),
    "torchao": Format("torchao", _torchao, {"torchao": "torchao"}),
    "fp8": Format("FP8", _fp8, ACCELERATE),
    "mxfp4": Format("MXFP4", _mxfp4, ACCELERATE),
    "gguf": Format("GGUF", _gguf, {"xllamacpp": "xllamacpp", "gguf": "gguf"}),
}
REFUSED = {
    "hqq": "transformers 5 loads no HQQ checkpoints; quantize here: hqq-4bit",
    "nvfp4": "transformers loads no NVFP4 checkpoints but those of compressed-tensors",
}


def format_rows() -> Iterator[tuple[str, str]]:
    """What loads where, by format, for ``qbench list formats``."""
    for name, one in FORMATS.items():
        state = f"install {' and '.join(one.missing)}" if one.missing else "installed"
        as_on = f"{WEIGHTS_ONLY}, as on a GPU without the package {KERNELS}"
        cpu = as_on if name == "fp8" else "yes"
        yield name, f"{', '.join(one.modules)} ({state}); CPU: {cpu}"
    yield from ((name, f"refused: {why}") for name, why in REFUSED.items())


def parents(name: str) -> Iterator[str]:
    """Modules that a tensor of this name may belong to, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Published(WeightSettings):
    """A checkpoint that is quantized already, as a recipe names it. What it is stands in its
    files: a plan puts ``Prequantized`` in its place."""

    method: ClassVar[str] = "checkpoint"
    backend: ClassVar[str] = "stored_bits"
    name: ClassVar[str] = "checkpoint"
    scheme: ClassVar[str] = "as its files say"
    title: ClassVar[str] = "As published"
    prequantized: ClassVar[bool] = True
    num_bits: ClassVar[float] = UNQUANTIZED_BITS

    path: Annotated[
        str | dict[str, str] | None,
        Field(
            description="its folder or hub id; of several checkpoints {name: folder or hub id}; "
            "None: the recipe's checkpoint is the quantized one"
        ),
    ] = None

    def shared_bits(self, rows: int, columns: int) -> float:
        return UNQUANTIZED_BITS

    def source(self, checkpoint: str) -> str | None:
        """Where the quantized copy of ``checkpoint`` lies. Raises RecipeError for none."""
        if not isinstance(self.path, dict):
            return self.path
        if checkpoint not in self.path:
            known = ", ".join(self.path)
            raise RecipeError(f"checkpoint: path has no entry for {checkpoint}; it has {known}")
        return self.path[checkpoint]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Prequantized(Published):
    """One that was found: ``format`` and ``stated`` as its config.json has them, ``digest`` over
    its files, which lie in ``folder``; ``ignore`` are the layers that it left unquantized."""

    format: str
    stated: dict[str, Any]
    digest: str
    folder: str
    device: str

    @property
    def _scheme(self) -> Scheme:
        return FORMATS[self.format].read(self.stated)

    @property
    def method(self) -> str:
        return f"published {self.format}"

    @property
    def title(self) -> str:
        return f"{FORMATS[self.format].title}, as published"

    @property
    def num_bits(self) -> float:
        return max(self._scheme.bits)

    @property
    def scheme(self) -> str:
        return self._scheme.words

    @property
    def weights_only(self) -> bool:
        """Whether weights are dequantized when they are loaded, and activations are left
        unquantized: on a CPU, or without the kernels of the format's products."""
        return self.format == "fp8" and (self.device == "cpu" or find_spec(KERNELS) is None)

    @property
    def precision(self) -> Precision:
        scheme = self._scheme
        words, inputs = scheme.words, scheme.activations
        if self.weights_only and inputs is not None:
            words, inputs = f"{words}, weights only", None
        return Precision(
            weights=Part(bits=scheme.bits[0], scheme=words),
            activations=inputs,
            kv_cache=scheme.kv_cache,
        )

    @property
    def requirements(self) -> tuple[str, ...]:
        return tuple(FORMATS[self.format].modules)

    @property
    def batch_invariant(self) -> bool:
        return self._scheme.independent

    @property
    def note(self) -> str:
        more = f"; {WEIGHTS_ONLY}" if self.weights_only and self._scheme.activations else ""
        return f"{self.format}, as published{more}"

    def to_dict(self) -> dict[str, Any]:
        """For keys: the files by their digest, not by where they lie."""
        return {
            "method": self.method,
            "name": self.name,
            "format": self.format,
            "digest": self.digest,
            "compute_dtype": self.compute_dtype,
            **({"weights_only": True} if self.weights_only and self.device != "cpu" else {}),
        }

    def check(self, config: Mapping[str, Any], device: str) -> None:
        if missing := FORMATS[self.format].missing:
            raise RecipeError(f"{self.format}: pip install {' '.join(missing)} loads it")
        if self._scheme.refusal:
            raise RecipeError(f"{self.format}: {self._scheme.refusal}")
        if self._scheme.int8_products and device == "cpu" and (why := machine.int8_problem()):
            raise RecipeError(
                f"{self.format}: {why}, so its products would be wrong; run it on a GPU or on a "
                "CPU with VNNI"
            )

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        blocks = self.format == "bitsandbytes" and self.num_bits == 4
        if blocks and self.device == "cpu" and columns % 64:
            raise QuantizationError(
                f"{self.name}: {name} has {columns} inputs, and on CPUs bitsandbytes 0.50 reads "
                "4-bit rows of whole blocks of 64 alone; run it on a GPU"
            )
        sizes = zip((rows, columns), self._scheme.block, strict=True)
        if self.weights_only and any(n > size and n % size for n, size in sizes):
            raise QuantizationError(
                f"{self.name}: {name} [{rows}, {columns}] is not cut into whole blocks, and "
                "transformers dequantizes others wrongly; run it on a GPU with the package kernels"
            )

    @property
    def runtime(self) -> Runtime:
        return "llama.cpp" if self.format == "gguf" else "transformers"

    @property
    def ends_quantized(self) -> bool:
        return self.format in ("gguf", "torchao")

    @property
    def whole(self) -> bool:
        """Whether nothing is rounded to fewer bits, as in a GGUF file of F32."""
        return min(self._scheme.bits) >= UNQUANTIZED_BITS

    # What the audit may expect

    @property
    def levels(self) -> int:
        return self._scheme.levels or super().levels

    def group_length(self, columns: int) -> int:
        size = self._scheme.groups
        return columns if size == WHOLE_ROW else math.gcd(columns, size)

    def bits_bounds(self, rows: int, columns: int) -> tuple[float, float]:
        """What is stored is counted, and may be more than the codes need, but not fewer bits."""
        return 0.99 * min(self._scheme.bits), 1.1 * max(UNQUANTIZED_BITS, self.num_bits)

    def error_bound(self) -> float:
        least = max(2, min(self._scheme.bits))
        return ROUNDING_BOUND[max(width for width in ROUNDING_BOUND if width <= least)]

    def agreement(self, dtype: str) -> tuple[float, float]:
        identity, random = super().agreement(dtype)
        if self.precision.activations is not None:
            return max(identity, 2e-2), ACTIVATION_AGREEMENT
        return max(identity, 5e-3), max(random, 1e-2)  # libraries multiply in float16 or bfloat16


register(
    "checkpoint",
    Published,
    "a checkpoint that is quantized already: GPTQ, AWQ, compressed-tensors, … (list formats)",
    ignore=(),
)
