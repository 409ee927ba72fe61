"""Rounding values to few bits and back: the definition, in plain PyTorch and float32.

A format (:class:`~qbench.quantizers.config.QuantFormat`) says what codes there are and what shares
a scale. Ties go to even. What is not finite comes out as NaN, and where a scale is taken from the
values, all that share it with them: a broken activation cannot pass for a number. On a GPU a kernel
computes the same, bit for bit.

Below it: the inputs of a model's linear layers rounded so, by a forward pre-hook on each
(:class:`FakeQuant`); where scales are fixed before, they come from what layers take in on
calibration text.

Formulas: integers, scale = max|x| / (2^(b−1) − 1) or (max − min) / (2^b − 1); FP8 and MX, OCP
Microscaling Formats v1.0 (2023); NVFP4, NVIDIA, "Pretraining Large Language Models with NVFP4"
(2025), appendix C; a zero point that is the lowest value, KIVI (Liu et al. 2024), section 3.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import (
    WHOLE_ROW,
    ActivationEvidence,
    Progress,
    QuantFormat,
    matching,
)

if TYPE_CHECKING:
    from qbench.quantizers.activations import FakeQuantized


@dataclass(frozen=True, slots=True)
class Element:
    """A floating-point format: ``mantissa`` bits, smallest normal 2^``lowest``, largest value
    in [2^``highest``, 2^(``highest`` + 1)); subnormals, no infinities."""

    mantissa: int
    lowest: int
    highest: int
    largest: float


# OCP Microscaling Formats (MX) v1.0 (2023), section 5.3: E4M3 and E2M1.
ELEMENTS = {
    "e4m3": Element(mantissa=3, lowest=-6, highest=8, largest=448.0),
    "e2m1": Element(mantissa=1, lowest=0, highest=2, largest=6.0),
}
LEAST_EXPONENT = -126  # of E8M0 here: 2^−127 is a subnormal of float32, which GPUs may flush
LEAST_E4M3 = 2.0**-9  # as a scale: its smallest value above 0
CODES = {"int": torch.int8, "float": torch.float8_e4m3fn}  # dtypes of codes of 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """What codes are multiplied by, and the zero point of an asymmetric format: float32, with the
    shape of the values that share them, or scalars."""

    scale: Tensor
    zero: Tensor | None = None


def fake_quantize(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """``x`` [..., n] rounded to what ``form`` can be, in the dtype of ``x``. Token and group
    strategies have a scale for each group of values along the last axis.

    ``fixed``: the scale of the whole tensor where that is known before; where ``form`` has one and
    it is not given, it is taken from all of ``x``.
    """
    if form.one_of_tensor and fixed is None:
        if not x.numel():
            return x
        fixed = scale_of_tensor(*torch.aminmax(x), form)
    groups = x if form.group_size == WHOLE_ROW else x.unflatten(-1, (-1, form.group_size))
    return fake_quantize_rows(groups, form, fixed).reshape(x.shape)


def fake_quantize_rows(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """``fake_quantize`` where each row along the last axis is a group."""
    if x.is_cuda:
        from qbench.quantizers import fake_quant_kernels as kernels  # needs Triton

        if kernels.fits(x):
            return kernels.fake_quantize_rows(x, form, fixed)
    return fake_quantize_definition(x, form, fixed)


def fake_quantize_definition(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Tensor:
    """``fake_quantize_rows`` in plain PyTorch."""
    wide = x.float()
    scale = scale_of_rows(wide, form, fixed)
    codes = quantize(wide, form, scale)
    if fixed is not None and form.scale_dtype == "float32":  # else the scale is not finite
        codes = codes + not_finite(wide)
    return dequantize(codes, form, scale).to(x.dtype)


def encode(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> tuple[Tensor, Tensor]:
    """Rows ``x`` [rows, columns] as codes of a symmetric format of 8 bits (int8 or float8_e4m3fn),
    and float32 scales [rows, 1], or [1, 1] of a whole tensor.

    What is not finite makes the scale NaN, and so all that is multiplied by it.
    """
    assert form.symmetric
    assert form.num_bits == 8
    if form.one_of_tensor and x.numel():
        fixed = scale_of_tensor(*torch.aminmax(x), form)
    if x.is_cuda:
        from qbench.quantizers import fake_quant_kernels as kernels  # needs Triton

        if x.numel() and kernels.fits(x):
            return kernels.encode(x, form, fixed)
    return encode_definition(x, form, fixed)


def encode_definition(
    x: Tensor, form: QuantFormat, fixed: Scale | None = None
) -> tuple[Tensor, Tensor]:
    """``encode`` in plain PyTorch; ``fixed`` is given for a whole tensor."""
    wide = x.float()
    if fixed is None:
        scale = scale_of_rows(wide, form).scale
    elif form.dynamic:
        scale = fixed.scale.view(1, 1)
    else:  # a broken row must not break the others
        scale = torch.where(wide.isfinite().all(1, keepdim=True), fixed.scale, torch.nan)
    scale = torch.where(torch.isinf(scale), torch.nan, scale)
    codes = quantize(wide, form, Scale(scale)).nan_to_num(0.0)
    return codes.to(CODES[form.type]), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """What codes stand for, float32."""
    return codes.float() * scale


# Scales


def scale_of_rows(x: Tensor, form: QuantFormat, fixed: Scale | None = None) -> Scale:
    """Of each row of float32 ``x`` [..., n], shape [..., 1]; or ``fixed``, under which groups
    with scales in E4M3 have their own."""
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
    """Of values between ``low`` and ``high``, float32; of a symmetric format of magnitudes up to
    ``high``, where ``low`` is None."""
    if form.symmetric:
        largest = high if low is None else torch.maximum(high, -low)
        return Scale(stored(divided(largest, form.largest), form))
    assert low is not None
    if form.zero_point == "float":
        zero = stored(low, form)
        return Scale(stored(divided((high - zero).clamp(min=0), form.largest), form), zero)
    low = low.clamp(max=0)
    scale = stored(divided(high.clamp(min=0) - low, form.largest), form)
    return Scale(scale, torch.round(-low / divisor(scale)))


def scale_of_tensor(low: Tensor, high: Tensor, form: QuantFormat) -> Scale:
    """The scale above all values between ``low`` and ``high`` (scalars); of
    ``tensor_group`` so that the largest group's scale is E4M3's largest value."""
    found = scale_of_ends(low.float(), high.float(), form)
    if form.strategy == "tensor_group":
        return Scale(divided(found.scale, ELEMENTS["e4m3"].largest))
    return found


def stored(scale: Tensor, form: QuantFormat) -> Tensor:
    """``scale`` as it would be kept, in float32."""
    return scale.to(torch.float16).float() if form.scale_dtype == "float16" else scale


# Codes


def quantize(x: Tensor, form: QuantFormat, by: Scale) -> Tensor:
    """Codes of float32 ``x``, float32: whole numbers, or values of a floating-point format."""
    if form.type == "float":
        return nearest(x / divisor(by.scale), ELEMENTS[form.element])
    if by.zero is None:
        return (x / divisor(by.scale)).round_().clamp_(-form.largest, form.largest)
    if form.zero_point == "float":
        return ((x - by.zero) / divisor(by.scale)).round_().clamp_(0, form.largest)
    return ((x / divisor(by.scale)).round_() + by.zero).clamp_(0, form.largest)


def dequantize(codes: Tensor, form: QuantFormat, by: Scale) -> Tensor:
    """What ``codes`` stand for, float32."""
    if by.zero is None:
        return codes * by.scale
    return (
        codes * by.scale + by.zero if form.zero_point == "float" else (codes - by.zero) * by.scale
    )


def nearest(x: Tensor, element: Element) -> Tensor:
    """The value of ``element`` nearest to ``x``, float32; saturates, NaN stays NaN."""
    step = two_to(exponent_of(x).clamp(min=element.lowest) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.largest, element.largest)


# Arithmetic


def divided(x: Tensor, number: float) -> Tensor:
    """``x`` / ``number``, rounded once: by a plain number CUDA multiplies with its reciprocal."""
    return x / torch.full_like(x, number)


def divisor(scale: Tensor) -> Tensor:
    """What can be divided by: values that are all 0 have scale 0 and stay 0."""
    return torch.where(scale == 0, 1.0, scale)


def not_finite(x: Tensor) -> Tensor:
    """0; NaN where ``x`` is not finite."""
    return x * 0


def exponent_of(x: Tensor) -> Tensor:
    """⌊log2|x|⌋ of normal float32 values; −127 below them, 128 where not finite."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def two_to(exponent: Tensor) -> Tensor:
    """2^exponent for −126 … 127."""
    return ((exponent.clamp(LEAST_EXPONENT, 127) + 127) << 23).view(torch.float32)


