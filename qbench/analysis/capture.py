"""Observe attention, hidden states and inputs of linear layers while a model reads.

The model computes what it computes when it is scored: its own attention function runs, and
observers compute the weights again by their definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.masks import Mask
from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.quantized_kv import KV_CACHE, read
from qbench.attention.transformers import parameters_of
from qbench.errors import UnavailableError
from qbench.streaming import decoder_blocks

NAME = "qbench-measured"


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of a layer's attention: query [B, Hq, T, D], key [B, Hkv, T, D], and what turns them
    into weights.

    ``mask``: bool [B or 1, 1, T, T], True = attend, used as it is; None: causal. ``scale``: factor
    of the scores, None: 1/√D. ``softcap`` c: scores x become c · tanh(x / c), see
    ``reference.attention``. ``output``: [B, T, Hq, Dv], before the output projection.
    """

    query: Tensor
    key: Tensor
    normalizer: str
    parameters: Mapping[str, Tensor] | None = None
    scale: float | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    output: Tensor | None = None


Observe = Callable[[int, Call], None]  # layer, and its call


@contextmanager
def attention_observed(model: PreTrainedModel, observe: Observe) -> Iterator[None]:
    """Call ``observe(layer, call)`` in every attention layer during forward passes within the body,
    which have neither padding nor a cache.

    Raises UnavailableError for a model whose attention is not qbench's, since its weights could
    differ from those that are measured.
    """
    running = model.config._attn_implementation
    normalizer = getattr(model.config, "qbench_normalizer", None)
    if normalizer is None or not str(running).startswith(f"qbench-{normalizer}-"):
        raise UnavailableError(
            f"its attention is {running}, whose weights cannot be measured; analyze a model that "
            "attends with one of qbench's normalizers"
        )
    inner = ALL_ATTENTION_FUNCTIONS[running]

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Mask | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        output, rest = inner(module, query, key, value, attention_mask, scaling=scaling, **options)
        mask = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
        cache = getattr(module, KV_CACHE, None)
        call = Call(
            query=query,
            key=key if cache is None else read(cache, module, key, value)[0],
            normalizer=normalizer,
            parameters=parameters_of(NORMALIZERS.get(normalizer), module, options),
            scale=scaling,
            softcap=options.get("softcap"),
            mask=mask,
            output=output,
        )
        observe(module.layer_idx, call)
        return output, rest

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[running])
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(running)


@contextmanager
def states_observed(
    layers: Sequence[nn.Module], observe: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call ``observe(layer, states)`` with the output [B, T, D] of each decoder layer."""

    def after(index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        observe(index, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_hook(partial(after, index)))
        yield


@contextmanager
def inputs_observed(
    modules: Mapping[str, nn.Module], observe: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``observe(name, input)`` with the input of each of ``modules``."""

    def before(name: str, module: nn.Module, inputs: tuple, options: dict[str, Any]) -> None:
        given = (*inputs, *options.values())
        observe(name, next(value for value in given if isinstance(value, torch.Tensor)))

    with ExitStack() as stack:
        for name, module in modules.items():
            hook = partial(before, name)
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers in order. Raises UnavailableError if they cannot be found."""
    count = model.config.get_text_config().num_hidden_layers
    _, blocks = decoder_blocks(model)
    if len(blocks) != count:
        raise UnavailableError(
            f"{type(model).__name__}: its {count} decoder layers cannot be found; analyze a model "
            "that holds them in one list, such as LlamaForCausalLM"
        )
    return blocks
