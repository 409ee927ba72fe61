"""Measure the inputs of matrix products where they are multiplied, and compute what they should be.

The second half shares no code with the quantizers. Formats are tables of all their values, in
float64. Scales, zero points and ratios are divided in float32, as the quantizers divide them:
values of 16 bits lie on ties so often that float64 would give another code, or another scale."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers.audit.weights import MOST_UNQUANTIZED, levels, relative_error
from qbench.quantizers.config import ActivationEvidence, QuantizationConfig, matching
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.linear import KEPT, Matrix, matrices_size
from qbench.quantizers.quantize import evidence_of
from qbench.records import ActivationAudit, InputAudit

DIFFERENT = 0.01  # share of values that may differ by a step: ties, and scales rounded otherwise


@torch.no_grad()
def measure_inputs(
    originals: Mapping[str, Matrix], quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[ActivationAudit, list[str]]:
    """Measure, on token ids ``probe`` [B, T], the quantized inputs of the modules of ``quantized``
    that multiply by a matrix of ``originals`` (by name). Return the measurements, and a line per
    problem: also for an input that is not quantized, though ``ignore`` does not name it."""
    part, about = config.precision.activations, evidence_of(quantized, config, "activations")
    ignored = matching(originals, config.activations.ignore)
    ignored |= {name for name, matrix in originals.items() if matrix.holder == KEPT}
    others = {n: m for n, m in originals.items() if not m.linear and n not in about}
    if matrices_size(others.values()) <= MOST_UNQUANTIZED * matrices_size(originals.values()):
        ignored |= others.keys()  # routers, convolutions and the like, as for weights
    problems = [
        f"{name}: its input is not quantized; add ignore to the activations to allow it"
        for name in originals
        if name not in about and name not in ignored
    ]
    problems += [f"{n}: its input is quantized, but should not be" for n in about if n in ignored]
    problems += [
        f"{n}: its input is rounded to {e.format.num_bits} bits, the settings say {part.bits:g}"
        for n, e in about.items()
        if e.format.num_bits != part.bits
    ]
    watches = {name: _InputWatch(evidence) for name, evidence in about.items()}
    with ExitStack() as stack:
        for name, watch in watches.items():
            module = quantized.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(watch.before, prepend=True))
            stack.enter_context(module.register_forward_pre_hook(watch.after))
        device = next(quantized.parameters()).device
        quantized(input_ids=probe.to(device), use_cache=False)
    measured = {name: watch for name, watch in watches.items() if watch.count}
    if about and not measured:
        problems.append("no module whose input is quantized ran on the probe text")
    for name, watch in measured.items():
        problems += [f"{name}: {line}" for line in dict.fromkeys(watch.problems)]
        if watch.levels > 2**part.bits:
            problems.append(
                f"{name}: {watch.levels} levels under one scale of its input, {part.bits:g} bits "
                f"have {2**part.bits:g}"
            )
    modules = tuple(
        InputAudit(
            name=name, levels=watch.levels, clipped=watch.clipped / watch.count, error=watch.error
        )
        for name, watch in measured.items()
    )
    sums = [(0.0, 0.0), *((w.error_squared, w.norm_squared) for w in measured.values())]
    return ActivationAudit(
        bits=part.bits,
        levels=max((watch.levels for watch in measured.values()), default=0),
        clipped=sum(s.clipped for s in measured.values())
        / max(1, sum(s.count for s in measured.values())),
        error=relative_error(*(sum(squares) for squares in zip(*sums, strict=True))),
        left_out=tuple(sorted(ignored)),
        unmeasured=tuple(name for name in about if name not in measured),
        modules=modules,
    ), problems


class Rounding:
    """Collects what rounding did to values in all calls of :meth:`add`: most ``levels`` under one
    scale, number of values and of ``clipped`` ones, squares of errors and values, problems.
    ``noun`` names the values in problems."""

    def __init__(self, about: ActivationEvidence, noun: str) -> None:
        self.about, self.noun = about, noun
        self.levels, self.count = 0, 0
        self.clipped = self.error_squared = self.norm_squared = 0.0
        self.problems: list[str] = []

    @property
    def error(self) -> float:
        """Return the relative error ‖rounded − values‖ / ‖values‖."""
        return relative_error(self.error_squared, self.norm_squared)

    def add(self, before: Tensor, after: Tensor) -> None:
        """Compare values ``before`` and ``after`` rounding, both [..., n], with the definition; add
        what is found to the sums and the problems."""
        if not before.numel():  # of an expert that no token is sent to
            return
        rounded = groups_of(after, self.about)
        self.levels = max(self.levels, int(levels(rounded)))
        rounded = rounded.double()
        wide = groups_of(before.double(), self.about)
        right, low, high = expected(wide, self.about)
        # a scale that is rounded to float16 may lie a little below what its values need
        slack = 2.0**-10 if self.about.format.scale_dtype == "float16" else 1e-6
        spread = slack * torch.maximum(high.abs(), low.abs())
        self.clipped += float(((wide > high + spread) | (wide < low - spread)).sum())
        self.count += wide.numel()
        self.error_squared += float((rounded - wide).square().sum())
        self.norm_squared += float(wide.square().sum())
        tolerance = 4 * torch.finfo(after.dtype).eps * right.abs()
        off = float(((rounded - right).abs() > tolerance).double().mean())
        if not rounded.isfinite().all():
            self.problems.append(f"{self.noun} are not finite once they are quantized")
        elif off > DIFFERENT:
            form = self.about.format
            worst = relative_error(*(float(x.square().sum()) for x in (rounded - right, right)))
            named = form.element if form.symmetric else f"asymmetric {form.element}"
            self.problems.append(
                f"{off:.1%} of {self.noun} differ from their rounding to {named} "
                f"(relative difference {worst:.2g})"
            )


class _InputWatch(Rounding):
    """Measures one module's input in all its calls, by two hooks: ``before`` other hooks, and
    ``after`` them, as it is multiplied."""

    def __init__(self, about: ActivationEvidence) -> None:
        super().__init__(about, "its input's values")
        self.input = torch.empty(0)

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.input = arguments[0].detach()

    def after(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Compare the input that is multiplied with the rounded original by definition."""
        self.add(self.input, arguments[0].detach())


