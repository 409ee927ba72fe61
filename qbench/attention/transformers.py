"""Our attention inside transformers' models, through AttentionInterface and AttentionMaskInterface.

``qbench-<normalizer>-<implementation>`` are the names that ``attn_implementation=`` takes, e.g.
``qbench-softpick-reference``. Importing this module makes those of all normalizers known to
transformers; :func:`attention_name` those of normalizers that were registered later. What a model
under these names understands:

- no mask: causal, the last query aligned with the last key (also chunked prefill and decode);
- ``attention_mask`` [B, T] of 0/1: padding on either side, or holes, also with a KV cache;
- packed ``position_ids`` [B, T] (0 1 2 0 1 …) without mask and cache: no sequence sees another;
- ``cu_seq_lens_q``, ``cu_seq_lens_k`` (int32 [S + 1]), ``max_length_q``, ``max_length_k``, batch
  1, no mask and no cache: the same, and the cheapest way for many sequences; pass
  ``position_ids`` too, since the rotary embedding needs them;
- a custom bool mask [B or 1, Hq or 1, Tq, Tk], True = attend, used as it is (no causality added).

Additive masks are refused: their finite minimum would count in softpick's denominator. The
normalizer's parameters are taken from the attention module, or from what transformers hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from qbench.attention import choose, kernels, reference
from qbench.attention.kernels.varlen import packed_bounds
from qbench.attention.masks import Mask, mask_interface
from qbench.attention.normalizers import NORMALIZERS, SLOPES, Normalizer
from qbench.attention.quantized_kv import KV_CACHE, READ, read
from qbench.errors import UnavailableError

# What transformers hands to attention functions that changes the weights: refused, unless it is
# a parameter of the normalizer.
CHANGING = ("position_bias", "s_aux", "cache")
KEEP_OWN = "; set evaluation.attention: native to keep the model's own"


def attention_name(normalizer: str, implementation: str, device: str | torch.device) -> str:
    """Return the name to pass as ``attn_implementation=``, and register it with transformers.

    ``implementation``: ``reference``, ``triton``, or ``auto``, which is triton on CUDA for an
    attention function with kernels, and the reference elsewhere. Raises RecipeError for an unknown
    name, UnavailableError if triton cannot run or lacks the kernels.
    """
    return _registered(normalizer, choose(normalizer, implementation, str(device)))


def set_attention(model: PreTrainedModel, *, normalizer: str, implementation: str = "auto") -> str:
    """Set the attention of ``model`` and return what runs, such as ``softpick/triton``. Its
    configuration, which is saved with it, names the normalizer from then on.

    Raises as :func:`attention_name`, and UnavailableError if the model's class does not use
    transformers' attention interface.
    """
    device = next(model.parameters()).device
    name = attention_name(normalizer, implementation, device)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UnavailableError(
            f"{type(model).__name__} does not use transformers' AttentionInterface, so qbench "
            f"cannot set its attention{KEEP_OWN}"
        )
    model.config.qbench_normalizer = normalizer
    return "/".join(name.removeprefix("qbench-").rsplit("-", 1))


@contextmanager
def batch_invariant(model: PreTrainedModel) -> Iterator[None]:
    """Make every row of ``model``'s attention the same bits within the body, whatever the other
    rows hold. A kernel's tile computes several rows, and what it skips or rescales depends on all
    of them. So a model on our kernels runs the reference here, which multiplies row by row."""
    name = model.config._attn_implementation or ""
    if not (name.startswith("qbench-") and name.endswith("-triton")):
        yield
        return
    normalizer = name.removeprefix("qbench-").removesuffix("-triton")
    model.set_attn_implementation(attention_name(normalizer, "reference", model.device))
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def _attention(normalizer: str, implementation: str) -> Callable[..., tuple[Tensor, None]]:
    """Return the function that transformers calls in each layer."""
    chosen = NORMALIZERS[normalizer]

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Mask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        parameters = parameters_of(chosen, module, options)
        if dropout:
            raise UnavailableError(
                f"{normalizer} attention has no dropout; set the model's attention_dropout to 0"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if isinstance(attention_mask, Mask) and attention_mask.cache_length is not None:
            key, value = (each[:, :, : attention_mask.cache_length] for each in (key, value))
        elif (
            isinstance(attention_mask, Tensor)  # a user's, or one made under torch.compile
            and SLOPES.name in parameters
            and query.shape[2] != key.shape[2]
        ):  # a static cache has memory for more keys: is the last one the last query's?
            why = "takes no 4-D mask of fewer queries than keys; pass attention_mask [B, T]"
            if torch.compiler.is_compiling():
                why = "cannot be compiled with a static cache, nor with padding and a cache; do "
                why += "not compile the model, or leave the cache out"
            raise UnavailableError(f"{normalizer} attention with ALiBi's slopes {why}")
        triton = implementation == "triton"
        function = (kernels if triton else reference).attention
        if READ not in options and (cached := getattr(module, KV_CACHE, None)) is not None:
            key, value = read(
                cached, module, key, value, queries=query.shape[2], mask=attention_mask,
                position_ids=options.get("position_ids"), cu_seqlens_k=cu_seq_lens_k,
            )  # fmt: skip
        shared = {"normalizer": normalizer, "parameters": parameters, "scale": scaling}
        shared["softcap"] = softcap
        settings: dict[str, Any] = {"causal": causal}
        if cu_seq_lens_q is not None:
            assert cu_seq_lens_k is not None, "transformers hands over both"
            settings["seq_bounds"] = packed_bounds(cu_seq_lens_q, cu_seq_lens_k)
            settings["window"] = sliding_window  # elsewhere the mask has it
            if triton:
                settings |= {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
        elif isinstance(attention_mask, Mask) and attention_mask.no_dense_mask:
            settings |= attention_mask.settings(query.shape[2])
        elif attention_mask is not None:
            mask = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
            if mask.dtype != torch.bool:
                raise UnavailableError(
                    f"{normalizer} attention takes bool masks, True = attend, not "
                    f"{mask.dtype}; of an additive mask pass mask > -1"
                )
            settings = {"mask": mask, "causal": False}
        output = function(query, key, value, **shared, **settings)
        return output.transpose(1, 2).contiguous(), None  # as torch's; some classes view it

    return forward


def parameters_of(
    chosen: Normalizer, module: torch.nn.Module, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the parameters of the normalizer ``chosen`` by name, from ``options`` or else from
    ``module``; those in neither are left out. Raises UnavailableError for an option that changes
    the weights and is none of them."""
    values = {}
    for parameter in chosen.parameters:
        tensor = options.get(parameter.keyword) if parameter.keyword else None
        tensor = getattr(module, parameter.attribute, None) if tensor is None else tensor
        if tensor is not None:
            values[parameter.name] = tensor
    keywords = {parameter.keyword for parameter in chosen.parameters}
    for name in CHANGING:
        if name not in keywords and options.get(name) is not None:
            raise UnavailableError(
                f"{chosen.name} attention has no place for {name}, which this model passes to it"
                + KEEP_OWN
            )
    return values


@cache
def _registered(normalizer: str, implementation: str) -> str:
    name = f"qbench-{normalizer}-{implementation}"
    AttentionInterface.register(name, _attention(normalizer, implementation))
    AttentionMaskInterface.register(name, mask_interface(implementation))
    return name


for _normalizer in NORMALIZERS:
    for _implementation in ("reference", "triton"):
        _registered(_normalizer, _implementation)
