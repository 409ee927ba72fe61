"""Measure whether every weight matrix that should be quantized is, to what its settings say.

Each number is taken from what scoring will run: a layer's weight is read off its own forward pass,
which is given the identity, and the layer's inputs in the model's own forward pass are looked at.
What its method says that it stored must agree. A layer is quantized if its method has evidence
that it is, whatever its class.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qbench.errors import first_line, some
from qbench.files import PART, digest_of_parts
from qbench.quantizers.calibration import watch_inputs
from qbench.quantizers.config import PackedWeight, QuantizationConfig, WeightSettings, matching
from qbench.quantizers.linear import KEPT, Matrix, matrices, numbers, others, values
from qbench.quantizers.quantize import evidence_of
from qbench.records import ModuleAudit
from qbench.streaming import load_block

MOST_UNQUANTIZED = 0.01  # of all weights: routers, convolutions and the like may stay as they are
ROWS = 4096  # of the identity at once: a layer dequantizes in every forward
MOST_ZEROED = 0.01  # share of a layer's squared products that columns of zeros may lose
ENDS = {"its embeddings": "get_input_embeddings", "its LM head": "get_output_embeddings"}
ROUNDED = 0.01  # relative, of what is no weight matrix, in another dtype
MOST_MEAN_ERROR = 0.5  # |mean| / RMS of the errors; a zero point off by one gives near 1
MEAN_SIGMAS = 5.0  # of that quotient over few numbers, whose standard error is 1/√n
OTHER_ROWS = 0.05  # share of rows whose gain may be far from 1
LEAST_COLUMNS = 32  # of a matrix whose rows are judged one by one
INPUTS = 4  # rows of a layer's real inputs that are kept
REAL = 0.3  # relative, of products with them: int8 rounds large ones coarsely
NEARER = 0.9  # of a relative error; of rounding alone, fitted factors take off less
MOST_FITTED = 0.7  # relative error after fitted factors; unrelated matrices keep nearly 1


def measure_weights(
    original: nn.Module,
    wanted: Mapping[str, Matrix],
    quantized: nn.Module,
    config: QuantizationConfig,
    probe: Tensor,
    inputs: Mapping[str, Tensor],
) -> tuple[dict[str, Any], list[str]]:
    """Compare the weights of ``quantized`` with ``wanted``, the matrices of ``original``; return
    fields of an ``Audit``, and what is wrong. ``probe``: token ids [B, T]; ``inputs``: by layer the
    first rows that it was given, see ``recorded_inputs``."""
    if config.weights is None:
        dtype = getattr(torch, config.compute_dtype)
        fields = {"bits": None, "coverage": 0.0, "weight_error": 0.0, "levels": 0}
        fields["bits_per_weight"] = 8.0 * dtype.itemsize
        problems = _changed(original, wanted.values(), quantized, dtype)
        ends, changed = _others(original, quantized, config, ())
        return fields, problems + ends + changed
    stored = evidence_of(quantized, config, "weights")
    ignored, weights = matching(wanted, config.ignore), matrices_size(wanted.values())
    remaining = [matrix for name, matrix in wanted.items() if name not in stored]
    missing = [matrix for matrix in remaining if matrix.name not in ignored]
    because = {
        matrix.name: "ignore of the settings"
        if matrix.name in ignored
        else matrix.holder
        if matrix.holder == KEPT
        else f"{'not quantized' if matrix.linear else 'no linear layer'} ({matrix.holder})"
        for matrix in remaining
    }
    problems = _uncovered(missing, weights, config.method)
    problems += [
        f"{name}: quantized, though the settings leave it out"
        for name in stored
        if name in ignored
        or (not config.weights.prequantized and not _is_matrix_of(original, name, wanted))
    ]
    problems += _changed(original, remaining, quantized, None)
    ends, changed = _others(original, quantized, config, stored)
    rescales = config.weights.prequantized and bool(changed)
    modules: list[ModuleAudit] = []
    error_squared = norm_squared = 0.0
    rescaled = 0
    zeroed: dict[str, tuple[Tensor, Tensor, float]] = {}
    for name in (name for name in wanted if name in stored):
        try:
            packed = stored[name]()
            load_block(original, name)
            module = quantized.get_submodule(name)
            one, wrong, sums, factor, dead = measure(
                wanted[name],
                module,
                packed,
                config.weights,
                rescales=rescales,
                inputs=inputs.get(name),
            )
            if factor is not None:  # the original, which is consumed, with the same factors
                wanted[name].weight.data.mul_(factor)
                rescaled += 1
            if config.weights.needs_calibration and one.dead_inputs:
                norms = wanted[name].weight.float().square().sum(dim=0)
                lost = float(norms[dead].sum())
                rounding = max(0.0, sums[0] - lost) / max(sums[1] - lost, 1e-30)
                zeroed[name] = dead, norms, max(MOST_ZEROED, rounding)
            modules.append(one)
            error_squared, norm_squared = error_squared + sums[0], norm_squared + sums[1]
            problems += wrong
        except Exception as error:  # whatever a broken layer raises is what is wrong with it
            problems.append(f"{name}: cannot be measured: {first_line(error)}")
    if zeroed:
        problems += _missed(original, zeroed, probe)
    problems += ends if rescaled else ends + changed
    covered = sum(one.parameters for one in modules)
    bits = sum(one.bits_per_weight * one.parameters for one in modules)
    return {
        "bits": config.weights.num_bits,
        "coverage": covered / weights if weights else 0.0,
        "bits_per_weight": bits / covered if covered else 0.0,
        "weight_error": relative_error(error_squared, norm_squared),
        "levels": max((one.levels for one in modules), default=0),
        "rescaled": rescaled,
        "left_out": tuple(because),
        "left_out_because": because,
        "modules": tuple(modules),
        "digest": _digest({module.name: module.digest for module in modules}),
    }, problems


def _is_matrix_of(original: nn.Module, name: str, wanted: Mapping[str, Matrix]) -> bool:
    """Return whether ``name`` is a matrix of ``wanted``, or another name of one that is shared."""
    weight = held(original, f"{name}.weight")
    return name in wanted or any(one.weight is weight for one in wanted.values())


def _uncovered(missing: list[Matrix], weights: int, method: str) -> list[str]:
    """What is not quantized though the settings ask for it: any linear layer, and other matrices
    that are more than ``MOST_UNQUANTIZED`` of all ``weights`` together."""
    missing.sort(key=lambda matrix: -matrix.weight.numel())
    layers = [matrix for matrix in missing if matrix.linear]
    problems = [f"not quantized: {_some(layers)}"] if layers else []
    others = [matrix for matrix in missing if not matrix.linear and matrix.holder != KEPT]
    if matrices_size(others) > MOST_UNQUANTIZED * weights:
        problems.append(
            f"not quantized: {_some(others)}, {matrices_size(others) / weights:.1%} of all "
            f"weights; {method} takes linear layers only: set ignore: "
            f"[{', '.join(dict.fromkeys(_word(matrix.name) for matrix in others))}] to allow it"
        )
    return problems


def _changed(
    original: nn.Module,
    remaining: Iterable[Matrix],
    quantized: nn.Module,
    dtype: torch.dtype | None,
) -> list[str]:
    """Matrices that are not quantized and not the original's, a line each. ``dtype``: what all are
    plain weights in, where none is quantized."""
    after, lines = matrices(quantized), []
    for matrix in remaining:
        load_block(original, matrix.name)
        load_block(quantized, matrix.name)
        found = after[matrix.name].weight if matrix.name in after else None
        if dtype and (found is None or type(found.data) is not Tensor or found.dtype != dtype):
            lines.append(
                f"{matrix.name}: not a plain weight in {str(dtype).removeprefix('torch.')}"
            )
        elif found is None or not _same(found, matrix.weight):
            what = "not the original weights" if dtype else "neither quantized nor the original"
            lines.append(f"{matrix.name}: {what}")
    return lines


def _others(
    original: nn.Module,
    quantized: nn.Module,
    config: QuantizationConfig,
    stored: Collection[str],
) -> tuple[list[str], list[str]]:
    """What is no weight matrix and not the original's, a line each: embeddings, LM head, biases
    that the original lacks; and norms and other biases, which differ too where factors were moved
    into them. A copy of somebody's may hold all in another dtype, and embeddings and LM head
    rounded as its layers, which are ``stored``."""
    weights, known = config.weights, others(original)
    copied = weights is not None and weights.prequantized
    theirs = "what the transform makes of the original" if config.transform else "the original's"
    names = {id(module): name for name, module in quantized.named_modules()}
    pairs: dict[str, tuple[Tensor, Tensor | None, bool]] = {}
    for what, getter in ENDS.items():
        wanted, holder = (getattr(model, getter)() for model in (original, quantized))
        if wanted is None:
            continue
        found, rounded = getattr(holder, "weight", None), names.get(id(holder)) in stored
        if rounded and (found is None or not found.is_floating_point()):
            found = forward_weight(holder, wanted.weight.shape[1], wanted.weight.dtype)
        pairs[what] = wanted.weight, found, rounded or (copied and weights.ends_quantized)
    ends = {id(wanted) for wanted, *_ in pairs.values()}
    after = others(quantized)
    pairs |= {
        name: (wanted, after.get(name, held(quantized, name)), False)
        for name, wanted in known.items()
        if id(wanted) not in ends
    }
    problems: list[str] = []
    changed: list[str] = []
    for what, (wanted, found, rounded) in pairs.items():
        lines = problems if what in ENDS else changed
        if not copied:
            if found is None or not _same(found, wanted.to(found.device)):
                lines.append(f"{what}: not {theirs}")
            continue
        allowed, off = weights.error_bound() if rounded else ROUNDED, math.inf
        if found is not None and found.shape == wanted.shape:
            off = relative(values(found), wanted.to(found.device))
        if not off <= allowed:
            lines.append(f"{what}: {off:.2g} off the original's: is it another model's?")
    for name in stored:
        bias = held(quantized, f"{name}.bias")
        if bias is not None and f"{name}.bias" not in known and bool(bias.any()):
            problems.append(f"{name}.bias: the original has none")
    return problems, changed


def held(model: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer ``name`` of ``model``, if it has it."""
    path, _, part = name.rpartition(".")
    try:
        return getattr(model.get_submodule(path), part, None)
    except AttributeError:
        return None


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for a cast; NaN equals NaN."""
    if found.shape != wanted.shape:
        return False
    found, cast = values(found), values(wanted).to(found.dtype)
    return bool(((found == cast) | (found.isnan() & cast.isnan())).all())


@torch.no_grad()
def measure(
    matrix: Matrix,
    module: nn.Module,
    stored: PackedWeight,
    settings: WeightSettings,
    *,
    rescales: bool = False,
    inputs: Tensor | None = None,
) -> tuple[ModuleAudit, list[str], tuple[float, float], Tensor | None, Tensor]:
    """``module``, and what it says that it stores, against the unquantized ``matrix``: its audit,
    what is wrong with it, the squared norms of its error and of the matrix, the factors
    [out, in] that other layers must take off again, if it ``rescales`` and there are any, and which
    columns [in] became zeros."""
    rows, columns = matrix.weight.shape
    weight = forward_weight(module, columns, matrix.weight.dtype)
    wanted = matrix.weight.float()
    fitted, factor = weight.float(), None
    if rescales and weight.isfinite().all():
        fitted, factor = fit(fitted, wanted, settings.error_bound())
    difference = fitted - wanted
    dead = (weight == 0).all(dim=0) & (wanted != 0).any(dim=0)
    kept = ~dead if settings.needs_calibration else torch.ones_like(dead)  # see _missed
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, columns, generator=draw).to(weight.device, matrix.weight.dtype)
    known = weight if stored.dequantize is None else stored.dequantize()
    expected = x.float() @ weight.float().T
    if module.bias is not None:
        expected = expected + module.bias.float()
    products, squares = ((fitted * wanted) * kept).sum(1), (wanted.square() * kept).sum(1)
    bits = getattr(settings, "least_bits", settings.num_bits)
    far = (products - squares).abs() > min(0.75, 0.1 + 2.0 ** (1 - bits)) * squares
    real = {}
    if inputs is not None and inputs.is_floating_point():
        x_real = inputs.to(weight.device)
        right = x_real.float() @ weight.float().T
        if module.bias is not None:
            right = right + module.bias.float()
        real = _norms("real", module(x_real), right)
    found = numbers(
        {
            "error": difference.square().sum(),
            "rows": (squares > 0).sum(),
            "other_rows": (far & (squares > 0)).sum(),
            "norm": wanted.square().sum(),
            "product": (fitted * wanted).sum(),
            "dead": dead.sum(),
            "levels": _levels(stored.groups(weight)),
            "kept": kept.sum() * rows,
            "kept_error": (difference * kept).square().sum(),
            "kept_norm": (wanted * kept).square().sum(),
            "kept_sum": (difference * kept).sum(),
            **_norms("stored", weight, known.to(weight.device)),
            **_norms("random", module(x), expected),
            **real,
        }
    )
    error_squared, norm_squared = found["error"], found["norm"]
    finite = math.isfinite(error_squared)
    bits = 8 * sum(t.nbytes for t in stored.tensors.values())
    result = ModuleAudit(
        name=matrix.name,
        kind=type(module).__name__,
        parameters=wanted.numel(),
        bits_per_weight=bits / wanted.numel(),
        weight_error=relative_error(error_squared, norm_squared),
        gain=found["product"] / norm_squared if finite and norm_squared else None,
        levels=int(found["levels"]),
        dead_inputs=int(found["dead"]),
        digest=digest(stored.tensors),
    )
    problems = _wrong_storage(result, rows, columns, settings)
    if not finite:
        problems.append(f"{matrix.name}: weights that are not finite")
    else:
        few = levels(stored.groups(matrix.weight)) <= 2**settings.num_bits  # needs no rounding
        problems += _wrong_weight(result, found, settings, columns, few)
        problems += _disagreement(result, found, str(matrix.weight.dtype), settings)
    if inputs is not None and not inputs.is_floating_point():
        problems.append(
            f"{matrix.name}: its model gives it inputs of {inputs.dtype}, as if it cast them to "
            f"the weight's dtype: add {_word(matrix.name)} to ignore"
        )
    return result, problems, (error_squared, norm_squared), factor, dead


def fit(weight: Tensor, wanted: Tensor, bound: float) -> tuple[Tensor, Tensor | None]:
    """AWQ and SmoothQuant move a factor a column into what comes before, and that layer's rows by
    the same: ``weight`` without the factors that it has over ``wanted`` [out, in] by least squares,
    and these, [out, in]; as it is where that brings it little nearer, or not within ``bound``. That
    they cancel, ``audit.compare`` checks."""
    factor = [torch.ones_like(weight[:, :1]), torch.ones_like(weight[:1])]
    for step in range(8):
        other = factor[step % 2] * wanted
        axis = 1 - step % 2
        factor[axis] = (weight * other).sum(1 - axis, keepdim=True) / other.square().sum(
            1 - axis, keepdim=True
        ).clamp(min=1e-30)
    product = factor[0] * factor[1]
    fitted = weight / product.where(product.abs() > 1e-6, 1)
    good = relative(fitted, wanted) <= min(bound, MOST_FITTED, NEARER * relative(weight, wanted))
    return (fitted, product) if good else (weight, None)


def levels(groups: Tensor) -> int:
    """The most distinct values in a row of ``groups`` [number of groups, weights in a group]."""
    return int(_levels(groups))


def _levels(groups: Tensor) -> Tensor:
    most = [groups.new_ones((), dtype=torch.int64)]
    for part in groups.split(max(1, 2**24 // groups.shape[1])):
        ordered = part.sort(dim=1).values
        changes = (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
        if len(changes):
            most.append(changes.max() + 1)
    return torch.stack(most).max()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names; of more bytes than
    ``PART`` over ``digest_of_parts``."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total.update(plain if plain.nbytes <= PART else digest_of_parts(plain).encode())
    return total.hexdigest()


@torch.no_grad()
def forward_weight(module: nn.Module, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight that ``module``'s forward multiplies by: [out, in], in the dtype it answers in.

    A row of the identity picks one column, so no rounding but the weight's own takes part.
    """
    held = (value for value in vars(module).values() if isinstance(value, Tensor))
    device = next(t.device for t in (*module.parameters(), *module.buffers(), *held))
    bias = None if module.bias is None else module.bias.detach().clone()
    if bias is not None:  # added and taken off again, it would round; a library may keep its place
        module.bias.data.zero_()
    try:
        rows = []
        for start in range(0, in_features, ROWS):
            count = min(ROWS, in_features - start)
            identity = torch.zeros(count, in_features, dtype=dtype, device=device)
            identity[:, start:].fill_diagonal_(1)
            rows.append(module(identity))
    finally:
        if bias is not None:
            module.bias.data.copy_(bias)
    return torch.cat(rows).T