# What a quantized input should be


def groups_of(x: Tensor, about: ActivationEvidence) -> Tensor:
    """Return ``x`` [..., in] as [groups, values that share a scale], which may be one group."""
    size = about.format.group_size
    if about.format.strategy == "tensor":
        return x.reshape(1, -1)
    return x.reshape(-1, x.shape[-1] if size == WHOLE_ROW else size)


def expected(groups: Tensor, about: ActivationEvidence) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rounded values [groups, n] of float64 ``groups`` [groups, n] by definition, and
    the lowest and highest values that their stored scales allow [groups or 1, 1]."""
    form, bits = about.format, about.format.num_bits
    largest = groups.abs().amax(1, keepdim=True)
    given = None if about.fixed is None else about.fixed.scale.double().reshape(1, 1)
    if form.type == "int" and not form.symmetric:
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True)
        span = (high.clamp(min=0) - low).float().double()
        scale = _usable(_ratio(span, 2**bits - 1) if given is None else given)
        zero = _ratio(-low, scale).round()
        if about.fixed is not None and about.fixed.zero is not None:
            zero = about.fixed.zero.double().reshape(1, 1)
        codes = (_ratio(groups, scale).round() + zero).clamp(0, 2**bits - 1)
        return (codes - zero) * scale, -zero * scale, (2**bits - 1 - zero) * scale
    if form.type == "int":
        most = 2 ** (bits - 1)
        span = (2**bits - 1) / 2  # scales that round half a step beyond the largest code
        scale = _usable(_stored(_ratio(largest, span), form) if given is None else given)
        codes = _ratio(groups, scale).round().clamp(-most, most - 1)
        return codes * scale, -span * scale, span * scale
    table = _table(form.element).to(groups.device)
    if form.scale_dtype == "float8_e8m0fnu":
        power = torch.floor(torch.log2(_usable(largest)))
        scale = torch.exp2((power - torch.floor(torch.log2(table[-1]))).clamp(min=-126))
    elif form.scale_dtype == "float8_e4m3fn":
        e4m3 = _table("e4m3").to(groups.device)
        above = torch.ones((), dtype=torch.float64, device=groups.device)
        if given is not None:
            above = _usable(given)
        ratio = _ratio(_ratio(largest, table[-1]), above)
        scale = _nearest(ratio, e4m3).clamp(min=2.0**-9) * above
    else:
        scale = _ratio(largest, table[-1]) if given is None else given
    scale = _usable(_stored(scale, form))
    return _nearest(_ratio(groups, scale), table) * scale, table[0] * scale, table[-1] * scale


def _stored(scale: Tensor, form: QuantFormat) -> Tensor:
    """Return float64 ``scale`` as rounded by the dtype that it is stored in."""
    return scale.to(torch.float16 if form.scale_dtype == "float16" else torch.float32).double()


def _ratio(x: Tensor, by: Tensor | float) -> Tensor:
    """Return x / ``by`` of float32 values, rounded to float32 once. A number becomes a tensor:
    CUDA would multiply by its reciprocal."""
    divisor = torch.as_tensor(by, dtype=torch.float32, device=x.device)
    return (x.float() / divisor.expand_as(x)).double()


def _table(element: str) -> Tensor:
    """Return all values of a floating-point format in order, float64."""
    if element == "e4m3":
        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
        return every[every.isfinite()].unique()
    assert element == "e2m1"
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    return torch.cat([-positive, positive]).unique()


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return for each ``x`` the nearest value of the ordered ``table``; ties to even indices."""
    above = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    origin = int(torch.searchsorted(table, torch.zeros_like(table[:1])))
    up = (high - x < x - low) | ((high - x == x - low) & ((above - origin) % 2 == 0))
    return torch.where(up, high, low)


def _usable(scale: Tensor) -> Tensor:
    """Return ``scale`` with 1 in place of 0, to divide by."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
