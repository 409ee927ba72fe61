"""Our attention inside transformers' models, through AttentionInterface and AttentionMaskInterface.

``qbench-<normalizer>-<implementation>`` are the names that ``attn_implementation=`` takes, e.g.
``qbench-softpick-reference``. Importing this module makes those of all normalizers known to
transformers; :func:`attention_name` those of normalizers that were registered later.
docs/attention.md lists the masks, positions and lengths that a model under these names understands.

A mask is made once per forward pass, and none for plain causality, so that the causal kernels run.
Under torch.compile the values of padding masks and positions are not known when this is decided:
for our kernels ``varlen.sequence_bounds`` computes the sequences when the compiled graph runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qbench.attention import choose, kernels, reference
from qbench.attention.kernels.varlen import packed_bounds, padded_bounds, sequence_bounds
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
    name, UnavailableError if triton cannot run or lacks the kernels."""
    return _registered(normalizer, choose(normalizer, implementation, str(device)))


def set_attention(model: PreTrainedModel, *, normalizer: str, implementation: str = "auto") -> str:
    """Set the attention of ``model`` and return what runs, such as ``softpick/triton``. Its
    configuration, which is saved with it, names the normalizer from then on. Raises as
    :func:`attention_name`, and UnavailableError if the model's class does not use transformers'
    attention interface."""
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
def batch_invariant(model: PreTrainedModel) -> Iterator[bool]:
    """Make every row of ``model``'s attention the same bits within the body, whatever the other
    rows hold. A kernel's tile computes several rows, and what it skips or rescales depends on all
    of them. So a model on our kernels runs the reference here, which multiplies row by row. Yield
    whether that changes nothing."""
    name = model.config._attn_implementation or ""
    if not (name.startswith("qbench-") and name.endswith("-triton")):
        yield True
        return
    normalizer = name.removeprefix("qbench-").removesuffix("-triton")
    model.set_attn_implementation(attention_name(normalizer, "reference", model.device))
    try:
        yield False
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
        qbench_bounds: Tensor | None = None,
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
            if (bounds := qbench_bounds) is None:
                bounds = packed_bounds(cu_seq_lens_q, cu_seq_lens_k)
            settings["seq_bounds"] = bounds
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


_positions = SimpleNamespace(counted=False)


def positions_counted() -> AbstractContextManager:
    """Promise, within the body, that a model without position ids reads whole, unpacked sequences.
    Then the graph of torch.compile does not look for packed ones, which waits for the GPU."""
    return patch.object(_positions, "counted", True)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys each query attends to.

    ``dense()`` makes the mask, bool [B, 1, Tq, Tk], which is quadratic in length: only layers that
    need it call it. ``no_dense_mask``: causality, ``seq_bounds`` (of which ``seq_count`` count, see
    :mod:`qbench.attention.kernels.varlen`) and ``window`` (keys up to its own that a query sees)
    say the same, so that kernels need no mask. ``padding`` [B, T]: the model's ``attention_mask``;
    keys begin at ``kv_offset`` of it, since the cache of a sliding window drops earlier ones.
    ``cache_length``: keys that a static cache holds so far; ``cache_slack`` more have memory."""

    dense: Callable[[], Tensor]
    no_dense_mask: bool = False
    seq_bounds: Tensor | None = None
    seq_count: Tensor | None = None
    window: int | None = None
    padding: Tensor | None = None
    kv_offset: int = 0
    cache_length: int | None = None
    cache_slack: int = 0

    def settings(self, queries: int) -> dict[str, Any]:
        """Return the keyword arguments of attention functions that replace the mask: window, bounds
        of sequences and their count; with a count also ``mask``, the padding, which is used if the
        bounds cannot say it. ``queries``: number of query rows."""
        arguments: dict[str, Any] = {"window": self.window}
        if self.seq_bounds is not None:
            arguments["seq_bounds"] = self.seq_bounds
        if self.seq_count is not None:
            arguments["seq_count"] = self.seq_count
            if self.padding is not None:  # with causality, where seq_bounds cannot say it
                arguments["mask"] = self.padding[:, None, None].expand(-1, 1, queries, -1)
        return arguments

    def contiguous(self) -> Tensor:
        """Return the dense mask over a static cache's keys, as ``generate`` makes it ahead."""
        return pad(self.dense(), (0, self.cache_slack))

    def to(self, device: torch.device, **options: Any) -> Mask:
        """Return the mask on ``device``, for a block that lies there."""
        tensors = (self.seq_bounds, self.seq_count, self.padding)
        seq_bounds, count, padding = (t if t is None else t.to(device, **options) for t in tensors)
        return replace(
            self, dense=cache(lambda: self.dense().to(device, **options)),
            seq_bounds=seq_bounds, seq_count=count, padding=padding,
        )  # fmt: skip


