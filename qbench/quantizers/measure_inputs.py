"""What products with weight matrices take in, measured where they take it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers import formats
from qbench.quantizers.activations.inputs import weights_alone
from qbench.quantizers.audit.weights import levels
from qbench.quantizers.config import ActivationEvidence, QuantizationConfig, matching
from qbench.quantizers.matrices import Matrix
from qbench.quantizers.quantize import evidence_of
from qbench.records import ActivationAudit, InputAudit

DIFFERENT = 0.01  # share of values that may differ by a step: ties, and scales rounded otherwise
INSIDE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a product, relative


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Of one module over all its calls."""

    levels: int = 0
    clipped: float = 0.0
    count: int = 0
    error_squared: float = 0.0
    norm_squared: float = 0.0
    problems: list[str] = field(default_factory=list)


@torch.no_grad()
def measure_inputs(
    wanted: Mapping[str, Matrix], quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[ActivationAudit | None, list[str]]:
    """The inputs of every module that multiplies by a matrix of ``wanted``, on ``probe`` [B, T],
    and what is wrong with them. None where activations are not quantized, or by a library whose
    own they are."""
    part = config.precision.activations
    about = evidence_of(quantized, config).activations
    if part is None:
        return None, [f"{name}: its input is quantized, unasked" for name in list(about)[:3]]
    if not about and config.activations is None:
        return None, []
    spared = matching(wanted, config.activations.ignore if config.activations else ())
    problems = _uncovered([m for n, m in wanted.items() if n not in about and n not in spared])
    problems += [f"{n}: its input is quantized, unasked" for n in about if n in spared]
    sums = _watch(quantized, about, config, probe)
    measured = {name: one for name, one in sums.items() if one.count}
    if about and not measured:
        problems.append("no module whose input is quantized ran on the probe text")
    for name, one in measured.items():
        problems += [f"{name}: {line}" for line in dict.fromkeys(one.problems)]
        if one.levels > 2**part.bits:
            problems.append(
                f"{name}: {one.levels} levels under one scale of its input, {part.bits:g} bits "
                f"have {2**part.bits:g}"
            )
    modules = tuple(
        InputAudit(
            name=name, levels=one.levels, clipped=one.clipped / one.count, error=_error([one])
        )
        for name, one in measured.items()
    )
    return ActivationAudit(
        bits=part.bits,
        levels=max((one.levels for one in measured.values()), default=0),
        clipped=sum(s.clipped for s in measured.values())
        / max(1, sum(s.count for s in measured.values())),
        error=_error(measured.values()),
        left_out=tuple(sorted(spared)),
        unmeasured=tuple(name for name in about if name not in measured),
        modules=modules,
    ), problems


def _watch(
    model: nn.Module,
    about: Mapping[str, ActivationEvidence],
    config: QuantizationConfig,
    probe: Tensor,
) -> dict[str, _Sums]:
    sums = {name: _Sums() for name in about}
    with ExitStack() as stack:
        for name, evidence in about.items():
            module = model.get_submodule(name)
            watch = _Watch(sums[name], evidence, model, config)
            first = module.register_forward_pre_hook(watch.before, prepend=True)
            last = module.register_forward_pre_hook(watch.after)
            end = module.register_forward_hook(watch.output)
            for handle in (first, last, end):
                stack.callback(handle.remove)
        device = next(model.parameters()).device
        model(input_ids=probe.to(device), use_cache=False)
    return sums


class _Watch:
    """One module's hooks: the first sees what it is called with, the last what it multiplies."""

    def __init__(
        self, sums: _Sums, about: ActivationEvidence, model: nn.Module, config: QuantizationConfig
    ) -> None:
        self.sums, self.about, self.model, self.config = sums, about, model, config
        self.called: tuple[Any, ...] = ()
        self.input: Tensor | None = None

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.called = arguments

    def after(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """The input before quantization is what the same hooks make of it with that one off."""
        others = [
            hook
            for hook in module._forward_pre_hooks.values()
            if getattr(hook, "__self__", None) is not self
        ]
        whole = self.called
        with weights_alone(self.model):
            for hook in others:
                result = hook(module, whole)
                if result is not None:
                    whole = result if isinstance(result, tuple) else (result,)
        self.input = whole[0].detach()
        if not self.about.inside:
            self._compare(self.input, arguments[0].detach())

    def output(self, module: nn.Module, _: tuple[Any, ...], output: Tensor) -> None:
        if self.about.inside and self.input is not None:
            self._compare_inside(module, self.input, output)
        self.called, self.input = (), None

    def _compare(self, before: Tensor, after: Tensor) -> None:
        """``after`` against what ``before`` should have become."""
        wide = formats.groups_of(before.double(), self.about)
        found = formats.groups_of(after, self.about)
        self.sums.levels = max(self.sums.levels, levels(found))
        found = found.double()
        wanted = self._add(wide, found)
        rounding = 4 * torch.finfo(after.dtype).eps * wanted.abs()
        off = (found - wanted).abs() > rounding
        if not found.isfinite().all():
            self.sums.problems.append("its quantized input is not finite")
        elif float(off.double().mean()) > DIFFERENT:
            worst = float((found - wanted).norm() / wanted.norm())
            self.sums.problems.append(
                f"{float(off.double().mean()):.1%} of its input's values are not what "
                f"{self.about.grid.kind} of {self.about.grid.bits:g} bits makes of them "
                f"(relative difference {worst:.2g})"
            )

    def _add(self, wide: Tensor, found: Tensor | None = None) -> Tensor:
        """Count clipped values and the error; gives what ``wide`` should become."""
        wanted, low, high = formats.expected(wide, self.about)
        beyond = (wide > high * (1 + 1e-6)) | (wide < low * (1 + 1e-6))
        found = wanted if found is None else found
        self.sums.clipped += float(beyond.sum())
        self.sums.count += wide.numel()
        self.sums.error_squared += float((found - wide).square().sum())
        self.sums.norm_squared += float(wide.square().sum())
        return wanted

    def _compare_inside(self, module: nn.Module, before: Tensor, output: Tensor) -> None:
        """The module's output against the product of what its input should become and the weight
        that it stores."""
        wide = formats.groups_of(before.double(), self.about)
        wanted = self._add(wide).reshape(before.shape)
        self.sums.levels = max(self.sums.levels, levels(formats.groups_of(wanted, self.about)))
        name = next(n for n, one in self.model.named_modules() if one is module)
        weight = evidence_of(self.model, self.config).weights[name].dequantize().double()
        bias = 0.0 if module.bias is None else module.bias.double()  # type: ignore[union-attr]
        product = wanted @ weight.T + bias
        whole = before.double() @ weight.T + bias
        found = output.double()
        off, apart = (float((t - product).norm() / product.norm()) for t in (found, whole))
        if not off <= INSIDE[output.dtype]:
            self.sums.problems.append(
                f"its product is {off:.2g} off that of its quantized input (the unquantized "
                f"input's is {apart:.2g} off)"
            )


def _uncovered(missing: Iterable[Matrix]) -> list[str]:
    """Linear layers whose inputs nothing quantizes; and, of other matrices, those that weigh."""
    return [
        f"{matrix.name}: its input is not quantized; say ignore beside the activations to allow it"
        for matrix in missing
    ]


def _error(sums: Iterable[_Sums]) -> float:
    found = list(sums)
    squared = sum(one.error_squared for one in found)
    norm = sum(one.norm_squared for one in found)
    if not math.isfinite(squared) or not math.isfinite(norm):
        return math.inf
    return math.sqrt(squared / norm) if norm else 0.0