def _wrong_storage(
    result: ModuleAudit, rows: int, columns: int, settings: WeightSettings
) -> list[str]:
    problems, bits = [], settings.num_bits
    if result.levels > settings.levels:
        problems.append(
            f"{result.name}: {result.levels} levels in a group, "
            f"{bits:g} bits have {settings.levels}"
        )
    least, most = settings.bits_bounds(rows, columns)
    if not least <= result.bits_per_weight <= most:
        problems.append(
            f"{result.name}: stores {result.bits_per_weight:.2f} bits a weight, "
            f"{settings.name} should take {bits:g} to {most:.2f}"
        )
    return problems


def _wrong_weight(
    result: ModuleAudit,
    found: Mapping[str, float],
    settings: WeightSettings,
    columns: int,
    few_levels: bool,
) -> list[str]:
    """``few_levels``: the original has no more values under a scale than the format."""
    if result.weight_error == 0 and not few_levels and not settings.whole:
        return [f"{result.name}: the weights are the original's: nothing was quantized"]
    problems = []
    error = relative_error(found["kept_error"], found["kept_norm"])
    worst = settings.error_bound()
    if error > worst:
        problems.append(
            f"{result.name}: weight error {error:.2f}; {settings.name} should stay under {worst:g}"
        )
    squared = found["kept_error"] * found["kept"]
    lean = abs(found["kept_sum"]) / math.sqrt(squared) if squared else 0.0
    if lean > max(MOST_MEAN_ERROR, MEAN_SIGMAS / math.sqrt(found["kept"])) and not few_levels:
        problems.append(
            f"{result.name}: the errors lean to one side by {lean:.2f} of their size, as where a "
            "zero point is off"
        )
    share = found["other_rows"] / found["rows"] if found["rows"] else 0.0
    if share > OTHER_ROWS and columns >= LEAST_COLUMNS:
        problems.append(
            f"{result.name}: {share:.0%} of its rows are not the original's rounded: their gain, "
            "⟨row, original⟩ / ‖original‖², is far from 1, as if rows or scales were exchanged"
        )
    return problems


