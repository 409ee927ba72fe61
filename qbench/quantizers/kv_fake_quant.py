"""A KV cache of few bits: rounding of keys and values, and which tokens it leaves alone.

Attention modules carry a :class:`KVFakeQuant`; ``qbench.attention.kv_cache`` says what it asks of
it (its ``KVCache``), and neither package imports the other. On a GPU keys and values are rounded by
kernels, elsewhere by the definition.

Keys before their rotation by RoPE (``before_rope``): a model hands its attention rotated keys, and
its cache keeps those. So the key projection's output and the angles travel along with the values,
as more heads of them: [v, k, cos, sin] of Hkv, Hkv, 1 and 1 heads. A cache of transformers keeps,
reorders and crops them with the values, and attention takes them off again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import QuantizationError, UnavailableError
from qbench.quantizers.fake_quant import (
    dequantize,
    fake_quantize_definition,
    kernels,
    quantize,
    scale_of_ends,
)
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat

if TYPE_CHECKING:
    from qbench.quantizers.kv_cache import KVCache

ATTRIBUTE = "qbench_kv_cache"  # where qbench.attention looks for it
OURS = "qbench-"  # attention functions that look
CLOSE = 0.02  # of the rotated keys: what rounding to bfloat16 may change, and other angles do not
CHECKED = "qbench_unrotated_checked"


class KVFakeQuant:
    """Carried by all attention modules of a model. ``keep_first``, ``keep_recent``, ``key_group``:
    which tokens are read unquantized, see ``qbench.attention.kv_cache``. ``watch``: told what
    attention reads, for the audit. ``paused``: everything is read as it is."""

    def __init__(self, settings: KVCache) -> None:
        self.keep_first = settings.keep_first
        self.keep_recent = settings.keep_recent
        self.key_group = settings.key_group
        self.format = settings.format
        self.before_rope = settings.before_rope
        self.watch: Callable[[nn.Module, Any], None] | None = None
        self.paused = False

    @property
    def uses_positions(self) -> bool:
        return self.keep_first > 0 or self.key_group > 1

    def as_kept(self, module: nn.Module, key: Tensor, value: Tensor) -> Rotated | Unrotated:
        """From what a module hands over, keys and values as they are kept, before rounding."""
        return (Unrotated if self.before_rope else Rotated)(module, key, value)

    def rounded(
        self, key: Tensor, value: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] as they are read back once they are quantized.

        ``positions`` int32 [B or 1, T]: each token's index in its own sequence, negative for
        padding. Tokens that are never quantized come out as they are.
        """
        if self.format.strategy == "channel":
            return self._channels(key, positions), self._tokens(value, positions)
        rounding = self._tensor if self.format.strategy == "tensor" else self._tokens
        return rounding(key, positions), rounding(value, positions)

    def _tokens(self, x: Tensor, positions: Tensor | None) -> Tensor:
        group = x.shape[-1] if self.format.group_size == WHOLE_ROW else self.format.group_size
        if by_kernel(x):
            return kernels().fake_quantize_tokens(x, self.format, group, positions, self.keep_first)
        return self._but_first(by_token(x, self.format, group), x, positions)

    def _channels(self, x: Tensor, positions: Tensor | None) -> Tensor:
        assert positions is not None
        options = (x, self.format, positions, self.keep_first, self.key_group)
        if by_kernel(x):
            return kernels().fake_quantize_channels(*options)
        return by_channel(*options)

    def _tensor(self, x: Tensor, positions: Tensor | None) -> Tensor:
        coded = by_tensor(x, self.format, positions, self.keep_first)
        return self._but_first(coded, x, positions)

    def _but_first(self, rounded: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
        """``rounded`` but for the first tokens, which are those of ``x``."""
        if not self.keep_first:
            return rounded
        assert positions is not None
        first = (positions < self.keep_first)[:, None, :, None]
        return torch.where(first, x, rounded)


def by_kernel(x: Tensor) -> bool:
    return x.is_cuda


def by_token(x: Tensor, form: QuantFormat, group: int) -> Tensor:
    """``x`` [..., D]: ``group`` neighbouring channels of one head and token share a scale."""
    return fake_quantize_definition(x.unflatten(-1, (-1, group)), form).flatten(-2)


def _between(x: Tensor, form: QuantFormat, low: Tensor, high: Tensor) -> Tensor:
    """``x`` rounded between the lowest and highest value of its group."""
    scale = scale_of_ends(low.float(), high.float(), form)
    return dequantize(quantize(x.float(), form, scale), form, scale).to(x.dtype)


def by_tensor(x: Tensor, form: QuantFormat, positions: Tensor | None, first: int) -> Tensor:
    """``x`` [B, H, T, D]: one scale for all of it but the tokens before position ``first``."""
    counted = x
    if first:
        assert positions is not None
        counted = x.masked_fill((positions < first)[:, None, :, None], 0.0)
    return _between(x, form, counted.amin(), counted.amax())


def by_channel(x: Tensor, form: QuantFormat, positions: Tensor, first: int, group: int) -> Tensor:
    """``x`` [B, H, T, D]: ``group`` tokens of one sequence, head and channel share a scale.

    ``positions`` [B or 1, T]: each token's index in its sequence. Groups are counted from position
    ``first`` on. Tokens whose group is not whole come out as they are.
    """
    numbers, whole = channel_groups(positions, first, group)
    count = int(numbers.max()) + 1 if numbers.numel() else 1
    batch, heads, _, width = x.shape
    index = numbers[:, None, :, None].expand(batch, heads, -1, width)
    empty = x.new_zeros(batch, heads, count, width)
    low, high = (
        empty.scatter_reduce(2, index, x, reduce, include_self=False).gather(2, index)
        for reduce in ("amin", "amax")
    )
    return torch.where(whole[:, None, :, None], _between(x, form, low, high), x)


def channel_groups(positions: Tensor, first: int, group: int) -> tuple[Tensor, Tensor]:
    """Of each token the number of its group in its row [B or 1, T], and whether that group is
    whole: all its tokens are there, side by side. Tokens before ``first`` have none."""
    index = torch.arange(positions.shape[1], device=positions.device)
    within = (positions - first) % group
    begins = index - within  # where the token's group would begin
    ends = begins + group - 1
    there = (positions >= first) & (begins >= 0) & (ends < positions.shape[1])
    safe = ends.clamp(0, positions.shape[1] - 1).expand_as(positions)
    whole = there & (positions.gather(1, safe) == positions + group - 1 - within)
    starts = whole & (within == 0)
    # group 0 takes what belongs to none
    return torch.where(whole, starts.cumsum(1), 0), whole


def install(model: PreTrainedModel, settings: KVCache, tensors: Mapping[str, Tensor]) -> None:
    """Let every attention module of ``model`` carry the cache that ``settings`` describe.

    Raises QuantizationError where the model's attention is not ours, which would not look, or has
    no keys and values of the usual kind.
    """
    attention = model.config._attn_implementation
    if not str(attention).startswith(OURS):
        raise QuantizationError(
            f"kv: {settings.name}: the model attends by {attention!r}, but only qbench's attention "
            "reads a quantized cache; use one of its normalizers, such as softmax"
        )
    modules = attention_modules(model)
    if not modules:
        raise QuantizationError(f"kv: {settings.name}: {type(model).__name__} has no attention")
    cache = KVFakeQuant(settings)
    for name, module in modules.items():
        setattr(module, ATTRIBUTE, cache)
        if settings.before_rope:
            carry_unrotated_keys(module, name)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep keys and values for later queries, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False) and hasattr(module, "layer_idx")
    }


