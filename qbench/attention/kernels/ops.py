"""From tensors to kernel launches: ``torch.ops.qbench.attention`` and its gradient, for
torch.compile and autograd.

What is launched depends on the layout of tensors, not on their values: :func:`forward_launches` and
:func:`backward_launches` decide it once per :class:`Layout` of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton.tools.tensor_descriptor import TensorDescriptor

from qbench.attention.kernels import common, configs, hopper, require
from qbench.attention.kernels.backward import attn_bwd_dkdv, attn_bwd_dq
from qbench.attention.kernels.common import (
    INTERPRETED,
    Describe,
    Launch,
    Layout,
    block,
    layout_of,
    on_device,
)
from qbench.attention.kernels.configs import Config
from qbench.attention.kernels.decode import attn_decode, combine
from qbench.attention.kernels.formulas import CHUNK, LOG2_E
from qbench.attention.kernels.forward import attn_fwd
from qbench.attention.normalizers import NORMALIZERS, Kernels
from qbench.attention.reference import check
from qbench.errors import UnavailableError

MAX_HEAD_DIM = 256  # the tiles of wider ones do not fit into shared memory
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = (Tensor, torch.nn.Parameter)
DECODE_ROWS = 64  # at most so many heads × queries that share keys are decoded together
DECODE_PROGRAMS = 132 * 8  # keys are split until an H200 has this many programs
MAX_LAYOUTS = 1024  # whose launches are kept


class Settings(NamedTuple):
    """Numbers that a launch depends on. ``softcap`` and ``window``: 0 for none. ``max_seqlen_q``,
    ``max_seqlen_k``: the most query and key rows of one sequence."""

    normalizer: str
    scale: float
    softcap: float
    causal: bool
    window: int
    max_seqlen_q: int
    max_seqlen_k: int


class Parameters(NamedTuple):
    """A value per parameter of normalizers, None for one that is absent: float32 tensors [heads],
    or their layouts, gradients, or whether a gradient is needed."""

    sinks: Any = None
    bias: Any = None
    slopes: Any = None
    s: Any = None


NONE = Parameters()


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seq_bounds: Tensor | None = None,
    *,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Parameters, Settings]:
    """Check the arguments and return what the kernels take beside the tensors.

    ``max_seqlen_q``, ``max_seqlen_k``: the most query and key rows of one sequence, if known.
    Raises what ``reference.attention`` does, ValueError for float64, for dtypes that differ and for
    a scale or softcap that is not positive, UnavailableError for a normalizer without kernels and
    for heads that are too wide.
    """
    check(query, key, value, mask, seq_bounds)
    given = NORMALIZERS[normalizer].checked(parameters, query.shape[1])
    require(normalizer)
    *_, queries, width = query.shape
    *_, keys, v_width = value.shape
    if width > MAX_HEAD_DIM or v_width > MAX_HEAD_DIM:
        raise UnavailableError(
            f"attention: the kernels take heads up to {MAX_HEAD_DIM} wide, not "
            f"{max(width, v_width)}; use 'reference'"
        )
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "the kernels take bfloat16, float16 or float32, one for all, not "
            f"{query.dtype}, {key.dtype}, {value.dtype}; reference.attention takes float64"
        )
    scale = width**-0.5 if scale is None else scale
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"scale and softcap must be positive, not {scale} and {softcap}")
    settings = Settings(
        normalizer, scale, softcap or 0.0, causal, window or 0,
        max_seqlen_q or queries, max_seqlen_k or keys,
    )  # fmt: skip
    given = {name: tensor.float().contiguous() for name, tensor in given.items()}
    return Parameters(**given), settings


def scales(settings: Settings) -> tuple[float, float]:
    """Return two factors: from products, or their tanh if they are capped, to scores in log2 units;
    and from products to the argument of the tanh, 0 without a soft cap."""
    scale, softcap, log2_e = settings.scale, settings.softcap, LOG2_E.value
    return (softcap * log2_e, scale / softcap) if softcap else (scale * log2_e, 0.0)


def flags_of(settings: Settings, given: Parameters, needs_grad: Parameters = NONE) -> int:
    """Return the bits of :mod:`qbench.attention.kernels.common` for this call."""
    kernels = require(settings.normalizer)
    conditions = (
        (kernels.elementwise, common.ELEMENTWISE.value),
        (kernels.needs_expm1, common.NEEDS_EXPM1.value),
        (kernels.scaled, common.SCALED.value),
        (kernels.scaled and kernels.one_more, common.LOG_N1.value),
        (settings.softcap > 0, common.CAPPED.value),
        (settings.causal, common.CAUSAL.value),
        (settings.window > 0, common.WINDOWED.value),
        (given.slopes is not None, common.SLOPED.value),
        (kernels.sink and given.sinks is None, common.SINK_ONE.value),
        (given.sinks is not None, common.SINK_LEARNED.value),
        (needs_grad.bias or needs_grad.s, common.DPARAM.value),
        (needs_grad.sinks, common.DSINKS.value),
        (needs_grad.slopes, common.DSLOPES.value),
    )
    return sum(bits for condition, bits in conditions if condition)


def constants(settings: Settings, flags: int, query: Layout, value: Layout) -> dict[str, Any]:
    """Return the compile-time constants of every kernel over tiles."""
    return {
        "NORM": require(settings.normalizer).score_function, "FLAGS": flags,
        "FAST": query.dtype == torch.bfloat16 and not INTERPRETED,
        "HEAD_DIM": query.shape[3], "V_HEAD_DIM": value.shape[3],
    }  # fmt: skip


# The forward pass.


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seq_bounds: Tensor | None,
    parameters: Parameters, settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the forward pass. Return output, log-sum-exp of rows in log2 units
    (:func:`empty_output`), and flags (:func:`empty_flags`)."""
    output, lse = empty_output(query, value, covered=seq_bounds is None)
    needs_expm1 = empty_flags(query, key, require(settings.normalizer))
    if output.numel() == 0:
        return output, lse, needs_expm1
    query, key, value = map(dense_rows, (query, key, value))
    counts = allowed_counts(mask, query, key, parameters, settings)
    tensors = (query, key, value, mask, seq_bounds, *parameters)
    launches = forward_launches(query.device, settings, *map(layout_of, tensors))
    with on_device(query.device):
        launches(query, key, value, output, lse, needs_expm1, mask, seq_bounds, *parameters, counts)
    return output, lse, needs_expm1


