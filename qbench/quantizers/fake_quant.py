"""Round values to few bits and back: the definition, in plain PyTorch and float32.

A ``QuantFormat`` says which codes exist and which values share a scale. Ties are rounded to even. A
value that is not finite becomes NaN, as do all values that share a scale taken from it: a broken
activation cannot pass for a number. On a GPU a kernel computes the same, bit for bit.

Formulas: integers, compressed-tensors' ``calculate_qparams``: scale = 2 max|x| / (2^b − 1) or
(max − min) / (2^b − 1); FP8 and MX, OCP Microscaling Formats v1.0 (2023); NVFP4, NVIDIA,
"Pretraining Large Language Models with NVFP4" (2025), appendix C."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.attention.quantized_kv import KV_CACHE, KVTrace
from qbench.quantizers.formats import (
    ELEMENTS,
    LEAST_E4M3,
    LEAST_EXPONENT,
    WHOLE_ROW,
    FloatFormat,
    QuantFormat,
    Scale,
)

if TYPE_CHECKING:
    from qbench.quantizers.methods.kv_formats import KVCache


CODES = {"int": torch.int8, "float": torch.float8_e4m3fn}  # dtypes of codes of 8 bits
ROUNDED = "qbench_rounded"  # attribute of a tensor: its version, a format, and itself rounded to it


def fake_quantize(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """Return ``x`` [..., n] rounded to the format ``form``, in the dtype of ``x``. ``fixed``: the
    static scale of the whole tensor; if ``form`` has one and it is None, it is taken from ``x``."""
    if form.one_of_tensor and fixed is None:
        if not x.numel():
            return x
        fixed = scale_of_tensor(*torch.aminmax(x), form)
    groups = x if form.group_size == WHOLE_ROW else x.unflatten(-1, (-1, form.group_size))
    return fake_quantize_rows(groups, form, fixed).reshape(x.shape)


def fake_quantize_rows(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """Return ``x`` [..., n] rounded as by ``fake_quantize``; each row along the last axis is a
    group, whatever ``form.group_size`` says. On a GPU a kernel does it."""
    if x.is_cuda:
        from qbench.quantizers import fake_quant_kernels  # imports Triton

        with torch.cuda.device(x.device):  # Triton launches on the current one
            return fake_quant_kernels.fake_quantize_rows(x, form, fixed)
    return fake_quantize_definition(x, form, fixed)


def fake_quantize_definition(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """Return ``fake_quantize_rows`` in plain PyTorch; values that are not finite become NaN."""
    wide = x.float()
    scale = scale_of_rows(wide, form, fixed)
    codes = quantize(wide, form, scale)
    if fixed is not None:  # without it the scale itself is not finite
        codes = codes + not_finite(wide)
    return dequantize(codes, scale).to(x.dtype)


def encode(x: Tensor, form: QuantFormat) -> tuple[Tensor, Tensor]:
    """Return codes of ``x`` [rows, columns] in a symmetric format of 8 bits (int8 or
    float8_e4m3fn), and float32 scales: [rows, 1], or [1, 1] for the whole tensor."""
    assert form.symmetric
    assert form.num_bits == 8
    wide = x.float()
    fixed = scale_of_tensor(*torch.aminmax(wide), form) if form.one_of_tensor else None
    scale = scale_of_rows(wide, form, fixed).scale.view(-1, 1)
    return quantize(wide, form, Scale(scale)).to(CODES[form.type]), scale


# Scales


def scale_of_rows(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Scale:
    """Return the scale of each row of float32 ``x`` [..., n], shape [..., 1]; or ``fixed``, unless
    groups have E4M3 scales under the fixed one."""
    if form.scale_dtype == "float8_e4m3fn":
        # (max|x| / largest) / the tensor's scale, rounded to E4M3
        inner = divided(x.abs().amax(-1, keepdim=True), form.largest)
        tensor = torch.ones((), device=x.device) if fixed is None else fixed.scale
        ratio = (inner / divisor(tensor)).clamp(min=LEAST_E4M3)
        return Scale(nearest(ratio + not_finite(inner), ELEMENTS["e4m3"]) * tensor)
    if fixed is not None:
        return fixed
    if form.scale_dtype == "float8_e8m0fnu":  # 2^(⌊log2 max|x|⌋ − highest), MX v1.0 section 6.3
        exponent = exponent_of(x.abs().amax(-1, keepdim=True))
        power = two_to(exponent - ELEMENTS[form.element].highest)
        return Scale(power + torch.where(exponent == 128, torch.nan, 0.0))
    if form.symmetric:
        return scale_of_ends(None, x.abs().amax(-1, keepdim=True), form)
    return scale_of_ends(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), form)


def scale_of_ends(low: Tensor | None, high: Tensor, form: QuantFormat) -> Scale:
    """Return the scale (float32, rounded by ``stored``), and of an asymmetric format the zero, for
    values between ``low`` and ``high``, of one shape: 0 if all values are, or are too small for
    float16, and NaN if an end is infinite or too large. An asymmetric range is widened to hold 0.
    For a symmetric format ``low`` may be None and ``high`` the largest magnitude."""
    if form.symmetric:
        largest = high if low is None else torch.maximum(high, -low)
        return Scale(stored(divided(largest, form.span), form))
    low = low.clamp(max=0)
    scale = stored(divided(high.clamp(min=0) - low, form.largest), form)
    return Scale(scale, torch.round(-low / divisor(scale)))


def scale_of_tensor(low: Tensor, high: Tensor, form: QuantFormat) -> Scale:
    """Return the scale of a tensor with values between ``low`` and ``high`` (scalars). For
    ``tensor_group`` it is such that the largest group scale becomes E4M3's largest value."""
    scale = scale_of_ends(low.float(), high.float(), form)
    if form.strategy == "tensor_group":
        return Scale(divided(scale.scale, ELEMENTS["e4m3"].largest))
    return scale


