"""Settings of checkpoints that were quantized before. Imports no torch. Everything about a copy is
read from its files: transformers' own mapping says whether it loads, the headers how many bits its
layers take, its forward pass what its weights are; its ``quantization_config`` only what else is
rounded."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field

from qbench import machine
from qbench.errors import RecipeError
from qbench.quantizers.config import ROUNDING_BOUND, UNQUANTIZED, WeightSettings, settings
from qbench.quantizers.registry import register
from qbench.records import UNQUANTIZED_BITS, Part, Precision, StoredSize

GGUF = "gguf"  # a file that llama.cpp runs, not transformers
BY_GPTQMODEL = ("exl3", "paroquant")  # formats that transformers does not load
FP8 = ("fp8", "mxfp8")  # transformers loads both by one class
WEIGHTS_ONLY = "weights only: they are multiplied dequantized"
KERNELS = "kernels"  # the package with which transformers multiplies FP8 on a GPU
# Packages that load copies: their versions are in the key of a copy's cell.
LIBRARIES = (
    "accelerate", "auto-round", "bitsandbytes", "compressed-tensors", "gguf", "gptqmodel",
    "kernels", "optimum", "torchao", "xllamacpp",
)  # fmt: skip
MOST_BITS = 32  # of a weight
ACTIVATION_AGREEMENT = 0.3  # relative, of products whose inputs are rounded to as few as 4 bits


@functools.cache
def loadable_methods() -> tuple[str, ...]:
    """Return each ``quant_method`` that the installed transformers loads, read from its source
    (importing it would import torch), and those that GPTQModel loads."""
    text = machine.package_source("transformers", "quantizers/auto.py")
    table = text.partition("AUTO_QUANTIZER_MAPPING = {")[2].partition("\n}")[0]
    names = (name.removesuffix("_4bit") for name in re.findall(r'^    "([\w-]+)"', table, re.M))
    return tuple(sorted({*names, *BY_GPTQMODEL} - {"bitsandbytes_8bit"}))


def format_rows() -> Iterator[tuple[str, str]]:
    """Yield (format, what loads it) in words, for ``qbench list formats``."""
    for name in loadable_methods():
        loader = "gptqmodel" if name in BY_GPTQMODEL else "transformers"
        loader += ", as a GGUF file llama.cpp" if name == GGUF else ""
        cpu = f"; on a CPU {WEIGHTS_ONLY}, as on a GPU without {KERNELS}" if name in FP8 else ""
        yield name, f"{loader}{cpu}"


@register(
    "checkpoint",
    "a checkpoint that is quantized already: GPTQ, AWQ, compressed-tensors, … (list formats)",
    ignore=((),),
)
@settings
class Published(WeightSettings):
    """A quantized checkpoint as a recipe names it; a plan replaces it by a ``PublishedCopy``."""

    method: ClassVar[str] = "checkpoint"
    backend: ClassVar[str] = "stored_bits"
    scheme: ClassVar[str] = "as its files say"
    title: ClassVar[str] = "As published"
    prequantized: ClassVar[bool] = True
    misfit: ClassVar[str] = "run it on a GPU"
    num_bits: ClassVar[float] = UNQUANTIZED_BITS

    name: str = "checkpoint"
    path: str | dict[str, str] | None = Field(
        None, description="its folder or hub id; of several checkpoints {name: folder or hub id}; "
        "None: the recipe's checkpoint is the quantized one",
    )  # fmt: skip

    def shared_bits(self, rows: int, columns: int) -> float:
        """Return 16: what the copy's files store beside codes is not known."""
        return UNQUANTIZED_BITS

    def source(self, checkpoint: str) -> str | None:
        """Return the folder or hub id of the copy of ``checkpoint``; None if the checkpoint itself
        is the copy. Raises RecipeError if ``path`` is a mapping without it."""
        if not isinstance(self.path, dict):
            return self.path
        if checkpoint not in self.path:
            names = ", ".join(self.path)
            raise RecipeError(
                f"checkpoint: path has no entry for {checkpoint}, only for {names}; add one"
            )
        return self.path[checkpoint]


