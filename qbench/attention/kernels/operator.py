"""``torch.ops.qbench.attention`` and its gradient: what torch.compile and autograd see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qbench.attention.kernels import launch, recall
from qbench.attention.kernels.plans import PLAIN, Plan, unseen
from qbench.attention.kernels.settings import Parameters, Settings

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("qbench::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spans: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    s: Tensor | None,
    normalizer: str,
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(normalizer, scale, softcap, causal, window, max_seqlen_q, max_seqlen_k)
    parameters = Parameters(sinks, bias, slopes, s)
    return launch.forward(query, key, value, mask, spans, parameters, settings)


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, spans: Any, sinks: Any, bias: Any,
    slopes: Any, s: Any, normalizer: str, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    output, lse = launch.empty_output(query, value, covered=True)
    return output, lse, launch.empty_flags(query, key, normalizer)


@torch.library.custom_op("qbench::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    imprecise: Tensor,
    mask: Tensor | None,
    spans: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    s: Tensor | None,
    normalizer: str,
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    learning: bool,
    sloping: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(normalizer, scale, softcap, causal, window, max_seqlen_q, max_seqlen_k)
    parameters = Parameters(sinks, bias, slopes, s)
    *gradients, learned, of_slopes = launch.backward(
        gradient, query, key, value, output, lse, imprecise, mask, spans, parameters, settings,
        learning, sloping,
    )  # fmt: skip
    # An operator returns tensors: empty ones stand for what was not asked for.
    asked_for = (lse.new_empty(0) if one is None else one for one in (learned, of_slopes))
    return *gradients, *asked_for


@attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    def like(tensor: Tensor) -> Tensor:
        batch, heads, length, width = tensor.shape
        return tensor.new_empty((batch, length, heads, width)).transpose(1, 2)

    learned = (query.new_empty(query.shape[1] * asked, dtype=torch.float32) for asked in rest[-2:])
    return like(query), like(key), like(value), *learned


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mask, spans, *parameters = inputs[:9]
    ctx.settings = inputs[9:]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(query, key, value, *output, mask, spans, *parameters)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    *gradients, of_parameter, of_slopes = attention_backward(
        gradient, *ctx.saved_tensors, *ctx.settings, *_learned(ctx)
    )
    parameters = _of_parameters(ctx, of_parameter, of_slopes)
    return *gradients, None, None, *parameters, *[None] * len(ctx.settings)


def _learned(ctx: Any) -> tuple[bool, bool]:
    """Whether bias, sinks or s needs its gradient, and whether the slopes do."""
    sinks, bias, slopes, s = ctx.needs_input_grad[5:9]
    return sinks or bias or s, slopes


def _of_parameters(ctx: Any, learned: Tensor | None, slopes: Tensor | None) -> list[Tensor | None]:
    gradients = Parameters(sinks=learned, bias=learned, slopes=slopes, s=learned)
    asked = zip(gradients, ctx.needs_input_grad[5:9], strict=True)
    return [gradient if wanted else None for gradient, wanted in asked]


attention.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes longer than the launches do."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, mask, spans, *parameters, settings, plan = inputs
        given = (query, key, value, *parameters)
        if plan is not None and plan.forward is not None:
            output, lse, imprecise = plan.forward(given)
        else:
            parameters_given = Parameters(*parameters)
            output, lse, imprecise = launch.forward(
                query, key, value, mask, spans, parameters_given, settings
            )
            if plan is not None:
                plan.forward = recall.recalled(recall.about("forward", given, settings))
        ctx.settings, ctx.plan = settings, plan
        ctx.save_for_backward(query, key, value, output, lse, imprecise, mask, spans, *parameters)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        *tensors, mask, spans, sinks, bias, slopes, s = ctx.saved_tensors
        parameters, learned = Parameters(sinks, bias, slopes, s), _learned(ctx)
        plan = None if any(learned) else ctx.plan
        if plan is not None:
            given = (gradient, *tensors, *parameters)
            which = launch.enough()
            call = plan.backward.get((which, recall.layout(gradient)))
            if call is not None:
                return (*call(given), *[None] * 8)
        *gradients, of_parameter, of_slopes = launch.backward(
            gradient, *tensors, mask, spans, parameters, ctx.settings, *learned
        )
        if plan is not None:
            kept = recall.recalled(recall.about(which, given, ctx.settings))
            if kept is not None:
                plan.backward[which, recall.layout(gradient)] = kept
        parameters = _of_parameters(ctx, of_parameter, of_slopes)
        return *gradients, None, None, *parameters, None, None


def apply(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spans: Tensor | None,
    parameters: Parameters, settings: Settings,
) -> Tensor:  # fmt: skip
    """Attention by the operator where something looks into it, such as torch.compile, a mode of
    dispatch or a tensor of another class; directly elsewhere."""
    if unseen() and type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN:
        return _Eager.apply(query, key, value, mask, spans, *parameters, settings, None)
    return attention(query, key, value, mask, spans, *parameters, *settings)[0]


def again(
    query: Tensor, key: Tensor, value: Tensor, parameters: Mapping[str, Tensor], plan: Plan
) -> Tensor:
    """Attention as it was planned for tensors laid out like these."""
    given = [parameters.get(name) for name in Parameters._fields]
    return _Eager.apply(query, key, value, None, None, *given, plan.settings, plan)
