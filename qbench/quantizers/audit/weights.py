"""Measure whether each weight matrix is quantized as the settings say, or left as it was. A layer's
weight is read off its own forward pass, which is given the identity; what its method says that it
stored must agree. A layer is quantized if its method has evidence that it is, whatever its
class."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from qbench.errors import first_line, some
from qbench.files import PART, digest_of_parts
from qbench.progress import Advance
from qbench.quantizers.calibration import watch_inputs
from qbench.quantizers.config import PackedWeight, QuantizationConfig, WeightSettings, matching
from qbench.quantizers.linear import (
    KEPT,
    Matrix,
    QuantizedEmbedding,
    layer_of,
    matrices,
    matrices_size,
    numbers,
    others,
    values,
)
from qbench.records import ModuleAudit
from qbench.streaming import load_block

MOST_UNQUANTIZED = 0.01  # of all weights: routers, convolutions and the like may stay as they are
SIZES = (1.0, 1 / 16, 1 / 256, 16.0)  # of inputs that read a weight
ROWS = 4096  # of the identity at once: a layer dequantizes in every forward
MOST_ZEROED = 0.01  # share of a layer's squared products that columns of zeros may lose
ENDS = {"its embeddings": "get_input_embeddings", "its LM head": "get_output_embeddings"}
ROUNDED = 0.01  # relative, of what is no weight matrix, in another dtype
MOST_MEAN_ERROR = 0.5  # |mean| / RMS of the errors; a zero point off by one gives near 1
MEAN_SIGMAS = 5.0  # standard errors (1/√n) of that quotient over few numbers
OTHER_ROWS = 0.05  # share of rows whose gain may be far from 1
LEAST_COLUMNS = 32  # of a matrix whose rows are judged one by one
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of layers' inputs
NEARER = 0.9  # of a relative error; of rounding alone, fitted factors take off less
MOST_FITTED = 0.7  # relative error after fitted factors; unrelated matrices keep nearly 1


class LayerResult(NamedTuple):
    """Holds the measurements of one quantized layer."""

    audit: ModuleAudit
    problems: list[str]
    error_squared: float
    norm_squared: float
    factor: Tensor | None  # [out, in], moved into this layer and to be taken off in its neighbours
    # Of columns that were set to zero: which, bool [in]; the sum of the original's squared weights
    # per column, float32 [in]; the share of squared products that may be lost with them
    zeroed: tuple[Tensor, Tensor, float] | None


def measure_weights(
    original: nn.Module,
    originals: Mapping[str, Matrix],
    quantized: nn.Module,
    stored: Mapping[str, Callable[[], PackedWeight]],
    config: QuantizationConfig,
    probe: Tensor,
    input_dtypes: Mapping[str, torch.dtype],
    progress: Advance,
) -> tuple[dict[str, Any], list[str]]:
    """Compare the weights of ``quantized`` with ``originals``, the matrices of ``original`` by
    name. Return fields of an ``Audit``, and a line per problem. ``stored``: what ``evidence_of``
    gives of the weights; ``probe``: token ids [B, T]; ``input_dtypes``: dtype of each layer's
    input, see ``recorded_dtypes``."""
    if config.weights is None:
        dtype = getattr(torch, config.compute_dtype)
        fields = {"bits": None, "coverage": 0.0, "weight_error": 0.0, "levels": 0}
        fields["bits_per_weight"] = 8.0 * dtype.itemsize
        problems = _changed_matrices(original, originals.values(), quantized, dtype)
        ends, changed = _changed_others(original, quantized, config, ())
        return fields, problems + ends + changed
    because, problems = _coverage(original, originals, stored, config)
    unquantized = [originals[name] for name in because]
    problems += _changed_matrices(original, unquantized, quantized, None)
    ends, changed = _changed_others(original, quantized, config, stored)
    results: list[LayerResult] = []
    rescaled = 0
    names = [name for name in originals if name in stored]
    for done, name in enumerate(names):
        progress(done, len(names))
        try:
            packed = stored[name]()
            load_block(original, name)
            result = measure(
                originals[name],
                layer_of(quantized, name),
                packed,
                config.weights.for_layer(name),
                rescales=config.weights.prequantized and bool(changed),
            )
            if result.factor is not None:  # the original gets the same factors
                originals[name].weight.data.mul_(result.factor)
                rescaled += 1
            results.append(result._replace(factor=None))  # as large as the weight
        except Exception as error:  # a broken layer may raise anything
            problems.append(f"{name}: cannot be measured: {first_line(error)}")
    problems += [line for result in results for line in result.problems]
    problems += [
        f"{name}: its inputs are {dtype}, as if the model cast them to the weight's dtype; add "
        f"{_word(name)} to ignore"
        for name, dtype in input_dtypes.items()
        if dtype not in DTYPES
    ]
    if zeroed := {r.audit.name: r.zeroed for r in results if r.zeroed is not None}:
        problems += _lost_products(original, zeroed, probe)
    problems += ends if rescaled else ends + changed
    modules = tuple(result.audit for result in results)
    total = matrices_size(originals.values())
    covered = sum(module.parameters for module in modules)
    digests = sorted(f"{module.name} {module.digest}\n" for module in modules)
    bits = sum(module.bits_per_weight * module.parameters for module in modules)
    squares = zip(*((r.error_squared, r.norm_squared) for r in results), strict=True)
    return {
        "bits": config.weights.num_bits,
        "coverage": covered / total if total else 0.0,
        "bits_per_weight": bits / covered if covered else 0.0,
        "weight_error": relative_error(*map(sum, squares)) if results else 0.0,
        "levels": max((module.levels for module in modules), default=0),
        "rescaled": rescaled,
        "left_out": tuple(because),
        "left_out_because": because,
        "modules": modules,
        "digest": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }, problems


def _coverage(
    original: nn.Module,
    originals: Mapping[str, Matrix],
    stored: Collection[str],
    config: QuantizationConfig,
) -> tuple[dict[str, str], list[str]]:
    """Return why each of the ``originals`` that is not ``stored`` is unquantized. Also return a
    line per problem: linear layers that the settings want quantized and are not, other matrices if
    they exceed ``MOST_UNQUANTIZED`` of all weights, and layers that should not be quantized."""
    ignored, because = matching(originals, config.ignore), {}
    for name, matrix in originals.items():
        if name in stored:
            continue
        if name in ignored:
            because[name] = "ignore of the settings"
        elif matrix.holder == KEPT:
            because[name] = KEPT
        else:
            what = "not quantized" if matrix.linear else "no linear layer"
            because[name] = f"{what} ({matrix.holder})"
    left = [originals[name] for name in because if name not in ignored]
    left.sort(key=lambda matrix: -matrix.weight.numel())
    layers = [matrix for matrix in left if matrix.linear]
    problems = [f"not quantized: {_some(layers)}"] if layers else []
    others = [matrix for matrix in left if not matrix.linear and matrix.holder != KEPT]
    total = matrices_size(originals.values())
    if matrices_size(others) > MOST_UNQUANTIZED * total:
        problems.append(
            f"not quantized: {_some(others)}, {matrices_size(others) / total:.1%} of all "
            f"weights; {config.method} takes linear layers only: set ignore: "
            f"[{', '.join(dict.fromkeys(_word(matrix.name) for matrix in others))}] to allow it"
        )
    for name in stored:
        weight = held(original, f"{name}.weight")  # of one of the originals under another name too
        matrix = name in originals or any(m.weight is weight for m in originals.values())
        if name in ignored or (not config.weights.prequantized and not matrix):
            problems.append(f"{name}: quantized, though the settings leave it out")
    return because, problems


def _changed_matrices(
    original: nn.Module,
    unquantized: Iterable[Matrix],
    quantized: nn.Module,
    dtype: torch.dtype | None,
) -> list[str]:
    """Return a line per matrix of ``unquantized`` that differs from the original's. ``dtype``: that
    of all weights if no layer is quantized, else None."""
    after, lines = matrices(quantized), []
    for matrix in unquantized:
        load_block(original, matrix.name)
        load_block(quantized, matrix.name)
        weight = after[matrix.name].weight if matrix.name in after else None
        if dtype and (weight is None or type(weight.data) is not Tensor or weight.dtype != dtype):
            kind = str(dtype).removeprefix("torch.")
            lines.append(f"{matrix.name}: not a plain weight in {kind}")
        elif weight is None or not _same(weight, matrix.weight):
            what = "not the original weights" if dtype else "neither quantized nor the original"
            lines.append(f"{matrix.name}: {what}")
    return lines


def _changed_others(
    original: nn.Module, quantized: nn.Module, config: QuantizationConfig, stored: Collection[str]
) -> tuple[list[str], list[str]]:
    """Compare the parameters that are not weight matrices. Return a line per changed embedding or
    LM head and per bias that the original lacks; and a line per changed norm or other bias, which
    may differ if factors were moved into them. A published copy may hold all of them in another
    dtype, and embeddings and LM head rounded as its quantized layers, ``stored``, are."""
    weights, before, after = config.weights, others(original), others(quantized)
    copied = weights is not None and weights.prequantized
    whose = "what the transform makes of the original" if config.transform else "the original's"
    names = {id(module): name for name, module in quantized.named_modules()}
    pairs: dict[str, tuple[Tensor, Tensor | None, bool]] = {}  # original, quantized, rounded
    ends: set[int] = set()
    of_ends: list[str] = []
    for what, getter in ENDS.items():
        module, holder = (getattr(model, getter)() for model in (original, quantized))
        if module is None:
            continue
        ends.add(id(module.weight))
        layer = holder.layer if isinstance(holder, QuantizedEmbedding) else holder
        if not copied and {names[id(holder)], names.get(id(layer))} & set(stored):
            if layer is not holder and not _looks_up(holder, module, weights):
                of_ends.append(f"{what}: not looked up in the weight that its layer multiplies by")
            continue  # the layer is measured as others are
        weight, rounded = getattr(holder, "weight", None), names.get(id(holder)) in stored
        if rounded and (weight is None or not weight.is_floating_point()):
            weight = forward_weight(holder, module.weight.shape[1], module.weight.dtype)
        pairs[what] = module.weight, weight, rounded or (copied and weights.ends_quantized)
    pairs |= {
        name: (tensor, after.get(name, held(quantized, name)), False)
        for name, tensor in before.items()
        if id(tensor) not in ends
    }
    of_others: list[str] = []
    for what, (tensor, changed, rounded) in pairs.items():
        lines = of_ends if what in ENDS else of_others
        if not copied:
            if changed is None or not _same(changed, tensor.to(changed.device)):
                lines.append(f"{what}: not {whose}")
            continue
        allowed, off = weights.error_bound if rounded else ROUNDED, math.inf
        if changed is not None and changed.shape == tensor.shape:
            off = relative(values(changed), tensor.to(changed.device))
        if not off <= allowed:
            how = f"{off:.2g} off" if off < math.inf else "missing, or of another shape than"
            lines.append(f"{what}: {how} the original's, as if it were another model's")
    for name in stored:
        bias = held(quantized, f"{name}.bias")
        if bias is not None and f"{name}.bias" not in before and bool(bias.any()):
            of_ends.append(f"{name}.bias: the original has none")
    return of_ends, of_others


def _looks_up(holder: QuantizedEmbedding, original: nn.Module, settings: WeightSettings) -> bool:
    """Return whether ``holder`` gives, up to rounding, the rows of the weight that its layer's
    forward multiplies by, as ``original`` looks them up."""
    kept, ids = original.weight, torch.arange(len(original.weight), device=original.weight.device)
    weight = forward_weight(holder.layer, kept.shape[1], kept.dtype)
    off = relative(holder(ids), functional_call(original, {"weight": weight}, (ids,)))
    return off <= settings.agreement[str(kept.dtype).removeprefix("torch.")][0]


def held(model: nn.Module, name: str) -> Tensor | None:
    """Return the parameter or buffer ``name`` of ``model``; None if it has none."""
    path, _, part = name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), part, None)
    except AttributeError:
        return None


def _same(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether ``tensor`` is ``expected`` cast to its dtype; NaN equals NaN."""
    if tensor.shape != expected.shape:
        return False
    tensor, cast = values(tensor), values(expected).to(tensor.dtype)
    return torch.equal(tensor, cast) or bool(
        ((tensor == cast) | (tensor.isnan() & cast.isnan())).all()
    )


