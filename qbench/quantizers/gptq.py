"""Quantize a model by GPTQ (Frantar, Ashkboos, Hoefler, Alistarh 2022, algorithm 1). Settings:
``qbench.quantizers.methods.weight_only.Gptq``.

With the Hessian H of a layer's inputs, columns are rounded one by one. Each column's error, divided
by its diagonal entry of the Cholesky factor of H⁻¹, is subtracted from the columns that are not
rounded yet. What the paper leaves open is done as in gptqmodel; a test compares the results. The
scale of a group is that of its weights at the beginning of its block of 128 columns, float32 until
it is stored. If H is singular, damping is raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import QuantizationError
from qbench.progress import Advance
from qbench.quantizers import packed
from qbench.quantizers.calibration import Calibration, SequentialCalibrator
from qbench.quantizers.config import ignore_advice
from qbench.quantizers.formats import WHOLE_ROW
from qbench.quantizers.linear import Tensors
from qbench.quantizers.methods.weight_only import Gptq
from qbench.streaming import offload_device

WIDTH = 128  # columns of a block; others get its errors once it is done
TRITON = find_spec("triton") is not None  # on Linux only; without it columns take long
# Whether a block gets the errors of all before it when it begins, which takes one factor of H;
# else each block's errors go to all after it, as in gptqmodel, to the bit
LEFT_LOOKING = {"cpu": False, "cuda": True}
DAMP_STEP = 0.01  # by which damping is raised if H is singular


def quantize_model(
    model: PreTrainedModel,
    chosen: Mapping[str, Gptq],
    calibration: Calibration,
    progress: Advance,
) -> tuple[dict[str, Tensors], str]:
    """Quantize the linear layers ``chosen``, by name, with their settings; return the tensors to
    store by layer's name, and a note for the record. Their weights in ``model`` are overwritten.
    ``true_sequential`` and ``batch_size`` are those of the first layer. Raises QuantizationError
    for a model that cannot be computed block by block, a layer that no calibration token reaches,
    and a Hessian that stays singular."""
    layers = {name: model.get_submodule(name) for name in chosen}
    first = next(iter(chosen.values()))
    walk = SequentialCalibrator(model, layers, calibration, first.batch_size)
    result: dict[str, Tensors] = {}
    raised: list[float] = []
    home = offload_device(model)
    for index in range(len(walk.blocks)):
        path = f"{walk.root}.{index}"
        groups = [[f"{path}.{member}" for member in group] for group in walk.groups[index]]
        leaders = [group[0] for group in walk.groups[index]]
        # Without true_sequential all layers see the inputs of the unquantized block.
        hessians = (
            walk.sequence(index, leaders, progress)
            if first.true_sequential
            else walk.hessians(index, leaders)
        )
        for group, hessian in zip(groups, hessians, strict=True):
            if hessian is None:
                raise QuantizationError(
                    f"{chosen[group[0]].name}: {group[0]}: no calibration text reaches it (an "
                    "expert that is never chosen?); calibrate on more samples, or leave it out: "
                    f"{ignore_advice(group, layers)}"
                )
            alike: dict[Gptq, list[str]] = {}
            for name in group:
                alike.setdefault(chosen[name], []).append(name)
            for settings, names in alike.items():
                of_settings = {name: layers[name] for name in names}
                made, damp = _solve_layers(of_settings, hessian.clone(), settings)
                if damp > settings.damp:
                    raised += [damp] * len(names)
                for name, tensors in made.items():
                    result[name] = {part: t.to(home) for part, t in tensors.items()}
        if not first.true_sequential:
            walk.advance(index)
    note = f"; damp raised to {max(raised):g} in {len(raised)} layers" if raised else ""
    return result, f"our own GPTQ{note}"


def _solve_layers(
    layers: Mapping[str, nn.Linear], hessian: Tensor, settings: Gptq
) -> tuple[dict[str, Tensors], float]:
    """Quantize ``layers`` with the same inputs, and so the same ``hessian`` (overwritten), in one
    go, since rows are independent; write the dequantized weights into them. Return the tensors to
    store by layer's name, and the damp that was needed."""
    first = next(iter(layers))
    weight = torch.cat([layer.weight.detach() for layer in layers.values()]).float()
    solved = solve(weight, hessian, settings, first)
    if not solved.weight.isfinite().all():
        raise QuantizationError(
            f"{settings.name}: {first}: its quantized weights are NaN or infinite; raise damp, "
            "or calibrate on more text"
        )
    heights = [layer.out_features for layer in layers.values()]
    parts = (t.split(heights) for t in (solved.weight, solved.codes, solved.scale, solved.zero))
    made: dict[str, Tensors] = {}
    for (name, layer), rows, *codes in zip(layers.items(), *parts, strict=True):
        layer.weight.data = rows.to(layer.weight.dtype)
        made[name] = packed.pack(*codes, settings.num_bits)
        if solved.order is not None:
            made[name]["order"] = solved.order.to(torch.int32)
    return made, solved.damp