@lru_cache(MAX_LAYOUTS)
def forward_launches(
    device: torch.device, settings: Settings, query: Layout, key: Layout, value: Layout,
    mask: Layout | None, seq_bounds: Layout | None, *parameters: Layout | None,
) -> Callable[..., None]:  # fmt: skip
    """Return the function that launches the forward kernels for tensors of these layouts. It takes
    query, key, value, output, lse, flags, mask, seq_bounds, the parameters, and
    :func:`allowed_counts`; it writes output, lse and flags."""
    normalizer, *_, window, max_seqlen_q, max_seqlen_k = settings
    kernels = require(normalizer)
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    v_width = value.shape[3]
    group = heads // kv_heads
    sequences = batch if seq_bounds is None else seq_bounds.shape[0]
    flags = flags_of(settings, Parameters(*parameters))
    strides = strides_of(query, key, value)
    o_strides = strides_by_token((batch, heads, queries, v_width))
    if group * max_seqlen_q <= DECODE_ROWS:
        rows = max(16, triton.next_power_of_2(group * max_seqlen_q))
        config = configs.decode_config(block(width), query.dtype, rows)
        pairs = sequences * kv_heads
        splits = min(_ceil(DECODE_PROGRAMS, pairs), _ceil(max_seqlen_k, 4 * config.block_k))
        splits = max(1, splits)
        decode = Launch(
            attn_decode, (splits, kv_heads, sequences),
            ((kv_heads, group), queries, keys, window, *scales(settings), splits, strides,
             *mask_strides(mask)),
            {"SKIP": NORMALIZERS[normalizer].sparse, "BLOCK_R": rows, **config.options,
             **constants(settings, flags, query, value)},
        )  # fmt: skip
        combining = Launch(
            combine, (pairs, 1), ((kv_heads, group), queries, keys, splits, o_strides),
            {"NORM": kernels.score_function, "FLAGS": flags & common.SINK.value, "BLOCK_R": rows,
             "V_HEAD_DIM": v_width},
        )  # fmt: skip
        shape = (pairs, splits, rows, block(v_width) + 2)

        def launch_decode(q, k, v, output, lse, _, mask, seq_bounds, sinks, *rest):
            partial = torch.empty(shape, dtype=torch.float32, device=device)
            decode(q, k, v, partial, mask, seq_bounds, *rest)
            combining(output, lse, partial, seq_bounds, sinks)

        return launch_decode

    short = max_seqlen_k <= configs.SHORT
    config = configs.forward_config(block(width), query.dtype, kernels, flags, short=short)
    tiles = describe_tiles((key, value), config.block_k, config)
    launch_forward = Launch(
        attn_fwd, (_ceil(max_seqlen_q, config.block_q), heads, sequences),
        ((heads, group), queries, keys, window, *scales(settings), (*strides, o_strides),
         *mask_strides(mask)),
        {"PRECISE": query.dtype == torch.float32,
         "NO_MAX": query.dtype == torch.bfloat16 and not kernels.elementwise,
         "BLOCK_Q": config.block_q, **config.options,
         **constants(settings, flags, query, value)},
    )  # fmt: skip

    def launch(q, k, v, *rest):
        launch_forward(q, *described(tiles, k, v), *rest)

    return launch