def _missed(
    original: nn.Module, zeroed: Mapping[str, tuple[Tensor, Tensor, float]], probe: Tensor
) -> list[str]:
    """A line for each layer that loses more with the columns that became zeros than by rounding.

    GPTQ zeroes those whose inputs are zero on all calibration text, as of a softpick head that is
    silent; and few bits round a whole column of small weights to zero. ``zeroed``: which columns
    [in], the squared norms of all [in], and the share of squared products that may be lost."""
    problems = []

    def look(name: str, inputs: Tensor) -> None:
        zeros, norms, allowed = zeroed[name]
        products = inputs.float().square().flatten(0, -2).sum(0) * norms
        share = float(products[zeros].sum() / products.sum().clamp_min(1e-30))
        if not share <= allowed:
            problems.append(
                f"{name}: {int(zeros.sum())} of {len(zeros)} columns are zeros, and {share:.1%} of "
                f"the squared products go there; {allowed:.1%} may: calibrate on more text"
            )

    watch_inputs(original, {n: original.get_submodule(n) for n in zeroed}, look, [probe])
    return problems


def _disagreement(
    result: ModuleAudit, found: Mapping[str, float], dtype: str, settings: WeightSettings
) -> list[str]:
    """The forward's weight against the stored one, and against another forward."""
    on_identity, on_random = settings.agreement(dtype.removeprefix("torch."))
    problems = []
    off = _ratio(found["stored_off"], found["stored_norm"])
    if not off <= on_identity:
        problems.append(f"{result.name}: the forward's weights are {off:.2g} off the stored ones")
    off = _ratio(found["random_off"], found["random_norm"])
    if not off <= on_random:
        problems.append(
            f"{result.name}: on random inputs the forward is {off:.2g} off its own weights"
        )
    off = _ratio(found["real_off"], found["real_norm"]) if "real_off" in found else 0.0
    if not off <= max(REAL, 3 * on_random):
        problems.append(
            f"{result.name}: on its inputs in the model the forward is {off:.2g} off its weights"
        )
    return problems