class GptqLinear(packed.PackedLinear):
    """Dequantizes to float16, as the format's kernels do."""

    compute_dtype = torch.float16


from_packed = GptqLinear


def _damped_factor(hessian: Tensor, settings: Gptq, name: str) -> tuple[Tensor, float]:
    """Return ``_factor`` of H + damp · mean diagonal, and the damp that was needed; ``name`` is the
    layer's, for messages."""
    diagonal = hessian.diagonal()
    plain, damp = diagonal.clone(), settings.damp
    mean = plain.mean()
    while damp < 1:
        diagonal.copy_(plain).add_(damp * mean)
        upper, info = _factor(hessian)
        if not int(info):
            return upper, damp
        damp += DAMP_STEP
    raise QuantizationError(
        f"{settings.name}: {name}: the Hessian is singular with damp {settings.damp:g} and more; "
        "calibrate on more samples"
    )


def _factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return U [in, in], upper triangular with H⁻¹ = Uᵀ U, or its inverse M with H = M Mᵀ for
    ``LEFT_LOOKING``; and a number that is not 0 if H is singular."""
    if LEFT_LOOKING[hessian.device.type]:
        lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        return lower.flip(0, 1), info
    lower, info = torch.linalg.cholesky_ex(hessian)
    if int(info):
        return lower, info
    inverse = torch.cholesky_inverse(lower)
    del lower
    return torch.linalg.cholesky_ex(inverse, upper=True)


def _corrected(off: Tensor, factor: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return columns ``start`` to ``end`` of a weight, float32 [out, n], changed to make up for the
    columns before; and their block of U [n, n]. ``off`` [out, in]: by how much quantized columns
    are off, and the weight of the others. ``factor``: M."""
    eye = torch.eye(end - start, dtype=factor.dtype, device=factor.device)
    block = torch.linalg.solve_triangular(factor[start:end, start:end], eye, upper=True)
    return off[:, start:end] + off[:, :start] @ factor[:start, start:end] @ block, block


@dataclass(frozen=True, kw_only=True, eq=False)
class GPTQResult:
    """Holds the quantized rows of all layers with the same Hessian. ``weight``: dequantized,
    float32 [out, in]. ``codes``: float32 [out, in] in the order of the stored groups. ``scale``,
    ``zero``: float32 [out, groups]. ``order`` [in]: column i of the weight is column order[i] of
    the codes; None: the same order. ``damp``: what was added to the Hessian's diagonal, in units of
    its mean."""

    weight: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None
    damp: float