def _mask_function(implementation: str) -> Callable[..., Tensor | Mask | None]:
    """Return the mask function to register with transformers' AttentionMaskInterface. For "triton"
    the Mask says as bounds and windows whatever it can; for any other name it is dense when read.
    It returns None for plain causality, and may return a dense Tensor to torch.compile."""

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable = causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        use_vmap: bool = False,
        config: PreTrainedConfig | None = None,
        **options: Any,
    ) -> Tensor | Mask | None:
        """Return None for plain causality, aligned at the last key; else the mask."""
        across = "allow_is_bidirectional_skip" in options  # both ways, or of what was encoded
        options |= {"mask_function": mask_function, "use_vmap": use_vmap, "config": config}
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        compiling, cache_length, cache_slack = torch.compiler.is_compiling(), None, 0
        if not compiling:
            q_offset = int(q_offset)  # a static cache's moves on before a layer asks for its mask
            held = q_offset + q_length - int(kv_offset)
            if held < kv_length and not across:
                cache_slack = kv_length - held
                kv_length = cache_length = held
        dense = partial(
            sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            q_offset=q_offset, kv_offset=kv_offset, attention_mask=attention_mask,
            local_size=local_size, **options,
        )  # fmt: skip
        if not compiling:
            dense = cache(dense)  # all layers ask
        plain = attention_mask is None or (not compiling and bool(attention_mask.all()))
        if compiling and _positions.counted and plain and not use_vmap:
            allow_is_causal_skip |= mask_function.__name__ == "and_mask"  # none is packed
        fixed = isinstance(q_offset, int)
        aligned = fixed and q_offset + q_length == kv_offset + kv_length
        wide = local_size is None or kv_length < local_size
        if allow_is_causal_skip and wide and plain and aligned and cache_length is None:
            return None
        window = None if wide else _window(local_size, config)
        by_kernels = (wide or window is not None) and implementation == "triton"
        no_dense_mask = allow_is_causal_skip and by_kernels
        rows = {"padding": attention_mask, "kv_offset": kv_offset, "window": window}
        rows |= {"cache_length": cache_length, "cache_slack": cache_slack}
        if no_dense_mask and plain and aligned:
            return Mask(dense, no_dense_mask=True, **rows)
        same_rows = aligned and q_length == kv_length
        packed = attention_mask is None and not allow_is_causal_skip and not use_vmap
        joined = None
        if packed and same_rows and by_kernels and _is_packed(mask_function):
            joined = _joined(mask_function, batch_size, q_length, options["device"])
        if joined is not None or (compiling and no_dense_mask and same_rows):
            seq_bounds, count = sequence_bounds(joined, attention_mask)
            return Mask(dense, no_dense_mask=True, seq_bounds=seq_bounds, seq_count=count, **rows)
        if compiling:
            return dense()
        seq_bounds = None
        if no_dense_mask and attention_mask is not None:
            padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
            if padding.shape[1] == kv_length:
                seq_bounds = padded_bounds(padding, q_length, q_offset - kv_offset)
        described = seq_bounds is not None
        return Mask(dense, no_dense_mask=described, seq_bounds=seq_bounds, **rows)

    return mask


# Before transformers 5.24, blocks of tokens that see each other both ways were joined last, by
# or_masks; since then they are inside of what and_masks cuts into packed sequences. Releases before
# 5.23 have neither of the two functions.
BLOCKS_JOINED_LAST = hasattr(
    masking_utils, "packed_sequence_compatibility_function"
) or not hasattr(masking_utils, "remap_positions_for_packed_sequence")

CLOSURES_TRACED = torch.__version__ >= (2, 14)


def _is_packed(mask_function: Callable) -> bool:
    """Return whether transformers' ``mask_function`` is causal within packed sequences, without
    blocks of tokens that see each other both ways. torch.compile before torch 2.14 cannot look into
    the functions of transformers 5.24: then the answer is False, and a dense mask is made."""
    if BLOCKS_JOINED_LAST or mask_function.__name__ != "and_mask":
        return mask_function.__name__ == "and_mask"
    if not CLOSURES_TRACED and torch.compiler.is_compiling():
        return False
    cells = mask_function.__closure__ or ()
    return all(part.__name__ != "or_mask" for cell in cells for part in cell.cell_contents)


def _joined(mask_function: Callable, batch: int, length: int, device: torch.device) -> Tensor:
    """Return whether each token sees the token before it, bool [B, T], which the first token of a
    sequence does not. ``mask_function`` is causal within sequences."""
    row = torch.arange(batch, device=device)[:, None]
    query = torch.arange(length, device=device)[None]
    return mask_function(row, 0, query, (query - 1).clamp(min=0)).expand(batch, length)


def _window(local_size: int | None, config: PreTrainedConfig | None) -> int | None:
    """Return ``local_size`` if it is a sliding window, None if it is the size of chunks."""
    if getattr(config, "attention_chunk_size", None) is not None:
        return None
    return local_size if getattr(config, "sliding_window", None) == local_size else None


@cache
def _registered(normalizer: str, implementation: str) -> str:
    name = f"qbench-{normalizer}-{implementation}"
    AttentionInterface.register(name, _attention(normalizer, implementation))
    AttentionMaskInterface.register(name, _mask_function(implementation))
    return name


for _normalizer in NORMALIZERS:
    for _implementation in ("reference", "triton"):
        _registered(_normalizer, _implementation)