@contextmanager
def recorded_inputs(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Record by name the first ``INPUTS`` rows [INPUTS, in] that each of the modules ``names`` of
    ``model`` is given while it runs, in the dtype in which it is given them."""
    rows: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and name not in rows and arguments[0].numel():
                rows[name] = arguments[0].detach().flatten(0, -2)[:INPUTS].clone()

        return record

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            handle = module.register_forward_pre_hook(hook(name), prepend=True)
            stack.callback(handle.remove)
        yield rows


def failing_layer(error: BaseException, model: nn.Module) -> str:
    """Return ``name: `` of the module of ``model`` whose missing attribute ``error`` is about, with
    what to do; empty for other errors."""
    module = getattr(error, "obj", None)
    name = next((name for name, one in model.named_modules() if one is module), None)
    if not isinstance(error, AttributeError) or not name:
        return ""
    return f"{name}: its model reads its {error.name} directly, add {_word(name)} to ignore: "


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return _ratio(*numbers(_norms("", found, expected)).values())


def _norms(of: str, found: Tensor, expected: Tensor) -> dict[str, Tensor]:
    expected = expected.float()
    return {f"{of}_off": (found.float() - expected).norm(), f"{of}_norm": expected.norm()}


def _ratio(off: float, norm: float) -> float:
    return off / norm if norm else off


def _digest(modules: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(modules.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def relative_error(error_squared: float, norm_squared: float) -> float:
    """Return ‖y − x‖ / ‖x‖ of sums of squares; infinite if one is not finite, or if x is 0 and y
    is not."""
    if not math.isfinite(error_squared) or not math.isfinite(norm_squared):
        return math.inf
    if not norm_squared:
        return math.inf if error_squared else 0.0
    return math.sqrt(error_squared / norm_squared)


def matrices_size(matrices: Iterable[Matrix]) -> int:
    return sum(matrix.weight.numel() for matrix in matrices)


def _word(name: str) -> str:
    """What ``ignore`` would call a matrix: ``experts`` for fused ones, else its last part."""
    parts = name.split(".")
    return "experts" if "experts" in parts else parts[-1]


def _some(matrices: list[Matrix]) -> str:
    return some([f"{m.name} {list(m.weight.shape)}" for m in matrices], 3)
