"""Measure a quantized KV cache by what attention reads and returns while a probe text runs: keys
and values are compared with the definition of the format (``activations.expected``), which shares
no code with what rounds them, and outputs with the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qbench.attention import reference
from qbench.attention.observed import Call, attention_observed
from qbench.attention.quantized_kv import KVTrace
from qbench.quantizers.audit.activations import Rounding
from qbench.quantizers.config import ActivationEvidence, QuantizationConfig
from qbench.quantizers.fake_quant import KVFakeQuant, attention_modules
from qbench.quantizers.methods.kv_formats import context_length
from qbench.quantizers.quantize import evidence_of
from qbench.records import KVAudit, KVModuleAudit

FULL_BITS = 16
QUERIES = 8  # whose outputs are compared with the reference
TOKENS = 16  # at least so many are read quantized
ROUNDED = {torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative, of an attention's output


@torch.no_grad()
def measure_kv(
    quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[KVAudit | None, list[str]]:
    """Measure the keys and values that ``quantized`` reads from its KV cache on token ids ``probe``
    [B, T]; return the audit (None if no attention read a quantized cache), and a line per problem.
    """
    installed = evidence_of(quantized, config, "kv_cache")
    problems = [
        f"{name}: its KV cache is not quantized"
        for name in attention_modules(quantized)
        if name not in installed
    ]
    names = {quantized.get_submodule(name): name for name in installed}
    traces: dict[str, KVTrace] = {}
    returned: dict[str, str] = {}

    def observe(module: nn.Module, call: Call) -> None:
        if module in names and call.trace is not None:
            traces[names[module]] = call.trace
            if problem := wrong_output(call):
                returned[names[module]] = f"{names[module]}: {problem}"

    # The probe, repeated until some tokens are read quantized, and no longer than the context
    needed = max((cache.sink_tokens for cache in installed.values()), default=0) + TOKENS
    context = context_length(quantized.config.to_dict())
    ids = probe.repeat(1, math.ceil(needed / probe.shape[1]))[:, :context]
    with attention_observed(quantized, observe):
        quantized(input_ids=ids.to(next(quantized.parameters()).device), use_cache=False)
    problems += [
        f"{name}: its attention does not read the quantized cache"
        for name in installed
        if name not in traces
    ]
    modules, bits = [], config.precision.kv_cache.bits
    for name, read in traces.items():
        module, wrong = _module(name, read, installed[name], bits)
        modules.append(module)
        problems += wrong
    problems += returned.values()
    if not modules:
        return None, problems or ["the KV cache should be quantized, but no attention has one"]
    # Over all modules, with the memory of a sequence as long as the context
    tokens = context or next(iter(traces.values())).key.shape[2]
    stored = values = 0.0
    error, size = [0.0, 0.0], [0.0, 0.0]
    for module in modules:
        trace, sinks = traces[module.name], installed[module.name].sink_tokens
        older = max(0, tokens - sinks)
        for i, (x, relative) in enumerate(
            ((trace.key, module.key_error), (trace.value, module.value_error))
        ):
            width = x.shape[1] * x.shape[3]
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
    ), problems


def wrong_output(call: Call) -> str | None:
    """Return why attention's output is wrong; None if for the last queries of the first sequence it
    is nearer to attention over the quantized keys and values than halfway to attention over
    unquantized ones, or within rounding of it. Computed in float32."""
    last, trace = slice(-QUERIES, None), call.trace
    mask = None if call.mask is None else call.mask[:1, :, last]

    def attend(key: Tensor, value: Tensor) -> Tensor:
        parts = (x[:1].float() for x in (call.query[:, :, last], key, value))
        return reference.attention(
            *parts, normalizer=call.normalizer, parameters=call.parameters, scale=call.scale,
            softcap=call.softcap, mask=mask, causal=mask is None,
        )  # fmt: skip

    expected = attend(trace.quantized_key, trace.quantized_value)
    plain, actual = attend(trace.key, trace.value), call.output[:1, last].transpose(1, 2).float()
    size = float(expected.norm())
    if not size:
        return None
    distance, effect = (float((x - expected).norm()) / size for x in (actual, plain))
    if distance <= max(effect / 2, ROUNDED.get(call.query.dtype, 1e-4)):
        return None
    return (
        f"attention's output differs by {distance:.2g} from attention over the quantized cache; "
        f"without any quantization it would differ by {effect:.2g}"
    )


def _module(
    name: str, read: KVTrace, cache: KVFakeQuant, bits: float
) -> tuple[KVModuleAudit, list[str]]:
    """Return the measurements of the module ``name``, and a line per problem."""
    sinks = read.positions[0] < cache.sink_tokens  # the probe has no padding: all rows are alike
    problems = []
    if cache.format.num_bits != bits:
        problems.append(
            f"{name}: its KV cache has {cache.format.num_bits} bits, the settings say {bits:g}"
        )
    measured = []
    values = scales = 0
    for noun, x, y in (
        ("its keys", read.key, read.quantized_key),
        ("its values", read.value, read.quantized_value),
    ):
        rounding = Rounding(ActivationEvidence(format=cache.format), noun)
        measured.append(rounding)
        if not torch.equal(x[:, :, sinks], y[:, :, sinks]):
            rounding.problems.append(f"{noun} of the first {cache.sink_tokens} tokens are changed")
        before, after = (part[:, :, ~sinks] for part in (x, y))
        rounding.add(before, after)
        if not rounding.error:
            rounding.problems.append(f"{noun} are read unchanged: nothing was quantized")
        values += before.numel()
        groups = before.shape[3] // cache.format.group_size if cache.format.group_size > 0 else 1
        per_tensor = cache.format.strategy == "tensor"
        scales += 1 if per_tensor else before[..., 0].numel() * groups
    most = max(rounding.levels for rounding in measured)
    if most > 2**bits:
        problems.append(f"{name}: {most} levels share a scale, {bits:g} bits have {2**bits:g}")
    problems += [f"{name}: {line}" for rounding in measured for line in rounding.problems]
    return KVModuleAudit(
        name=name,
        levels=most,
        key_error=measured[0].error,
        value_error=measured[1].error,
        clipped=max(rounding.clipped / max(1, rounding.count) for rounding in measured),
        bits_per_value=bits + scales * 16 / values,
    ), problems