@torch.no_grad()
def solve(weight: Tensor, hessian: Tensor, settings: Gptq, name: str) -> GPTQResult:
    """Quantize ``weight`` float32 [out, in] under ``hessian`` float32 [in, in]; both are
    overwritten. ``name`` is the layer's, for messages. Raises QuantizationError if the Hessian
    stays singular."""
    rows, columns = weight.shape
    size = settings.group_length(columns)
    scale, zero = weight.new_empty(2, rows, columns // size)
    if settings.group_size == WHOLE_ROW:  # scales of the weights before any is rounded
        scale[:], zero[:] = find_params(weight[:, None], settings)
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1  # any value will do: the column is 0
    weight[:, dead] = 0
    order, rest = _order(diagonal, settings, size), weight
    if order is not None:
        hessian, rest = hessian[order][:, order], weight[:, order]
    factor, damp = _damped_factor(hessian, settings, name)
    codes, left_looking = torch.empty_like(rest), LEFT_LOOKING[rest.device.type]
    column = torch.arange(columns, device=rest.device)
    group = column // size - column // WIDTH * WIDTH // size  # after the block's first
    for start in range(0, columns, WIDTH):
        end = reach = min(start + WIDTH, columns)
        begin = -(-start // size) * size  # first column of the first group of this block
        count = len(range(begin, end, size)) if settings.group_size != WHOLE_ROW else 0
        if count:
            reach = max(end, begin + count * size)
        if left_looking:
            work, upper = _corrected(rest, factor, start, reach)
        else:
            work, upper = rest[:, start:reach], factor[start:reach, start:reach]
        if count:
            groups = work[:, begin - start :][:, : count * size].reshape(rows, count, size)
            new = slice(begin // size, begin // size + count)
            scale[:, new], zero[:, new] = find_params(groups, settings)
        work, upper = work[:, : end - start], upper[: end - start, : end - start]
        of_block = slice(start // size, -(-reach // size))
        codes[:, start:end], errors = _block(
            work, upper, scale[:, of_block], zero[:, of_block], group[start:end], settings.num_bits
        )
        if left_looking:
            rest[:, start:end] += errors @ upper - work
        else:
            rest[:, end:] -= errors.matmul(factor[start:end, end:])
    grouped = codes.view(rows, -1, size)
    quantized = (scale[..., None] * (grouped - zero[..., None])).view(rows, columns)
    inverse = None if order is None else torch.argsort(order)
    if inverse is not None:
        quantized = quantized[:, inverse]
    if settings.order == "group-aware":  # groups are stored in the order of their columns
        groups = torch.argsort(order[::size] // size)
        codes, scale, zero, inverse = codes[:, inverse], scale[:, groups], zero[:, groups], None
    return GPTQResult(
        weight=quantized, codes=codes, scale=scale, zero=zero, order=inverse, damp=damp
    )


def _order(diagonal: Tensor, settings: Gptq, size: int) -> Tensor | None:
    """Return the order in which columns are quantized, int64 [in], from the Hessian's diagonal;
    None for the stored order. ``size``: weights per group."""
    if settings.order == "activation":
        return torch.argsort(diagonal, descending=True)
    if settings.order == "column":
        return None
    # Gafni, Karnieli, Hanani 2025, arXiv 2505.14638: within groups, and groups by their largest
    groups = diagonal.view(-1, size)
    values, local = torch.sort(groups, dim=1, descending=True)
    group_order = torch.argsort(values[:, 0], descending=True, stable=True)
    starts = torch.arange(len(groups), device=local.device) * size
    return (local + starts[:, None])[group_order].reshape(-1)


def find_params(groups: Tensor, settings: Gptq) -> tuple[Tensor, Tensor]:
    """Return scale and zero, float32 [out, n], of ``groups`` [out, n, weights per group], as
    gptqmodel computes them: the range holds 0, and is −1 to 1 for a group of zeros. One exception:
    a symmetric group's range is always symmetric. Without negative weights gptqmodel's begins at 0;
    its upper half has no codes, and weights are clipped at about half of the largest."""
    largest = torch.full((), 2.0**settings.num_bits - 1, device=groups.device)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if settings.symmetric:
        high = torch.maximum(low.abs(), high)
        low = -high
    empty = (low == 0) & (high == 0)
    low, high = low.masked_fill(empty, -1.0), high.masked_fill(empty, 1.0)
    scale = (high - low) / largest  # a tensor: CUDA multiplies by the reciprocal of a number
    if settings.symmetric:
        return scale, torch.full_like(scale, 2.0 ** (settings.num_bits - 1))
    return scale, torch.round(-low / scale)


def _block(
    work: Tensor, upper: Tensor, scale: Tensor, zero: Tensor, group: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Quantize a block of up to 128 columns, ``work`` [rows, n], one column after the other.
    ``upper`` [n, n]: the block of the Cholesky factor. ``scale``, ``zero`` [rows, groups]: column i
    uses number ``group[i]``. Returns codes, and errors over the diagonal of ``upper``, both [rows,
    n]."""
    if work.is_cuda and TRITON:
        from qbench.quantizers import gptq_columns  # imports Triton

        with torch.cuda.device(work.device):  # Triton launches on the current one
            return gptq_columns.block(work, upper, scale, zero, group, bits)
    # a column's numbers side by side: a copy, since the rank-1 updates change it
    work, scale, zero = (
        t.T.clone(memory_format=torch.contiguous_format) for t in (work, scale, zero)
    )
    codes, errors = torch.empty_like(work), torch.empty_like(work)
    for i, number in enumerate(group.tolist()):
        column, step, middle = work[i], scale[number], zero[number]
        codes[i] = code = packed.nearest(column, step, middle, bits)
        errors[i] = error = (column - step * (code - middle)) / upper[i, i]
        work[i:] -= error * upper[i, i:, None]
    return codes.T, errors.T
