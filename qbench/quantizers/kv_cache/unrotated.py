"""Keys before their rotation by RoPE, for a KV cache that keeps them so.

A model hands its attention rotated keys, and its cache keeps those. So the key projection's output
and the angles travel along with the values, as more heads of them: [v, k, cos, sin] of Hkv, Hkv, 1
and 1 heads. A cache of transformers keeps, reorders and crops them with the values, and attention
takes them off again.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError, UnavailableError

CLOSE = 0.02  # of the rotated keys: what rounding to bfloat16 may change, and other angles do not
CHECKED = "qbench_unrotated_checked"


class _Now(threading.local):
    """Of the forward that this thread is in."""

    angles: tuple[Tensor, Tensor] | None = None
    key: Tensor | None = None


def carry(module: nn.Module, name: str) -> None:
    """Makes the attention ``module`` hand on its unrotated keys. Raises QuantizationError for one
    without projections of keys and values of its own."""
    projections = [getattr(module, part, None) for part in ("k_proj", "v_proj")]
    if not all(isinstance(part, nn.Module) for part in projections):
        raise QuantizationError(
            f"{name}: before_rope needs k_proj and v_proj, which {type(module).__name__} has not; "
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
                f"{name}: before_rope needs rotary angles as position_embeddings, and "
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
                f"{name}: before_rope needs keys that are projected before values, and "
                f"{type(module).__name__} does otherwise; leave before_rope out"
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
                    f"turned by its angles ({float(off):.0%} off); leave before_rope out"
                )
            setattr(module, CHECKED, True)

    def ready(self, key: Tensor) -> Tensor:
        """Unrotated keys, rotated."""
        first, second = key.chunk(2, dim=-1)
        half = torch.cat([-second, first], dim=-1)
        return (key.float() * self._cos + half.float() * self._sin).to(key.dtype)