def stored(scale: Tensor, form: QuantFormat) -> Tensor:
    """Return ``scale``, float32, rounded to float16 if the format stores it so; NaN if infinite."""
    kept = scale.to(torch.float16).float() if form.scale_dtype == "float16" else scale
    return kept + not_finite(kept)


# Codes


def quantize(x: Tensor, form: QuantFormat, by: Scale) -> Tensor:
    """Return the float32 codes of ``x`` under the scale ``by``: integers or a format's values."""
    if form.type == "float":
        return nearest(x / divisor(by.scale), ELEMENTS[form.element])
    if by.zero is None:
        return (x / divisor(by.scale)).round_().clamp_(form.smallest, form.largest)
    return ((x / divisor(by.scale)).round_() + by.zero).clamp_(0, form.largest)


def dequantize(codes: Tensor, by: Scale) -> Tensor:
    """Return the values that ``codes`` encode, float32."""
    return codes * by.scale if by.zero is None else (codes - by.zero) * by.scale


def nearest(x: Tensor, element: FloatFormat) -> Tensor:
    """Return the value of ``element`` nearest to ``x``, float32; saturates, NaN stays NaN."""
    step = two_to(exponent_of(x).clamp(min=element.lowest) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.largest, element.largest)


# Arithmetic


def divided(x: Tensor, number: float) -> Tensor:
    """Return ``x`` / ``number``, rounded once; CUDA would multiply by the reciprocal."""
    return x / torch.full_like(x, number)


def divisor(scale: Tensor) -> Tensor:
    """Return ``scale`` with 0 replaced by 1, to divide by: values that are all 0 have scale 0."""
    return torch.where(scale == 0, 1.0, scale)


def not_finite(x: Tensor) -> Tensor:
    """Return a tensor with NaN where ``x`` is not finite, else 0."""
    return x * 0


def exponent_of(x: Tensor) -> Tensor:
    """Return ⌊log2|x|⌋ of float32, int32; −127 for 0 and subnormal values, 128 if not finite."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def two_to(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float32, of an int32 exponent, which is clamped to −126 … 127."""
    return ((exponent.clamp(LEAST_EXPONENT, 127) + 127) << 23).view(torch.float32)


@dataclass(eq=False)
class FakeQuant:
    """Round the inputs of a model's layers to ``form``. ``scales``: the static scale by layer's
    name, None if dynamic. ``paused``: inputs are not rounded."""

    form: QuantFormat
    scales: Mapping[str, Scale | None]
    paused: bool = False

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        """Return the pre-hook of the module ``name``: it rounds the first argument."""

        def quantize_input(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
            if self.paused:
                return None
            x, scale = arguments[0], self.scales[name]
            if scale is not None or x.is_inference():  # which counts no versions
                return fake_quantize(x, self.form, scale), *arguments[1:]
            # queries, keys and values have one input, gate and up another
            kept = getattr(x, ROUNDED, None)
            if kept is None or kept[:2] != (x._version, self.form):
                kept = x._version, self.form, fake_quantize(x, self.form, None)
                setattr(x, ROUNDED, kept)
            return kept[2], *arguments[1:]

        return quantize_input


# --- round keys and values to few bits as an attention module reads them


class KVFakeQuant:
    """A KV cache that rounds keys and values to the format of ``settings``, carried by an attention
    module. ``one_scale``: all keys of a call share a scale, and all values. ``watch``, if set, is
    called with each call's module and trace."""

    watch: Callable[[nn.Module, KVTrace], None] | None = None

    def __init__(self, settings: KVCache) -> None:
        self.sink_tokens = settings.sink_tokens
        self.format = settings.format
        self.one_scale = settings.format.one_of_tensor

    def rounded(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return keys or values ``x`` [B, H, T, D] rounded; tokens at ``positions`` below
        ``sink_tokens`` stay as they are. ``positions`` int32 [B or 1, T]: each token's index in its
        own sequence, negative for padding; None if there are no ``sink_tokens``."""
        x = x.transpose(1, 2)  # [B, T, H, D], as they lie: no copy
        sinks, fixed = None, None
        if self.sink_tokens:
            sinks = (positions < self.sink_tokens)[:, :, None, None]
        if self.one_scale:
            fixed = scale_of_tensor(*_range(x, sinks), self.format)
        rounded = fake_quantize(x, self.format, fixed)
        return (rounded if sinks is None else torch.where(sinks, x, rounded)).transpose(1, 2)


def _range(x: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the extremes of ``x`` where ``left_out`` is False; 0 without such values."""
    if left_out is None:
        return torch.aminmax(x)
    low = x.masked_fill(left_out, torch.inf).amin()
    high = x.masked_fill(left_out, -torch.inf).amax()
    nothing = left_out.all()
    return low.masked_fill(nothing, 0.0), high.masked_fill(nothing, 0.0)


def install(model: PreTrainedModel, settings: KVCache, tensors: Mapping[str, Tensor]) -> None:
    """Set the settings' cache on every attention module of ``model``; ``tensors`` is not used."""
    cache = KVFakeQuant(settings)
    for module in attention_modules(model).values():
        setattr(module, KV_CACHE, cache)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep keys and values for later queries, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) and hasattr(module, "layer_idx")
    }


def evidence(model: nn.Module, settings: KVCache) -> dict[str, KVFakeQuant]:
    """Return the cache of each attention module with one, by name; ``settings`` is not used."""
    return {
        name: getattr(module, KV_CACHE)
        for name, module in model.named_modules()
        if getattr(module, KV_CACHE, None) is not None
    }