@torch.no_grad()
def measure(
    matrix: Matrix,
    module: nn.Module,
    stored: PackedWeight,
    settings: WeightSettings,
    *,
    rescales: bool = False,
) -> LayerResult:
    """Compare the weight in the forward pass of ``module``, and its ``stored`` codes, with the
    original ``matrix`` [out, in]. ``rescales``: factors may have been moved to other layers."""
    rows, columns = matrix.weight.shape
    expected, factor = matrix.weight.float(), None
    weight, size = read_weight(module, matrix, settings)
    dead = (weight == 0).all(dim=0) & (expected != 0).any(dim=0)
    if rescales and weight.isfinite().all():
        expected, factor = fit(weight.float(), expected, settings.error_bound)
    difference = weight.float() - expected
    kept = ~dead if settings.needs_calibration else torch.ones_like(dead)  # see _lost_products
    products, squares = (weight * expected * kept).sum(1), (expected.square() * kept).sum(1)
    bits = getattr(settings, "least_bits", settings.num_bits)
    far = (products - squares).abs() > min(0.75, 0.1 + 2.0 ** (1 - bits)) * squares
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(16, columns, generator=draw).mul(2).sub(1).mul(size)
    x = x.to(weight.device, matrix.weight.dtype)
    product = x.float() @ weight.float().T
    product = product if module.bias is None else product + module.bias.float()
    unpacked = weight if stored.dequantize is None else stored.dequantize().to(weight.device)
    # copied beside the measuring, for which "numbers" waits: each copy of its own would wait too
    host = {
        name: tensor.detach().contiguous().to("cpu", non_blocking=tensor.device == weight.device)
        for name, tensor in stored.tensors.items()
    }
    measured = numbers(
        {
            "error": difference.square().sum(),
            "norm": expected.square().sum(),
            "product": (weight * expected).sum(),
            "dead": dead.sum(),
            "levels": levels(stored.groups(weight)),
            "rows": (squares > 0).sum(),
            "other_rows": (far & (squares > 0)).sum(),
            "kept": kept.sum() * rows,
            "kept_error": (difference * kept).square().sum(),
            "kept_norm": (expected * kept).square().sum(),
            "kept_sum": (difference * kept).sum(),
            **_squares("stored", weight, unpacked),
            **_squares("random", module(x), product),
        }
    )
    error_squared, norm_squared = measured["error"], measured["norm"]
    finite = math.isfinite(error_squared)
    audit = ModuleAudit(
        name=matrix.name,
        kind=type(module).__name__,
        parameters=expected.numel(),
        bits_per_weight=8 * sum(t.nbytes for t in stored.tensors.values()) / expected.numel(),
        weight_error=relative_error(error_squared, norm_squared),
        gain=measured["product"] / norm_squared if finite and norm_squared else None,
        levels=int(measured["levels"]),
        dead_inputs=int(measured["dead"]),
        digest=digest(host),
    )
    problems = _problems(audit, measured, matrix, stored, settings)
    if error_squared == 0 and not settings.unrounded and not settings.prequantized:
        dtype = str(matrix.weight.dtype).removeprefix("torch.")
        # Of codes of 8 bits beside a forward that multiplies by the original, many small numbers
        # differ, though the norm differs hardly more than bfloat16 rounds
        off = (unpacked - weight).abs() > 4 * settings.agreement[dtype][0] * weight.abs()
        exact = off.sum() <= off.numel() // 1000
        if stored.dequantize is None:
            exact = levels(stored.groups(matrix.weight)) <= 2**settings.num_bits
        if not exact:
            problems.append(f"{matrix.name}: the weights are the original's: nothing was quantized")
    zeroed = None
    if settings.needs_calibration and audit.dead_inputs:
        of_columns = expected.square().sum(dim=0)
        lost = float(of_columns[dead].sum())
        rounding = max(0.0, error_squared - lost) / max(norm_squared - lost, 1e-30)
        zeroed = dead, of_columns, max(MOST_ZEROED, rounding)
    return LayerResult(audit, problems, error_squared, norm_squared, factor, zeroed)


