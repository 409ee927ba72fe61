"""A KV cache of few bits: rounding of keys and values, and which tokens it leaves alone.

Attention modules carry a :class:`KVFakeQuant`; ``qbench.attention.kv_cache`` says what it asks of
it (its ``KVCache``), and neither package imports the other.

Keys before their rotation by RoPE (``before_rope``): a model hands its attention rotated keys, and
its cache keeps those. So the key projection's output and the angles travel along with the values,
as more heads of them: [v, k, cos, sin] of Hkv, Hkv, 1 and 1 heads. A cache of transformers keeps,
reorders and crops them with the values, and attention takes them off again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import QuantizationError, UnavailableError
from qbench.quantizers.fake_quant import fake_quantize, scale_of_tensor

if TYPE_CHECKING:
    from qbench.quantizers.kv_cache import KVCache

ATTRIBUTE = "qbench_kv_cache"  # where qbench.attention looks for it
CLOSE = 0.02  # of the rotated keys: what rounding to bfloat16 may change, and other angles do not
CHECKED = "qbench_unrotated_checked"


class KVFakeQuant:
    """Carried by all attention modules of a model. ``keep_first``, ``keep_recent``, ``key_group``:
    which tokens are read unquantized, see ``qbench.attention.kv_cache``. ``watch``: told what
    attention reads, for the audit."""

    def __init__(self, settings: KVCache) -> None:
        self.keep_first = settings.keep_first
        self.keep_recent = settings.keep_recent
        self.key_group = settings.key_group
        self.format = settings.format
        self.one_scale = settings.format.one_of_tensor
        self.before_rope = settings.before_rope
        self.watch: Callable[[nn.Module, Any], None] | None = None

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
        by_channel = self.format.strategy == "channel"
        keys = self._channels(key, positions) if by_channel else self._tokens(key, positions)
        return keys, self._tokens(value, positions)

    def _tokens(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x.transpose(1, 2)  # [B, T, H, D], as they lie: no copy
        first, fixed = None, None
        if self.keep_first:
            first = (positions < self.keep_first)[:, :, None, None]
        if self.format.one_of_tensor:
            counted = x if first is None else x.masked_fill(first, 0.0)
            fixed = scale_of_tensor(*torch.aminmax(counted), self.format)
        rounded = fake_quantize(x, self.format, fixed)
        return (rounded if first is None else torch.where(first, x, rounded)).transpose(1, 2)

    def _channels(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Whole groups of tokens; other tokens come out as they are."""
        x = x.transpose(1, 2)
        own = positions.expand(len(x), -1)
        rows, tokens = whole_groups(own, self.keep_first, self.key_group)
        groups = x[rows, tokens].movedim(1, -1)  # [groups, H, D, tokens]
        result = x.clone()
        result[rows, tokens] = fake_quantize(groups, self.format).movedim(-1, 1)
        return result.transpose(1, 2)


def whole_groups(positions: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows [n, 1] and tokens [n, size] of the groups of ``size`` tokens that stand side by side;
    counted in each sequence from position ``first`` on. ``positions`` [B, T]: each token's index
    in its sequence."""
    last = positions[:, size - 1 :]
    begin = positions[:, : last.shape[1]]
    whole = (begin >= first) & ((begin - first) % size == 0) & (last == begin + size - 1)
    rows, tokens = whole.nonzero(as_tuple=True)
    return rows[:, None], tokens[:, None] + torch.arange(size, device=tokens.device)


def install(model: PreTrainedModel, settings: KVCache, tensors: Mapping[str, Tensor]) -> None:
    """Let every attention module of ``model`` carry the cache that ``settings`` describe.

    Raises QuantizationError where it has no keys and values of the usual kind for ``before_rope``.
    """
    cache = KVFakeQuant(settings)
    for name, module in attention_modules(model).items():
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
    now = SimpleNamespace(angles=None, key=None)  # of the forward that runs
    width, kind = module.head_dim, type(module).__name__

    def refusal(needed: str) -> UnavailableError:
        return UnavailableError(f"{name}: before_rope needs {needed}; leave before_rope out")

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_embeddings")
        if given is None:
            raise refusal(f"rotary angles as position_embeddings, but {kind} gets none")
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
            raise refusal(f"unrotated keys before values, and {kind} has them after its values")
        rows = output.shape[:-1]
        angles = [angle.to(output.dtype).expand(*rows, angle.shape[-1]) for angle in now.angles]
        if angles[0].shape[-1] != width:
            raise refusal(f"all {width} channels of a head rotated, and {angles[0].shape[-1]} are")
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