# Inputs of linear layers

ATTRIBUTE = "qbench_inputs"  # of a model whose activations are quantized


class FakeQuant:
    """What quantizes the inputs of a model's layers ``names``. ``scales``: their fixed ones, where
    those do not depend on the input. Layers that take in the same tensor (q, k and v; gate and up)
    get the same quantized one, computed once. ``paused``: inputs stay as they are."""

    def __init__(
        self,
        quantize: Callable[[Tensor, Scale | None], Any],
        scales: Mapping[str, Scale],
        names: tuple[str, ...],
    ):
        self.quantize, self.scales, self.names = quantize, scales, names
        self.paused = False
        # by thread: an input, its version and scale, and what became of it
        self._last: dict[int, tuple[weakref.ref[Tensor], int, Scale | None, Any]] = {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        """The forward pre-hook of the module ``name``."""
        fixed = self.scales.get(name)

        def quantize_input(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
            return None if self.paused else (self.once(arguments[0], fixed), *arguments[1:])

        return quantize_input

    def once(self, x: Tensor, fixed: Scale | None) -> Any:
        """What ``quantize`` gives for ``x``, kept for the next that asks with the same tensor."""
        thread = threading.get_ident()
        version = 0 if x.is_inference() else x._version
        last = self._last.get(thread)
        if last and last[0]() is x and last[1] == version and last[2] is fixed:
            return last[3]
        quantized = self.quantize(x, fixed)

        def forget(reference: weakref.ref[Tensor]) -> None:
            if self._last.get(thread, (None,))[0] is reference:
                del self._last[thread]

        # kept no longer than the input itself lives
        self._last[thread] = weakref.ref(x, forget), version, fixed, quantized
        return quantized


def layers_with_inputs(model: nn.Module, ignore: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """The modules of ``model`` that multiply by a weight matrix, by name: linear layers, however
    their weights are stored. Without the LM head and what ``ignore`` names.

    Raises QuantizationError for a pattern that names none of them.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {
        name: module
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    for one in ignore:
        if not matching(found, (one,)):
            last = dict.fromkeys(name.rpartition(".")[2] for name in found)
            raise QuantizationError(
                f"activations: ignore: {one!r} names no layer; they end in {', '.join(last)}"
            )
    ignored = matching(found, ignore)
    return {name: module for name, module in found.items() if name not in ignored}


def install(model: nn.Module, settings: FakeQuantized, tensors: Mapping[str, Tensor]) -> None:
    """Let layers of ``model`` take in what ``settings`` make of their inputs; ``tensors`` are those
    of ``calibrate``. Raises QuantizationError for a layer whose width groups do not divide, or
    that cannot multiply codes."""
    modules, form = layers_with_inputs(model, settings.ignore), settings.format
    for name, module in modules.items():
        if problem := settings.misfit(name, module.in_features):
            raise QuantizationError(problem)
    if getattr(settings, "arithmetic", "") == "auto":
        raise QuantizationError(
            f"{settings.name}: arithmetic: auto is decided where a run is planned; say real or "
            "simulated here"
        )
    scales = fixed_scales(tensors, form)
    if settings.real:
        from qbench.quantizers.scaled_mm import multiply_codes  # it imports this module

        multiply_codes(model, modules, form, scales)
        return
    inputs = FakeQuant(lambda x, fixed: fake_quantize(x, form, fixed), scales, tuple(modules))
    for name, module in modules.items():
        module.register_forward_pre_hook(inputs.hook(name))
    setattr(model, ATTRIBUTE, inputs)


def fixed_scales(ranges: Mapping[str, Tensor], form: QuantFormat) -> dict[str, Scale]:
    """Scales from [low, high] of each module's inputs. Equal ranges give one object, so that
    layers with one input still have it quantized once."""
    made: dict[tuple[float, ...], Scale] = {}
    result = {}
    for name, ends in ranges.items():
        key = tuple(ends.tolist())
        result[name] = made.setdefault(key, scale_of_tensor(ends[0], ends[1], form))
    return result


def evidence(model: nn.Module, settings: FakeQuantized) -> dict[str, ActivationEvidence]:
    """What is installed in ``model``."""
    inputs = getattr(model, ATTRIBUTE, None)
    if inputs is None:
        return {}
    result = {}
    for name in inputs.names:
        fixed = inputs.scales.get(name)
        result[name] = ActivationEvidence(
            format=settings.format,
            scale=fixed.scale if fixed else None,
            zero=fixed.zero if fixed else None,
            inside=settings.real,
        )
    return result


@contextmanager
def weights_alone(model: nn.Module) -> Iterator[None]:
    """Within it the inputs of ``model`` stay as they are."""
    inputs = getattr(model, ATTRIBUTE, None)
    if inputs is not None:
        inputs.paused = True
    try:
        yield
    finally:
        if inputs is not None:
            inputs.paused = False


# Ranges on calibration text

PATTERNS = 2**16  # of the upper half of a float32: sign, exponent, 7 bits of mantissa
SIGN = 2**15


class Observer:
    """What one layer took in: the two ends in full and, ``counted``, how often each bfloat16 value
    came, for which a percentile below 100 alone asks."""

    def __init__(self, device: torch.device, *, counted: bool) -> None:
        self.counts = torch.zeros(PATTERNS, dtype=torch.int64, device=device) if counted else None
        self.low = torch.tensor(torch.inf, device=device)
        self.high = torch.tensor(-torch.inf, device=device)

    def add(self, x: Tensor) -> None:
        flat = x.detach().float().reshape(-1)
        if not flat.numel():
            return
        if self.counts is not None:
            upper = (flat.view(torch.int32) >> 16) & (PATTERNS - 1)
            # not bincount, which waits for the device twice
            self.counts.scatter_add_(0, upper.long(), torch.ones_like(upper, dtype=torch.int64))
        low, high = torch.aminmax(flat)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def merge(self, other: Observer) -> None:
        if self.counts is not None and other.counts is not None:
            self.counts += other.counts
        self.low = torch.minimum(self.low, other.low)
        self.high = torch.maximum(self.high, other.high)

    def range(self, percentile: float, *, symmetric: bool) -> Tensor:
        """[low, high], float32: what ``percentile`` per cent of the values lie within.

        100 gives the smallest and the largest value. Below it, ends are rounded towards 0 to
        bfloat16's next value, at most 0.8 % away. ``symmetric``: of magnitudes.
        """
        if percentile == 100:
            if symmetric:
                high = torch.maximum(-self.low, self.high)
                return torch.stack([-high, high])
            return torch.stack([self.low, self.high])
        assert self.counts is not None, "a percentile below 100 needs what was counted"
        positive, negative = self.counts[:SIGN].double(), self.counts[SIGN:].double()
        magnitudes = torch.arange(SIGN, dtype=torch.int32, device=positive.device) << 16
        values = magnitudes.view(torch.float32)  # of positive bfloat16 patterns, in order
        if symmetric:
            high = values[_rank(positive + negative, percentile / 100)]
            return torch.stack([-high, high])
        ordered = torch.cat([negative.flip(0), positive])  # −∞ … −0, 0 … ∞
        tail = (1 - percentile / 100) / 2
        values = torch.cat([-values.flip(0), values])
        return torch.stack([values[_rank(ordered, tail)], values[_rank(ordered, 1 - tail)]])


def _rank(counts: Tensor, share: float) -> Tensor:
    """Index of the value that at least ``share`` of all lie at or below."""
    total = counts.cumsum(0)
    return torch.searchsorted(total, share * total[-1]).clamp(max=len(counts) - 1)


@torch.no_grad()
def calibrate(
    model: nn.Module,
    settings: FakeQuantized,
    calibration: Calibration | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """By module: [low, high] of its inputs over the calibration text, one sample at a time; empty
    where nothing is fixed. Raises QuantizationError for a module that the text never reaches."""
    if not settings.needs_calibration:
        return {}
    assert calibration is not None
    counted, modules = settings.percentile < 100, layers_with_inputs(model, settings.ignore)
    device = next(model.parameters()).device
    seen = {name: Observer(device, counted=counted) for name in modules}
    last: list[tuple[weakref.ref[Tensor], Observer]] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            if not last or last[0][0]() is not x:  # q, k and v take in one tensor
                one = Observer(x.device, counted=counted)
                one.add(x)
                last[:] = [(weakref.ref(x), one)]
            seen[name].merge(last[0][1])

        return look

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        for number, ids in enumerate(calibration.ids):
            progress("ranges", number / calibration.samples)
            model(input_ids=ids[None].to(device), use_cache=False)
    for name, one in seen.items():
        if one.high < one.low:
            raise QuantizationError(f"{name}: calibration text never reaches it; add text")
    symmetric = settings.format.symmetric
    found = {n: one.range(settings.percentile, symmetric=symmetric) for n, one in seen.items()}
    for name, ends in found.items():
        if not ends.isfinite().all():
            raise QuantizationError(f"{name}: its inputs on calibration text are not finite")
    return found
