"""``torch.ops.qbench.attention`` and its gradient: what torch.compile and autograd see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from qbench.attention.kernels import launch
from qbench.attention.kernels.settings import Parameters, Settings

PLAIN = (Tensor, torch.nn.Parameter)
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
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, lse = launch.empty_output(query, value, covered=True)
    return output, lse, query.new_empty(1, dtype=torch.int32)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(normalizer, scale, softcap, causal, window, max_seqlen_q, max_seqlen_k)
    parameters = Parameters(sinks, bias, slopes, s)
    return launch.backward(
        gradient, query, key, value, output, lse, imprecise, mask, spans, parameters, settings,
        learning,
    )  # fmt: skip


@attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    def like(tensor: Tensor) -> Tensor:
        batch, heads, length, width = tensor.shape
        return tensor.new_empty((batch, length, heads, width)).transpose(1, 2)

    learned = query.new_empty(query.shape[1] if rest[-1] else 0, dtype=torch.float32)
    return like(query), like(key), like(value), learned


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mask, spans, *parameters = inputs[:9]
    ctx.settings = inputs[9:]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(query, key, value, *output, mask, spans, *parameters)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    learned = ctx.needs_input_grad[5:9]
    *gradients, of_parameter = attention_backward(
        gradient, *ctx.saved_tensors, *ctx.settings, any(learned)
    )
    parameters = [of_parameter if wanted else None for wanted in learned]
    return *gradients, None, None, *parameters, *[None] * len(ctx.settings)


attention.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes longer than the launches do."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, mask, spans, *parameters = inputs[:9]
        settings = Settings(*inputs[9:])
        output, lse, imprecise = launch.forward(
            query, key, value, mask, spans, Parameters(*parameters), settings
        )
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, output, lse, imprecise, mask, spans, *parameters)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        *tensors, sinks, bias, slopes, s = ctx.saved_tensors
        learned = ctx.needs_input_grad[5:9]
        *gradients, of_parameter = launch.backward(
            gradient, *tensors, Parameters(sinks, bias, slopes, s), ctx.settings, any(learned)
        )
        parameters = [of_parameter if wanted else None for wanted in learned]
        return *gradients, None, None, *parameters, *[None] * len(ctx.settings)


def apply(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spans: Tensor | None,
    parameters: Parameters, settings: Settings,
) -> Tensor:  # fmt: skip
    """Attention by the operator where something looks into it, such as torch.compile, a mode of
    dispatch or a tensor of another class; directly elsewhere."""
    plain = not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None
    if plain and type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN:
        return _Eager.apply(query, key, value, mask, spans, *parameters, *settings)
    return attention(query, key, value, mask, spans, *parameters, *settings)[0]