@settings
class PublishedCopy(Published):
    """A quantized copy whose files are in ``folder``, with their ``digest``. ``format``: its
    quant_method; ``config``: its quantization_config. ``stored_bits``: bits per quantized weight in
    its files, ``fewest_bits`` those of the layer with the fewest; None for a copy without its
    original, whose weights cannot be counted. ``ignore``: layers that are stored unquantized;
    ``ends_quantized``: embeddings or LM head are quantized."""

    requirements: ClassVar[tuple[str, ...]] = LIBRARIES

    format: str
    config: dict[str, Any]
    digest: str
    folder: str
    device: str
    stored_bits: float | None = None
    fewest_bits: float | None = None
    size: StoredSize | None = None
    ends_quantized: bool = False

    method = property(lambda self: f"published {self.format}")
    title = property(lambda self: f"{self.format}, as published")
    runtime = property(lambda self: "llama.cpp" if self.format == GGUF else "transformers")
    batch_invariant = property(lambda self: not shares_scales(self.config))
    unrounded = property(lambda self: self.least_bits >= UNQUANTIZED_BITS)  # as a GGUF file of F32

    @property
    def num_bits(self) -> float:
        """Return the bits per code, at least 1: stored bits per weight rounded down, since scales
        take less than 1; if these are not counted, or more than a number has, as beside QuIP's
        rotations, the bits that the configuration states."""
        counted = self.stored_bits
        if not counted or counted > MOST_BITS:
            counted = stated_bits(self.format, self.config)
        return math.floor(counted) or 1

    @property
    def least_bits(self) -> float:
        """Return the bits per code of the layer with the fewest, counted like ``num_bits``."""
        return max(1, math.floor(self.fewest_bits or self.num_bits))

    @property
    def scheme(self) -> str:
        """Return format and stored bits, such as ``awq, 4.25 bits per weight``."""
        stored = "" if self.stored_bits is None else f", {self.stored_bits:.3g} bits per weight"
        return f"{self.format}{stored}"

    @property
    def weights_only(self) -> bool:
        """Return whether weights are dequantized when loaded and activations stay unquantized: FP8
        on a CPU, or without the kernels of its products."""
        return self.format in FP8 and (self.device == "cpu" or find_spec(KERNELS) is None)

    @property
    def activations(self) -> Part | None:
        """Return how layers' inputs are rounded, by its configuration; None if they are not."""
        return None if self.weights_only else rounded_part(self.config, "activation")

    @property
    def precision(self) -> Precision:
        """Return bits and scheme of weights, activations and KV cache, by its configuration."""
        words = f"{self.scheme}, weights only" if self.weights_only else self.scheme
        return Precision(
            weights=Part(bits=self.num_bits, scheme=words),
            activations=self.activations,
            kv_cache=rounded_part(self.config, "kv_cache"),
        )

    @property
    def note(self) -> str:
        """Return the format, and whether only its weights are quantized here, for the log."""
        return f"{self.format}, as published{f'; {WEIGHTS_ONLY}' if self.weights_only else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for keys: the files' digest instead of their folder."""
        return {
            "method": self.method,
            "name": self.name,
            "format": self.format,
            "digest": self.digest,
            "compute_dtype": self.compute_dtype,
            **({"weights_only": True} if self.weights_only and self.device != "cpu" else {}),
        }

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if an installed library or this processor would compute another model
        than the copy's: int8 products by torchao on some CPUs, a KV cache that is left unquantized.
        """
        sums = self.format == "torchao" and self.activations is not None and device == "cpu"
        if sums and (why := machine.int8_problem()):
            raise RecipeError(
                f"{self.format}: {why}, so its products would be wrong; run it on a GPU or on a "
                "CPU with VNNI"
            )

        version = machine.version_of("transformers")
        newer = tuple(map(int, version.split(".")[:2])) >= (5, 24)
        if newer and rounded_part(self.config, "kv_cache"):
            raise RecipeError(
                f"{self.format}: transformers {version} would leave its KV cache unquantized: "
                "compressed-tensors 0.20 gives it to layers under an earlier name; install "
                "'transformers<5.24'"
            )

    @property
    def blocks(self) -> tuple[int, int]:
        """Return (1, 64) for 4-bit bitsandbytes on a CPU, which reads whole blocks; else (1, 1)."""
        on_cpu = self.format == "bitsandbytes" and self.num_bits == 4 and self.device == "cpu"
        return (1, 64) if on_cpu else (1, 1)

    # What the audit may expect

    @property
    def error_bound(self) -> float:
        """Return the bound of rounding to the bits of the layer with the fewest, at least 2."""
        least = max(2, self.least_bits)
        return ROUNDING_BOUND[max(width for width in ROUNDING_BOUND if width <= least)]

    @property
    def agreement(self) -> dict[str, tuple[float, float]]:
        """Return wide bounds, the same for each dtype, since libraries multiply in float16 or
        bfloat16; wider ones if inputs are rounded."""
        rounded = self.activations is not None
        return dict.fromkeys(UNQUANTIZED, (2e-2, ACTIVATION_AGREEMENT) if rounded else (5e-3, 1e-2))


# Reading a quantization_config of any library


def entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of the mapping ``config``, a quantization_config, at any depth."""
    for key, value in config.items():
        yield str(key), value
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                yield from entries(inner)


