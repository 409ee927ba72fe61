"""Measure a quantized KV cache by what attention reads and returns while a probe text runs.

Levels, errors and clipping are computed here from keys and values in float64, not by the code that
rounded them. What attention returns is compared with a slow reference: query by query, over a cache
that holds what the settings say it holds at that query's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention import reference
from qbench.attention.masks import Mask
from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.quantized_kv import KVTrace, rotate
from qbench.attention.transformers import parameters_of
from qbench.quantizers.audit.activations import expected
from qbench.quantizers.audit.weights import levels
from qbench.quantizers.config import ActivationEvidence, QuantizationConfig
from qbench.quantizers.fake_quant import KVFakeQuant, attention_modules
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.methods.kv_formats import context_length
from qbench.quantizers.quantize import evidence_of
from qbench.records import KVAudit, KVModuleAudit

CLIPPED = 1e-3  # share of values outside their group's levels, which come from the values
E4M3 = {"relative": 2.0**-4, "least": 2.0**-10}  # half a step: of a number, and below 2^-6
FULL_BITS = 16
QUERIES = 8  # compared with the slow reference
ROUNDED = {torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative, of an attention's output


@torch.no_grad()
def measure_kv(
    quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[KVAudit | None, list[str]]:
    """Measure what ``quantized`` reads of its KV cache on token ids ``probe`` [B, T]; return that,
    None if no attention has a cache, and what is wrong, one line each."""
    installed = evidence_of(quantized, config, "kv_cache")
    problems = [
        f"{name}: its KV cache is not quantized"
        for name in attention_modules(quantized)
        if name not in installed
    ]
    names = {quantized.get_submodule(name): name for name in installed}
    traces: dict[str, Any] = {}
    returned: dict[str, str] = {}
    caches = set(installed.values())
    for cache in caches:
        cache.watch = lambda module, read: traces.update({names[module]: read})

    def compare(module: nn.Module, query: Tensor, output: Tensor, options: dict[str, Any]) -> None:
        if (name := names.get(module)) in traces:
            problem = wrong_output(traces[name], installed[name], query, output, options)
            if problem:
                returned[name] = f"{name}: {problem}"

    try:
        with watched_attention(quantized, compare):
            quantized(input_ids=_long_enough(probe, installed, quantized), use_cache=False)
    finally:
        for cache in caches:
            cache.watch = None
    problems += [
        f"{name}: its attention does not read the quantized cache"
        for name in installed
        if name not in traces
    ]
    modules, bits = [], config.kv_cache.precision.bits
    for name, read in traces.items():
        module, wrong = _module(name, read, installed[name], bits)
        modules.append(module)
        problems += wrong
    problems += returned.values()
    if not modules:
        return None, problems or ["the KV cache should be quantized, but no attention has one"]
    return _summary(modules, traces, installed, quantized), problems


def _long_enough(probe: Tensor, installed: Mapping[str, KVFakeQuant], model: nn.Module) -> Tensor:
    """Return ``probe`` [B, T], repeated until some queries read several quantized tokens."""
    needed = max(
        (e.sink_tokens + e.residual_length + max(16, 2 * e.key_group) for e in installed.values()),
        default=0,
    )
    context = context_length(model.config.to_dict())
    if context is not None:
        needed, probe = min(needed, context), probe[:, :context]
    times = max(1, math.ceil(needed / probe.shape[1]))
    device = next(model.parameters()).device
    return probe.repeat(1, times)[:, :context].to(device)


@contextmanager
def watched_attention(
    model: nn.Module, watch: Callable[[nn.Module, Tensor, Tensor, dict[str, Any]], None]
) -> Iterator[None]:
    """Call ``watch`` after each call of qbench's attention in ``model``: with the attention module,
    its query [B, Hq, T, D] as it is multiplied, the output [B, Hq, T, Dv] and the options, among
    them ``normalizer``, its ``parameters`` and ``mask`` (bool, or None for a causal one)."""
    name = model.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS[name]
    normalizer = NORMALIZERS.get(model.config.qbench_normalizer)

    def call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        query, key = rotate(module, query, key, options)
        result = function(module, query, key, value, mask, **options)
        dense = mask.dense() if isinstance(mask, Mask) else mask
        about = {
            "normalizer": normalizer.name,
            "parameters": parameters_of(normalizer, module, options),
            "mask": dense,
            "scale": options.get("scaling"),
            "softcap": options.get("softcap"),
        }
        watch(module, query, result[0].transpose(1, 2), about)
        return result

    AttentionInterface.register(name, call)
    try:
        yield
    finally:
        AttentionInterface.register(name, function)


def wrong_output(
    read: KVTrace, cache: KVFakeQuant, query: Tensor, output: Tensor, options: dict[str, Any]
) -> str | None:
    """Return what is wrong with ``output`` [B, Hq, T, Dv] of attention over ``cache``; None if it
    is nearer to that over the cache of the settings than halfway to that without quantization.

    Compared in float32 for a few queries of the first sequence, the last of them with the most
    quantized tokens. In 16 bits, rounding hides the difference that 8 bits make.
    """
    tokens, heads = query.shape[2], slice(None)
    key, value = (x[:1].double() for x in (read.pair.key, read.pair.value))
    extremes = None
    if cache.format.strategy == "tensor":  # one scale for all rows and tokens of the pass
        older = slice(cache.sink_tokens, None)
        extremes = [
            torch.stack(torch.aminmax(x[:, :, older])).double()
            for x in (read.pair.key, read.pair.value)
        ]
    quantized, plain, actual = [], [], []
    for step in sorted({tokens - 1 - i * tokens // (2 * QUERIES) for i in range(QUERIES)}):
        seen = slice(0, step + 1)
        keys, values = expected_cache(key[:, :, seen], value[:, :, seen], cache, extremes)
        settings = dict(options)
        mask = settings.pop("mask")
        if mask is not None:
            settings["mask"] = mask[:1, heads, step : step + 1, seen]
        row = query[:1, :, step : step + 1].float()
        for outputs, k, v in (
            (quantized, keys, values),
            (plain, key[:, :, seen], value[:, :, seen]),
        ):
            outputs.append(reference.attention(row, k.float(), v.float(), **settings))
        actual.append(output[:1, :, step : step + 1].float())
    expected = torch.cat(quantized, 2)
    size = float(expected.norm())
    if not size:
        return None
    distance, effect = (float((torch.cat(x, 2) - expected).norm()) / size for x in (actual, plain))
    if distance <= max(effect / 2, ROUNDED.get(query.dtype, 1e-4)):
        return None
    return (
        f"what attention returns is {distance:.2g} off attention over the cache that the settings "
        f"state; without any quantization it would be {effect:.2g} off"
    )


def expected_cache(
    key: Tensor, value: Tensor, cache: KVFakeQuant, extremes: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return float64 ``key`` and ``value`` [1, H, T, D] as ``cache`` should hold them when its
    newest token is the query's own. ``extremes``: of all keys, and of all values, that share one
    scale, the smallest and the largest, [2]."""
    form, first = cache.format, cache.sink_tokens
    older = max(0, key.shape[2] - cache.residual_length - first)
    results = []
    for i, (x, count) in enumerate(((key, cache.key_group), (value, 1))):
        full = slice(first, first + older // count * count)
        part, result = x[:, :, full], x.clone()
        groups = groups_of_tokens(part, form, count)
        if groups.numel():
            beside = groups[:, :0] if extremes is None else extremes[i][None]
            together = torch.cat([groups, beside], 1)
            rounded, _, _ = expected(together, ActivationEvidence(format=form))
            rounded = rounded[:, : groups.shape[1]]
            if count > 1:  # [1, H, groups, D, count] as they were grouped
                shape = (*part.shape[:2], part.shape[2] // count, part.shape[3], count)
                rounded = rounded.reshape(shape).transpose(3, 4)
            result[:, :, full] = rounded.reshape(part.shape)
        results.append(result)
    return results[0], results[1]


def groups_of_tokens(x: Tensor, form: QuantFormat, count: int) -> Tensor:
    """Return [groups, values that share a scale] of ``x`` [B, H, T, D], of which ``count`` tokens
    share the scales of their channels."""
    if form.strategy == "tensor":
        return x.reshape(1, -1)
    if count > 1:
        return x.unflatten(2, (-1, count)).transpose(3, 4).reshape(-1, count)
    size = form.group_size
    return x.reshape(-1, x.shape[3] if size == WHOLE_ROW else size)


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
        numbers = measured[what] = _measure(before, after, cache.format, rounding)
        values, scales = values + before.numel(), scales + len(before)
        if not math.isfinite(numbers["error"]):
            problems.append(f"{name}: {what} are not finite")
        elif numbers["error"] == 0:
            problems.append(f"{name}: {what} are read unchanged: nothing was quantized")
        if numbers["clipped"] > CLIPPED:
            problems.append(
                f"{name}: {numbers['clipped']:.1%} of the {what} lie farther from their values "
                "than half a step"
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
    """Return the tokens of ``x`` [B, H, T, D] that some query reads quantized, ``count`` of them
    at once, as float64 [groups, values that share a scale]."""
    quantized = max(0, length - cache.sink_tokens) // count * count
    tokens = x[:, :, cache.sink_tokens : cache.sink_tokens + quantized].double()
    return groups_of_tokens(tokens, cache.format, count)


def _measure(x: Tensor, y: Tensor, form: QuantFormat, rounding: float) -> dict[str, Any]:
    """Compare ``y`` with ``x``, both [groups, values]: return levels of a group, ‖y − x‖ / ‖x‖,
    and the share of values farther from theirs than half a step, and what rounding the scale and
    the result (by ``rounding``, relative) may add."""
    off = (y - x).abs()
    largest = x.abs().amax(1, keepdim=True)
    if form.type == "float":
        step = largest / 448
        half = torch.maximum(x.abs() * E4M3["relative"], step * E4M3["least"])
    elif form.symmetric:
        half = largest / (2.0**form.num_bits - 1)
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
    traces: Mapping[str, Any],
    installed: Mapping[str, KVFakeQuant],
    model: nn.Module,
) -> KVAudit:
    """Return the measurements over all ``modules``, with the memory of a sequence as long as the
    context."""
    any_read = next(iter(traces.values()))
    tokens = context_length(model.config.to_dict()) or any_read.pair.key.shape[2]
    stored = values = 0.0
    error, size = [0.0, 0.0], [0.0, 0.0]
    for module in modules:
        read, evidence = traces[module.name], installed[module.name]
        for i, (x, group, relative) in enumerate(
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
            error[i] += norm * relative**2
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
