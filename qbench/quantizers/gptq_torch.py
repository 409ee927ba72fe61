"""Our own small GPTQ in PyTorch: the library's cross-check, and for shapes that it refuses.

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ (2022), algorithm 1. With the Hessian H of a layer's
inputs, columns are rounded one by one; each column's error, divided by its diagonal entry of the
Cholesky factor of H⁻¹, is taken from the columns still to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers import packed
from qbench.quantizers.blocks import Walk, first_states, forward, hessian, walk
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import Progress
from qbench.quantizers.linear import Tensors, linears, plain
from qbench.quantizers.replay import replaying

if TYPE_CHECKING:
    from qbench.quantizers.weights import Gptq

BLOCK = 128  # columns updated at once; the others lag behind until it is done


def quantize(
    model: nn.Module, settings: Gptq, calibration: Calibration, progress: Progress
) -> tuple[dict[str, Tensors], str]:
    """What is to be stored for each linear layer, and what did it; ``model`` is overwritten.

    Raises QuantizationError for odd shapes, or a Hessian that ``damp`` does not make regular.
    """
    layers = linears(model, settings.ignore)
    route = walk(model, layers, calibration, settings.batch_size)
    final: set[nn.Module] = set()
    with replaying(route, layers.values(), final):
        states = list(first_states(model, route, calibration, settings.batch_size))
        return _block_by_block(route, states, settings, progress, final), "our own GPTQ"


def _block_by_block(
    route: Walk,
    states: list[Tensor],
    settings: Gptq,
    progress: Progress,
    final: set[nn.Module],
) -> dict[str, Tensors]:
    """What is to be stored for each layer; the layers are overwritten, and added to ``final``."""
    result: dict[str, Tensors] = {}
    for index, block in enumerate(route.blocks):
        path, groups = f"{route.root}.{index}", route.groups[index]
        batches = route.batches(index, states)
        states.clear()
        if not settings.true_sequential:  # all see the inputs of the unquantized block
            hessians = [hessian(block, block.get_submodule(group[0]), batches) for group in groups]
        for group_index, group in enumerate(groups):
            progress(path, (index + group_index / len(groups)) / len(route.blocks))
            if settings.true_sequential:
                moments = hessian(block, block.get_submodule(group[0]), batches)
            else:
                moments = hessians[group_index]
            if not moments.any():
                raise QuantizationError(
                    f"{settings.name}: {path}.{group[0]}: no calibration text reaches it (an "
                    "expert that is never chosen?); calibrate on more samples, or leave it out: "
                    f"ignore: [{path}.{group[0]}]"
                )
            factor, order = _factor(moments, settings, f"{path}.{group[0]}")
            layers = [block.get_submodule(name) for name in group]
            # Rows are independent: layers with one Hessian are solved as one.
            together = torch.cat([layer.weight for layer in layers])
            solved = _solve(together, moments, factor, order, settings)
            heights = [layer.out_features for layer in layers]
            for name, layer, tensors in zip(group, layers, _split(solved, heights), strict=True):
                layer.weight.data = packed.from_packed(plain(layer), tensors, settings).dequantize()
                result[f"{path}.{name}"] = tensors
            final.update(layers)
        states.extend(forward(block, hidden, rest) for hidden, rest in batches)
    return result


def _factor(moments: Tensor, settings: Gptq, name: str) -> tuple[Tensor, Tensor | None]:
    """Upper Cholesky factor of H⁻¹ [in, in], and the order of its columns where not natural."""
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1  # inputs that are never on: any value does
    order = torch.argsort(diagonal, descending=True) if settings.desc_act else None
    diagonal += settings.damp * diagonal.mean()
    if order is not None:
        damped = damped[order][:, order]
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True), order
    except torch.linalg.LinAlgError:
        raise QuantizationError(
            f"{settings.name}: {name}: the Hessian is singular with damp {settings.damp:g}; "
            "raise damp, or calibrate on more samples"
        ) from None


def _split(tensors: Tensors, heights: list[int]) -> list[Tensors]:
    """Rows of layers solved as one back to each; the order of columns is common to all."""
    parts = {
        name: [tensor] * len(heights) if name == "order" else tensor.split(heights)
        for name, tensor in tensors.items()
    }
    return [{name: part[i].clone() for name, part in parts.items()} for i in range(len(heights))]


@torch.no_grad()
def _solve(
    weight: Tensor, moments: Tensor, factor: Tensor, order: Tensor | None, settings: Gptq
) -> Tensors:
    """Round ``weight`` [out, in] against ``moments``, whose ``factor`` is in ``order``."""
    rest = weight.detach().float().T.contiguous()  # [in, out]: a column of the weight is one run
    rest[moments.diagonal() == 0] = 0
    if order is not None:
        rest = rest[order]
    columns = rest.shape[0]
    size = settings.group_length(columns)
    codes = torch.empty_like(rest)
    scales, zeros = [], []
    step = size if size >= BLOCK else BLOCK // size * size  # no group crosses a block's border
    for start in range(0, columns, step):
        end = min(start + step, columns)
        now, local = rest[start:end], factor[start:end, start:end]
        errors = torch.empty_like(now)
        for i in range(end - start):
            if i % size == 0:
                scale, zero = packed.grid(
                    now[i : i + size].T, settings.num_bits, symmetric=settings.symmetric
                )
                scales.append(scale)
                zeros.append(zero)
                scale, zero = scale[:, 0], zero[:, 0]
            codes[start + i] = code = packed.nearest(now[i], scale, zero, settings.num_bits)
            errors[i] = (now[i] - (code - zero) * scale) / local[i, i]
            now[i + 1 :].addr_(local[i, i + 1 :], errors[i], alpha=-1)
        rest[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    tensors = packed.pack(codes.T, torch.cat(scales, 1), torch.cat(zeros, 1), settings.num_bits)
    if order is not None:
        tensors["order"] = torch.argsort(order).to(torch.int32)
    return tensors