def by_token(like: Tensor, shape: tuple[int, int, int, int], *, covered: bool) -> Tensor:
    """Return a tensor of ``shape`` [B, H, T, D] with the memory layout [B, T, H, D]; zeros unless
    every row is ``covered`` by a sequence."""
    made = like.new_empty_strided(shape, (*strides_by_token(shape), 1))
    return made if covered else made.zero_()


def empty_output(query: Tensor, value: Tensor, *, covered: bool) -> tuple[Tensor, Tensor]:
    """Return memory for the output [B, H, Tq, Dv], laid out as [B, Tq, H, Dv], and for the rows'
    log-sum-exp in log2 units, float32 [B, H, Tq]. Unless every row is ``covered``, they hold 0 and
    +∞."""
    batch, heads, queries, _ = query.shape
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32)
    if not covered:
        lse.fill_(float("inf"))
    return by_token(query, (batch, heads, queries, value.shape[3]), covered=covered), lse


def empty_flags(query: Tensor, key: Tensor, kernels: Kernels) -> Tensor:
    """Return int32 zeros [B, key heads, chunks of CHUNK keys]. The forward pass sets one if a row
    of tiny scores has a positive score there. [1] and not filled if the normalizer needs none."""
    if not kernels.needs_expm1:
        return query.new_empty(1, dtype=torch.int32)
    shape = (*key.shape[:2], _ceil(key.shape[2], CHUNK.value))
    return query.new_zeros(shape, dtype=torch.int32)


