"""The KV cache, measured on what attention reads while a probe runs.

What is quantized is told from the positions that attention works with, and compared with what the
settings say; levels, errors and clipping are computed here from the keys and values themselves, in
float64, not by the code that rounded them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers.audit.weights import levels
from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.kv_cache import context_length
from qbench.quantizers.kv_fake_quant import KVFakeQuant, attention_modules
from qbench.quantizers.quantize import evidence_of
from qbench.records import KVAudit, KVModuleAudit

CLIPPED = 1e-3  # share of values outside their group's levels, which come from the values
E4M3 = {"relative": 2.0**-4, "least": 2.0**-10}  # half a step: of a number, and below 2^-6
FULL_BITS = 16


@torch.no_grad()
def measure_kv(
    quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[KVAudit | None, list[str]]:
    """What ``quantized`` reads of its cache on ``probe`` (token ids [B, T]), and what is wrong with
    it, a line each. None where no attention has one."""
    found = evidence_of(quantized, config, "kv_cache")
    problems = [
        f"{name}: its KV cache is not quantized"
        for name in attention_modules(quantized)
        if name not in found
    ]
    names = {quantized.get_submodule(name): name for name in found}
    consumed: dict[str, Any] = {}
    caches = set(found.values())
    for cache in caches:
        cache.watch = lambda module, read: consumed.update({names[module]: read})
    quantized(input_ids=_long_enough(probe, found, quantized), use_cache=False)
    for cache in caches:
        cache.watch = None
    problems += [
        f"{name}: its attention does not read the quantized cache"
        for name in found
        if name not in consumed
    ]
    modules, bits = [], config.kv_cache.precision.bits
    for name, read in consumed.items():
        module, wrong = _module(name, read, found[name], bits)
        modules.append(module)
        problems += wrong
    if not modules:
        return None, problems or ["the KV cache should be quantized, but no attention has one"]
    return _summary(modules, consumed, found, quantized), problems


def _long_enough(probe: Tensor, found: Mapping[str, KVFakeQuant], model: nn.Module) -> Tensor:
    """``probe``, repeated where it ends before anything is quantized."""
    needed = max((e.sink_tokens + 2 * e.key_group for e in found.values()), default=0)
    context = context_length(model.config.to_dict())
    if context is not None:
        needed, probe = min(needed, context), probe[:, :context]
    times = max(1, math.ceil(needed / probe.shape[1]))
    device = next(model.parameters()).device
    return probe.repeat(1, times)[:, :context].to(device)


def _module(
    name: str, read: Any, cache: KVFakeQuant, bits: float
) -> tuple[KVModuleAudit, list[str]]:
    positions = read.positions[0].long()  # the probe has no padding: all rows are alike
    pair, first = read.pair, positions < cache.sink_tokens
    rounding = torch.finfo(pair.key.dtype).eps
    unequal, problems, measured = [], [], {}
    if cache.format.num_bits != bits:
        problems.append(
            f"{name}: its KV cache has {cache.format.num_bits} bits, the settings say {bits:g}"
        )
    values = scales = 0
    for what, x, y, count in (
        ("keys", pair.key, pair.quantized_key, cache.key_group),
        ("values", pair.value, pair.quantized_value, 1),
    ):
        if not torch.equal(x[:, :, first], y[:, :, first]):
            unequal.append(f"{name}: {what} of the first {cache.sink_tokens} tokens are changed")
        before, after = (_groups(t, len(positions), cache, count) for t in (x, y))
        one = measured[what] = _measure(before, after, cache.format, rounding)
        values, scales = values + before.numel(), scales + len(before)
        if not math.isfinite(one["error"]):
            problems.append(f"{name}: {what} are not finite")
        elif one["error"] == 0:
            problems.append(f"{name}: {what} are read unchanged: nothing was quantized")
        if one["clipped"] > CLIPPED:
            problems.append(
                f"{name}: {one['clipped']:.1%} of the {what} lie farther from their values than "
                "half a step"
            )
    most = max(m["levels"] for m in measured.values())
    if most > 2**bits:
        unequal.append(f"{name}: {most} levels share a scale, {bits:g} bits have {2**bits:g}")
    stored = 1 if cache.format.symmetric else 2  # a scale, and the lowest value
    beside = scales * stored * torch.finfo(getattr(torch, cache.format.scale_dtype)).bits
    return KVModuleAudit(
        name=name,
        levels=most,
        key_error=measured["keys"]["error"],
        value_error=measured["values"]["error"],
        clipped=max(m["clipped"] for m in measured.values()),
        bits_per_value=bits + beside / values,
    ), [*unequal, *problems]


def _groups(x: Tensor, length: int, cache: KVFakeQuant, count: int) -> Tensor:
    """Of ``x`` [B, H, T, D] the tokens that some query reads quantized, ``count`` of them at once,
    as [groups, values that share a scale]."""
    whole = max(0, length - cache.sink_tokens) // count * count
    tokens = x[:, :, cache.sink_tokens : cache.sink_tokens + whole].double()
    if cache.format.strategy == "tensor":
        return tokens.reshape(1, -1)
    if count > 1:
        return tokens.unflatten(2, (whole // count, count)).transpose(3, 4).reshape(-1, count)
    group = cache.format.group_size
    return tokens.reshape(-1, x.shape[3] if group == WHOLE_ROW else group)


def _measure(x: Tensor, y: Tensor, form: QuantFormat, rounding: float) -> dict[str, Any]:
    """``x`` and ``y`` [groups, values]: levels of a group, ‖y − x‖ / ‖x‖, and the share of values
    farther from theirs than half a step, and what rounding the scale and the result (by
    ``rounding``, relative) may add."""
    off = (y - x).abs()
    largest = x.abs().amax(1, keepdim=True)
    if form.type == "float":
        step = largest / 448
        half = torch.maximum(x.abs() * E4M3["relative"], step * E4M3["least"])
    elif form.symmetric:
        half = largest / (2.0 ** (form.num_bits - 1) - 1) / 2
    else:
        half = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / (2.0**form.num_bits - 1) / 2
    # scales may be rounded to float16, whose least number is 2^-24; results to the model's dtype
    bound = half * 1.001 + largest * (2.0**-10 + rounding / 2) + 2.0 ** (form.num_bits - 24)
    return {
        "levels": levels(y.float()),
        "error": float(off.norm() / x.norm()) if x.norm() else 0.0,
        "clipped": float((off > bound).double().mean()),
    }


def _summary(
    modules: list[KVModuleAudit],
    consumed: Mapping[str, Any],
    found: Mapping[str, KVFakeQuant],
    model: nn.Module,
) -> KVAudit:
    """Over all modules; the memory is that of a sequence as long as the context."""
    any_read = next(iter(consumed.values()))
    tokens = context_length(model.config.to_dict()) or any_read.pair.key.shape[2]
    stored = values = 0.0
    error, size = [0.0, 0.0], [0.0, 0.0]
    for module in modules:
        read, evidence = consumed[module.name], found[module.name]
        for i, (x, group, whole) in enumerate(
            ((read.pair.key, evidence.key_group, module.key_error),
             (read.pair.value, 1, module.value_error))
        ):  # fmt: skip
            width = x.shape[1] * x.shape[3]
            older = (
                max(0, tokens - evidence.sink_tokens - evidence.residual_length) // group * group
            )
            stored += width * (older * module.bits_per_value + (tokens - older) * FULL_BITS)
            values += width * tokens
            norm = float(x.float().square().sum())
            error[i] += norm * whole**2
            size[i] += norm
    return KVAudit(
        levels=max(module.levels for module in modules),
        clipped=max(module.clipped for module in modules),
        key_error=math.sqrt(error[0] / size[0]) if size[0] else 0.0,
        value_error=math.sqrt(error[1] / size[1]) if size[1] else 0.0,
        tokens=tokens,
        bits_per_value=stored / values,
        bytes_per_token=stored / tokens / 8,
        unquantized_bytes_per_token=values / tokens * FULL_BITS / 8,
        modules=tuple(modules),
    )