def rounded_part(config: Mapping[str, Any], kind: str) -> Part | None:
    """Return the part of a model whose key or type has ``kind`` in its name ("activation",
    "kv_cache") if its quantization_config says that it is rounded; else None."""
    if kind == "activation" and config.get("load_in_8bit"):
        return Part(bits=8, scheme="int8, outlier columns apart")  # LLM.int8
    if kind == "activation" and config.get("quant_method") == "bitnet":  # which does not say so
        return Part(bits=8, scheme="int8 per token, dynamic", simulated=True)
    for key, value in entries(config):
        if kind == "activation" and key == "act_bits" and value and value < UNQUANTIZED_BITS:
            when = "dynamic" if config.get("act_dynamic") else "static"
            return Part(bits=value, scheme=f"{config.get('act_data_type')}, {when}", simulated=True)
        if kind in key.lower() and isinstance(value, Mapping) and value.get("num_bits"):
            when = "dynamic" if value.get("dynamic") else "static"
            words = f"{value.get('type', 'int')}{value['num_bits']}, {when}"
            return Part(bits=value["num_bits"], scheme=words, simulated=True)
        named = kind in key.lower() and isinstance(value, str) and value.lower() != "none"
        typed = key in ("_type", "quant_type") and kind in str(value).lower()
        if named or (typed and "dynamic" in str(value).lower()):
            return Part(bits=8, scheme=str(value)[:40], simulated=False)
    return None


def shares_scales(config: Mapping[str, Any]) -> bool:
    """Return whether by its quantization_config a copy's activations share a scale over tokens, so
    that scores depend on the batch."""
    inner = [config, *(value for _, value in entries(config) if isinstance(value, Mapping))]
    by_tensor = any(part.get("strategy") == "tensor" and part.get("dynamic") for part in inner)
    dynamic = any("dynamicactivation" in str(v).lower() for k, v in entries(config) if k == "_type")
    return bool(
        config.get("load_in_8bit")
        or by_tensor
        or (dynamic and any(v == "PerTensor" for _, v in entries(config)))
    )


def stated_bits(method: str, config: Mapping[str, Any]) -> float:
    """Return the fewest bits of weights that a quantization_config states, or else the name of its
    quantization type or ``method``; 16 if neither does."""
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return 8 if config.get("load_in_8bit") else 4
    numbers = (v for k, v in entries(config) if k in ("bits", "num_bits", "w_bit", "nbits"))
    numbers = [v for v in numbers if isinstance(v, int | float) and 0 < v <= UNQUANTIZED_BITS]
    if numbers:
        return min(numbers)
    names = " ".join([str(config.get("quant_type") or ""), method])
    digits = re.search(r"(?:int|fp|float)(\d)", names, re.I)
    return float(digits[1]) if digits else UNQUANTIZED_BITS


def number_bits(dtype: str) -> int:
    """Return the bits of one number of a safetensors dtype by its name: 16 of BF16, 8 of F8_E4M3; 8
    of a name without digits, such as BOOL."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def parents(name: str) -> Iterator[str]:
    """Yield the names of modules that the tensor ``name`` may belong to, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