# The backward pass.


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
    needs_expm1: Tensor, mask: Tensor | None, seq_bounds: Tensor | None,
    parameters: Parameters, settings: Settings, needs_grad: Parameters,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Run the backward pass. Return the gradients of query, key and value, laid out as the output,
    and of each of the parameters [heads], None for one that is not ``needs_grad``."""
    covered = seq_bounds is None
    dq, dk, dv = (by_token(t, t.shape, covered=covered) for t in (query, key, value))
    if query.numel() == 0 or key.numel() == 0:
        none = (lse.new_zeros(query.shape[1]) if needed else None for needed in needs_grad)
        return dq.zero_(), dk.zero_(), dv.zero_(), *none
    gradient, query, key, value = map(dense_rows, (gradient, query, key, value))
    counts = allowed_counts(mask, query, key, parameters, settings)
    # Rows outside the sequences give nothing to the gradients of parameters.
    make = torch.empty_like if covered else torch.zeros_like
    rows = Parameters(*(make(lse) if needed else None for needed in needs_grad))
    param = rows.bias if rows.s is None else rows.s  # no normalizer has both
    others = (mask, seq_bounds, *parameters)
    tensors = (gradient, query, key, value, output, *others)
    launches = backward_launches(query.device, settings, needs_grad, *map(layout_of, tensors))
    given = (gradient, query, key, value, output, lse, needs_expm1, dq, dk, dv)
    with on_device(query.device):
        launches(*given, param, rows.sinks, rows.slopes, *others, counts)
    return dq, dk, dv, *(None if row is None else row.sum((0, 2)) for row in rows)


@lru_cache(MAX_LAYOUTS)
def backward_launches(
    device: torch.device, settings: Settings, needs_grad: Parameters, gradient: Layout,
    query: Layout, key: Layout, value: Layout, output: Layout, mask: Layout | None,
    seq_bounds: Layout | None, *parameters: Layout | None,
) -> Callable[..., None]:  # fmt: skip
    """Return the function that launches the backward kernels for tensors of these layouts. It takes
    the output's gradient, query, key, value, output, lse, flags, then to write: dq, dk, dv, and by
    row the gradients of bias or s, sinks, slopes; then mask, seq_bounds, the parameters, and
    :func:`allowed_counts`."""
    normalizer, *_, window, max_seqlen_q, max_seqlen_k = settings
    kernels = require(normalizer)
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    flags = flags_of(settings, Parameters(*parameters), needs_grad)
    all_scales = (settings.scale, *scales(settings))
    dq, dk, dv = (strides_by_token(layout.shape) for layout in (query, key, value))
    if (
        not INTERPRETED
        and mask is None
        and seq_bounds is None
        and hopper.fits(device, query, key, value, flags)
        and all(map(has_tma_layout, (query, key, value, gradient)))
    ):
        strides = (output.strides[:3], dq, dk, dv)
        return hopper.backward_launches(query, key, kernels, flags, all_scales, strides)
    sequences = batch if seq_bounds is None else seq_bounds.shape[0]
    shared = constants(settings, flags, query, value)
    read = strides_of(query, key, value, gradient)
    config = configs.backward_config(configs.DQ, block(width), query.dtype)
    kv_tiles = describe_tiles((key, value), config.block_k, config)
    launch_dq = Launch(
        attn_bwd_dq, (_ceil(max_seqlen_q, config.block_q), heads, sequences),
        ((heads, group), queries, keys, window, *all_scales, (*read, output.strides[:3], dq),
         *mask_strides(mask)),
        {"BLOCK_Q": config.block_q, **config.options, **shared},
    )  # fmt: skip
    # Decoding is precise and sets no flags.
    unflagged = kernels.needs_expm1 and group * max_seqlen_q <= DECODE_ROWS
    config = configs.backward_config(configs.DKDV, block(width), query.dtype)
    qg_tiles = describe_tiles((query, gradient), config.block_q, config)
    launch_dkdv = Launch(
        attn_bwd_dkdv, (_ceil(max_seqlen_k, config.block_k), kv_heads, sequences),
        ((kv_heads, group), queries, keys, window, *all_scales, (*read, dk, dv),
         *mask_strides(mask)),
        {"PRECISE": query.dtype == torch.float32 or unflagged,
         "BLOCK_Q": config.block_q, **config.options, **shared},
    )  # fmt: skip

    def launch(
        g, q, k, v, output, lse, needs_expm1, dq, dk, dv, dparam, dsinks, dslopes, mask, seq_bounds,
        sinks, bias, slopes, s, counts,
    ):  # fmt: skip
        deltas = torch.empty_like(lse)
        launch_dq(
            q, *described(kv_tiles, k, v), g, output, lse, deltas, dq, dparam, dsinks, dslopes,
            mask, seq_bounds, sinks, slopes, s, counts,
        )  # fmt: skip
        q, g = described(qg_tiles, q, g)
        launch_dkdv(
            q, k, v, g, lse, deltas, needs_expm1, dk, dv, mask, seq_bounds, slopes, s, counts
        )

    return launch


# How tensors are laid out in memory.


def _ceil(length: int, size: int) -> int:
    return -(-length // size)


def allowed_counts(
    mask: Tensor | None, query: Tensor, key: Tensor, parameters: Parameters, settings: Settings
) -> Tensor | None:
    """Return how many keys each row may see, float32 [B, H, Tq], if there is a mask and the
    normalizer depends on it; else None."""
    if mask is None:
        return None
    kernels = require(settings.normalizer)
    if not (kernels.scaled or (kernels.elementwise and parameters.bias is None)):
        return None
    queries, keys = query.shape[2], key.shape[2]
    q_pos = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    other = torch.arange(keys, device=mask.device)
    if settings.causal:
        mask = mask & (other <= q_pos)
    if settings.window:
        mask = mask & (other > q_pos - settings.window)
    counts = mask.sum(-1, dtype=torch.float32)
    return counts.expand(query.shape[0], query.shape[1], queries).contiguous()


def dense_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with the elements of a row side by side; other strides are free."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def strides_of(*layouts: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the strides of batch row, head and row of each tensor; within a row it is 1."""
    return tuple(layout.strides[:3] for layout in layouts)