def _problems(
    audit: ModuleAudit,
    measured: Mapping[str, float],
    matrix: Matrix,
    stored: PackedWeight,
    settings: WeightSettings,
) -> list[str]:
    """Return a line per problem of a layer: error, levels, bits or agreement out of bounds."""
    problems, (rows, columns) = [], matrix.weight.shape
    most = 2**settings.num_bits
    # Which weights of a copy share a scale is not read
    if audit.levels > most and not settings.prequantized:
        problems += [f"{audit.levels} levels in a group, {settings.num_bits:g} bits have {most:g}"]
    # Beside the codes: scales, zeros, an index of the columns; 1 %, and padding of small layers
    beside = settings.shared_bits(rows, columns) + 32 / rows
    least = 0.0 if settings.prequantized else 0.99 * settings.num_bits
    most = 1.01 * (settings.num_bits + beside) + 512 / (rows * columns)
    if not least <= audit.bits_per_weight <= most:
        problems.append(
            f"stores {audit.bits_per_weight:.2f} bits per weight, {settings.name} should take "
            f"{settings.num_bits:g} to {most:.2f}"
        )
    if not math.isfinite(measured["error"]):
        problems.append("weights that are not finite")
        return [f"{audit.name}: {line}" for line in problems]
    error = relative_error(measured["kept_error"], measured["kept_norm"])
    if error > settings.error_bound:
        problems.append(
            f"weight error {error:.2f}; {settings.name} should stay under {settings.error_bound:g}"
        )
    squared = measured["kept_error"] * measured["kept"]
    lean = abs(measured["kept_sum"]) / math.sqrt(squared) if squared else 0.0
    most = max(MOST_MEAN_ERROR, MEAN_SIGMAS / math.sqrt(max(1, measured["kept"])))
    # Groups with no more values than a code need no rounding, and their errors may have a mean
    if lean > most and levels(stored.groups(matrix.weight)) > 2**settings.num_bits:
        problems.append(
            f"the mean error is {lean:.2f} of the errors' size, as if a zero point were wrong"
        )
    share = measured["other_rows"] / measured["rows"] if measured["rows"] else 0.0
    if share > OTHER_ROWS and columns >= LEAST_COLUMNS:
        problems.append(
            f"{share:.0%} of its rows are not the original's rounded: their gain, "
            "⟨row, original⟩ / ‖original‖², is far from 1, as if rows or scales were exchanged"
        )
    on_identity, on_random = settings.agreement[str(matrix.weight.dtype).removeprefix("torch.")]
    off = relative_error(measured["stored_error"], measured["stored_norm"])
    if not off <= on_identity:
        problems.append(f"the forward's weights are {off:.2g} off the stored ones")
    off = relative_error(measured["random_error"], measured["random_norm"])
    if not off <= on_random:
        problems.append(f"on random inputs the forward is {off:.2g} off its own weights")
    return [f"{audit.name}: {line}" for line in problems]