def evidence(model: nn.Module, settings: KVCache) -> dict[str, KVFakeQuant]:
    """What each attention module carries that carries one."""
    return {
        name: getattr(module, ATTRIBUTE)
        for name, module in model.named_modules()
        if getattr(module, ATTRIBUTE, None) is not None
    }


# Keys before RoPE


class Rotated:
    """Keys and values that are kept as attention takes them."""

    def __init__(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value

    def ready(self, key: Tensor) -> Tensor:
        return key


class _Now(threading.local):
    """Of the forward that this thread is in."""

    angles: tuple[Tensor, Tensor] | None = None
    key: Tensor | None = None


def carry_unrotated_keys(module: nn.Module, name: str) -> None:
    """Makes the attention ``module`` hand on its unrotated keys. Raises QuantizationError for one
    without projections of keys and values of its own."""
    projections = [getattr(module, part, None) for part in ("k_proj", "v_proj")]
    if not all(isinstance(part, nn.Module) for part in projections):
        raise QuantizationError(
            f"{name}: before_rope needs k_proj and v_proj, which {type(module).__name__} lacks; "
            "leave before_rope out"
        )
    keys = getattr(module, "k_norm", None) or module.k_proj
    now = _Now()
    width = module.head_dim

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_embeddings")
        if given is None:
            given = next((a for a in args if isinstance(a, tuple) and len(a) == 2), None)
        if given is None:
            raise UnavailableError(
                f"{name}: before_rope needs rotary angles as position_embeddings, but "
                f"{type(module).__name__} gets none; leave before_rope out"
            )
        now.angles = given

    def leave(*_: Any) -> None:
        now.angles = now.key = None

    def keep(_: nn.Module, args: Any, output: Tensor) -> None:
        if now.angles is not None:
            now.key = output

    def join(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if now.angles is None:  # called by itself, as the audit does
            return None
        if now.key is None:
            raise UnavailableError(
                f"{name}: before_rope needs keys projected before values, but "
                f"{type(module).__name__} projects values first; leave before_rope out"
            )
        rows = output.shape[:-1]
        angles = [angle.to(output.dtype).expand(*rows, angle.shape[-1]) for angle in now.angles]
        if angles[0].shape[-1] != width:
            raise UnavailableError(
                f"{name}: before_rope needs all {width} channels of a head rotated, and "
                f"{angles[0].shape[-1]} are; leave before_rope out"
            )
        return torch.cat([output, now.key.reshape(*rows, -1), *angles], dim=-1)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    keys.register_forward_hook(keep)
    module.v_proj.register_forward_hook(join)


class Unrotated:
    """Unrotated keys, and the values that they came with."""

    def __init__(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Of rotated keys [B, Hkv, T, D] and what came as values. Raises UnavailableError where
        the model's rotation is another one."""
        heads = key.shape[1]
        self.value, self.key, self._cos, self._sin = value.split([heads, heads, 1, 1], dim=1)
        if not getattr(module, CHECKED, False):
            off = (self.ready(self.key) - key).float().norm() / key.float().norm()
            if not off <= CLOSE:
                raise UnavailableError(
                    f"before_rope: the keys of {type(module).__name__} are not its key projection "
                    f"rotated by its angles ({float(off):.0%} off); leave before_rope out"
                )
            setattr(module, CHECKED, True)

    def ready(self, key: Tensor) -> Tensor:
        """Unrotated keys, rotated."""
        first, second = key.chunk(2, dim=-1)
        half = torch.cat([-second, first], dim=-1)
        return (key.float() * self._cos + half.float() * self._sin).to(key.dtype)