def strides_by_token(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the strides of batch row, head and row of a tensor of :func:`by_token`."""
    _, heads, length, width = shape
    return length * heads * width, width, heads * width


def mask_strides(mask: Layout | None) -> tuple[int, int, int, int]:
    """Return the strides of a mask; 0 for an axis of size one, which is shared."""
    if mask is None:
        return 0, 0, 0, 0
    batch, head, row, column = mask.strides
    return (batch if mask.shape[0] > 1 else 0, head if mask.shape[1] > 1 else 0, row, column)


def describe_tiles(
    layouts: tuple[Layout, ...], rows: int, config: Config
) -> tuple[Describe, ...] | None:
    """Return functions that make descriptors of tiles of ``rows`` rows of one head, if ``config``
    and the layouts allow them, else None."""
    if not (config.tma and all(map(has_tma_layout, layouts))):
        return None
    shapes = ((1, 1, rows, block(layout.shape[3])) for layout in layouts)
    return tuple(Describe(TensorDescriptor, shape) for shape in shapes)


def described(tiles: tuple[Describe, ...] | None, *tensors: Tensor) -> tuple[Any, ...]:
    """Return tensor descriptors of ``tensors``, or ``tensors`` if ``tiles`` is None."""
    if tiles is None:
        return tensors
    return tuple(describe(tensor) for describe, tensor in zip(tiles, tensors, strict=True))


def has_tma_layout(layout: Layout) -> bool:
    """Return whether the tensor memory accelerator can load a tensor of this layout: its start is
    aligned to 16 bytes, and its first three strides are positive multiples of 16 bytes."""
    size = layout.dtype.itemsize
    return layout.aligned and all(
        stride > 0 and stride * size % 16 == 0 for stride in layout.strides[:3]
    )


# What torch.compile and autograd see.


def mask_or_bounds(
    mask: Tensor | None, seq_bounds: Tensor | None, seq_count: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return (mask, None) or (None, bounds), as the kernels need them. ``seq_count`` is that of
    ``varlen.sequence_bounds``: n > 0 takes the first n rows of ``seq_bounds``, 0 neither, since
    every batch row is one sequence, −1 the mask. Without it or bounds, both come back as given."""
    if seq_bounds is None or seq_count is None:
        return mask, seq_bounds
    count = int(seq_count)
    return (mask, None) if count < 0 else (None, seq_bounds[:count] if count else None)


_TENSORS = (
    "Tensor? mask, Tensor? seq_bounds, Tensor? seq_count, "
    "Tensor? sinks, Tensor? bias, Tensor? slopes, Tensor? s, "
)
_SETTINGS = (
    "str normalizer, float scale, float softcap, bool causal, SymInt window, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k"
)


@torch.library.custom_op(
    "qbench::attention", mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_TENSORS}{_SETTINGS})"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seq_bounds: Tensor | None,
    seq_count: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return output, log-sum-exp and flags; the operator's arguments are flat: three tensors,
    masks, four parameters, then the fields of Settings."""
    mask, seq_bounds = mask_or_bounds(mask, seq_bounds, seq_count)
    return forward(query, key, value, mask, seq_bounds, Parameters(*rest[:4]), Settings(*rest[4:]))


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, lse = empty_output(query, value, covered=True)
    return output, lse, empty_flags(query, key, require(rest[7]))


@torch.library.custom_op(
    "qbench::attention_backward", mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"Tensor needs_expm1, {_TENSORS}{_SETTINGS}, bool[4] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def attention_backward(*given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, always, and of each of the four parameters, an empty
    tensor for one that is not ``wanted``."""
    *given, needs_grad = given
    mask, seq_bounds = mask_or_bounds(*given[7:10])
    gradients = backward(
        *given[:7], mask, seq_bounds, Parameters(*given[10:14]), Settings(*given[14:]),
        Parameters(*needs_grad),
    )  # fmt: skip
    # An operator must return tensors: an empty one for each gradient that is not needed.
    return tuple(given[5].new_empty(0) if gradient is None else gradient for gradient in gradients)


@attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    inputs = (by_token(t, t.shape, covered=True) for t in (query, key, value))
    learned = (query.new_empty(query.shape[1] * wants, dtype=torch.float32) for wants in rest[-1])
    return *inputs, *learned


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[10:]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:10])


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    needs_grad = ctx.needs_input_grad[6:10]
    dq, dk, dv, *learned = attention_backward(
        gradient, *ctx.saved_tensors, *ctx.settings, needs_grad
    )
    learned = (
        gradient if needed else None for gradient, needed in zip(learned, needs_grad, strict=True)
    )
    return dq, dk, dv, None, None, None, *learned, *[None] * len(ctx.settings)


attention.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes longer than the launches."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, mask, seq_bounds, seq_count, *parameters, settings = inputs
        mask, seq_bounds = mask_or_bounds(mask, seq_bounds, seq_count)
        result = forward(query, key, value, mask, seq_bounds, Parameters(*parameters), settings)
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, *result, mask, seq_bounds, *parameters)
        return result[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        tensors, needs_grad = ctx.saved_tensors, Parameters(*ctx.needs_input_grad[6:10])
        dq, dk, dv, *learned = backward(
            gradient, *tensors[:8], Parameters(*tensors[8:]), ctx.settings, needs_grad
        )
        return dq, dk, dv, None, None, None, *learned, None


def apply(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seq_bounds: Tensor | None,
    seq_count: Tensor | None, parameters: Parameters, settings: Settings,
) -> Tensor:  # fmt: skip
    """Run attention and return its output: by the operator if torch.compile, a dispatch mode or a
    tensor subclass looks into it, else directly."""
    plain = type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN
    if plain and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None:
        if not torch.is_grad_enabled():
            mask, seq_bounds = mask_or_bounds(mask, seq_bounds, seq_count)
            return forward(query, key, value, mask, seq_bounds, parameters, settings)[0]
        return _Eager.apply(query, key, value, mask, seq_bounds, seq_count, *parameters, settings)
    return attention(query, key, value, mask, seq_bounds, seq_count, *parameters, *settings)[0]