def fit(weight: Tensor, expected: Tensor, bound: float) -> tuple[Tensor, Tensor | None]:
    """Return ``expected`` [out, in] times the factors of rows and columns that bring it closest to
    ``weight``, by least squares, and these factors [out, in]; (``expected``, None) if factors
    hardly reduce the difference, or not below the relative error ``bound``. AWQ and SmoothQuant
    move a factor per column into the layer before; ``audit.compare`` checks that the factors
    cancel.

    Errors are counted after scaling, as weights were rounded: a column whose input is nearly zero
    has a tiny factor, over which its rounding error would be divided. A column of zeros has the
    factor 0, but counts as lost with the size that the others have."""
    factor = [torch.ones_like(weight[:, :1]), torch.ones_like(weight[:1])]
    for step in range(8):
        other = factor[step % 2] * expected
        axis = 1 - step % 2
        factor[axis] = (weight * other).sum(1 - axis, keepdim=True) / other.square().sum(
            1 - axis, keepdim=True
        ).clamp(min=1e-30)
    product = factor[0] * factor[1]
    zeros = (weight == 0).all(dim=0)
    scaled = expected * product.where(~zeros, product[:, ~zeros].square().mean().sqrt())
    nearest = min(bound, MOST_FITTED, NEARER * relative(weight, expected))
    return (scaled, product) if relative(weight, scaled) <= nearest else (expected, None)


def levels(groups: Tensor) -> Tensor:
    """Return the most distinct values in a row of ``groups`` [groups, weights per group], a scalar
    on their device."""
    most = []
    for part in groups.split(max(1, 2**24 // groups.shape[1])):
        if part.is_cuda:
            ordered = part.sort(dim=1).values
        else:  # twenty times as fast as torch's
            wide = part.float() if part.element_size() == 2 else part
            ordered = torch.from_numpy(np.sort(wide.numpy(), axis=1))
        most.append((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).max() + 1)
    return torch.stack(most).max()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of ``tensors`` in the order of their
    names; tensors of more than ``PART`` bytes are hashed in parts."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total.update(plain if plain.nbytes <= PART else digest_of_parts(plain).encode())
    return total.hexdigest()


@torch.no_grad()
def read_weight(
    module: nn.Module, matrix: Matrix, settings: WeightSettings
) -> tuple[Tensor, float]:
    """Return the weight that the forward pass of ``module`` multiplies by, and the size of the
    inputs that it was read with: 1, unless a copy rounds its inputs and the weight is too far from
    ``matrix``. A static scale may clip such inputs; then the best of several sizes is taken."""
    original, best = matrix.weight, None
    if getattr(settings, "activations", None) is None:
        return forward_weight(module, original.shape[1], original.dtype), 1.0
    for size in SIZES:
        weight = forward_weight(module, original.shape[1], original.dtype, size)
        off = float((weight.float() - original.float()).norm() / original.float().norm())
        if best is None or off < best[0]:
            best = off, weight, size
        if off <= settings.error_bound:
            break
    return best[1:]


def forward_weight(
    module: nn.Module, in_features: int, dtype: torch.dtype, size: float = 1.0
) -> Tensor:
    """Return the weight [out, in] that ``module``'s forward pass multiplies by, in the dtype of its
    output. Each row of the identity in ``dtype``, times ``size``, picks one column, so only the
    weight itself is rounded. A bias is set to 0 meanwhile."""
    attributes = (value for value in vars(module).values() if isinstance(value, Tensor))
    device = next(t.device for t in (*module.parameters(), *module.buffers(), *attributes))
    bias = None if module.bias is None else module.bias.detach().clone()
    if bias is not None:  # added and taken off again, it would round; a library may keep its place
        module.bias.data.zero_()
    try:
        rows = []
        for start in range(0, in_features, ROWS):
            count = min(ROWS, in_features - start)
            identity = torch.zeros(count, in_features, dtype=dtype, device=device)
            identity[:, start:].fill_diagonal_(size)
            rows.append(module(identity))
    finally:
        if bias is not None:
            module.bias.data.copy_(bias)
    return torch.cat(rows).T / size


def _lost_products(
    original: nn.Module, zeroed: Mapping[str, tuple[Tensor, Tensor, float]], probe: Tensor
) -> list[str]:
    """Return a line per layer whose zeroed columns carry more of its squared products on ``probe``
    [B, T] than allowed. GPTQ zeroes columns whose inputs are zero on all calibration text, as of a
    softpick head that is silent; and few bits round a whole column of small weights to zero."""
    problems = []

    def look(name: str, inputs: Tensor) -> None:
        zeros, squares, allowed = zeroed[name]
        products = inputs.float().square().flatten(0, -2).sum(0) * squares
        share = float(products[zeros].sum() / products.sum().clamp_min(1e-30))
        if not share <= allowed:
            problems.append(
                f"{name}: {int(zeros.sum())} of {len(zeros)} columns are zeros, which loses "
                f"{share:.1%} of the squared products, more than {allowed:.1%}: calibrate on more "
                "text"
            )

    watch_inputs(original, {n: original.get_submodule(n) for n in zeroed}, look, [probe])
    return problems


@contextmanager
def recorded_dtypes(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, torch.dtype]]:
    """Yield a mapping that receives, by name, the dtype of the input of each of the modules
    ``names`` of ``model`` as it runs in the body."""
    dtypes: dict[str, torch.dtype] = {}

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        dtypes.update((name, x.dtype) for x in arguments[:1])

    with ExitStack() as stack:
        for name in names:
            layer, hook = layer_of(model, name), partial(record, name)
            stack.enter_context(layer.register_forward_pre_hook(hook, prepend=True))
        yield dtypes


def failing_layer(error: BaseException, model: nn.Module) -> str:
    """Return ``<module's name>: <remedy>: ``, the beginning of a message, if ``error`` is about a
    missing attribute of a module of ``model``; "" for other errors."""
    module = getattr(error, "obj", None)
    name = next((name for name, each in model.named_modules() if each is module), None)
    if not isinstance(error, AttributeError) or not name:
        return ""
    return f"{name}: the model reads {error.name} of it directly; add {_word(name)} to ignore: "


def relative(tensor: Tensor, expected: Tensor) -> float:
    """Return ‖tensor − expected‖ / ‖expected‖ as ``relative_error`` does."""
    return relative_error(*numbers(_squares("", tensor, expected)).values())


def _squares(prefix: str, tensor: Tensor, expected: Tensor) -> dict[str, Tensor]:
    """Return the sums of squares of ``tensor`` − ``expected`` and of ``expected``, in float32."""
    expected = expected.float()
    error = (tensor.float() - expected).square().sum()
    return {f"{prefix}_error": error, f"{prefix}_norm": expected.square().sum()}


def relative_error(error_squared: float, norm_squared: float) -> float:
    """Return ‖y − x‖ / ‖x‖ of the sums of squares ‖y − x‖² and ‖x‖²; infinite if one is not finite,
    or if x is 0 and y is not."""
    if not math.isfinite(error_squared) or not math.isfinite(norm_squared):
        return math.inf
    if not norm_squared:
        return math.inf if error_squared else 0.0
    return math.sqrt(error_squared / norm_squared)


def _word(name: str) -> str:
    """Return how ``ignore`` names a matrix: ``experts``, or the last part of its name."""
    parts = name.split(".")
    return "experts" if "experts" in parts else parts[-1]


def _some(matrices: list[Matrix]) -> str:
    """Return names and shapes of the first few ``matrices`` as text."""
    return some([f"{m.name} {list(m.weight.shape)}" for m in matrices], 3)
