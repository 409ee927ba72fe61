"""Proof that a model was quantized as its cell says, or what speaks against it.

Every number is taken from what scoring will run: a layer's weight is read off its own forward, by
giving it the identity. What the quantizer says that it stored must agree with it. Whether a layer
is quantized is told by that evidence, not by its class.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers.activations.inputs import weights_alone
from qbench.quantizers.audit.weights import Measured, measure
from qbench.quantizers.config import QuantizationConfig, matching
from qbench.quantizers.independence import RowByRow, independence
from qbench.quantizers.kv_cache.audit import measure_kv
from qbench.quantizers.matrices import Matrix, matrices, not_finite, values
from qbench.quantizers.measure_heads import measure_heads
from qbench.quantizers.measure_inputs import measure_inputs
from qbench.quantizers.outliers.check import treat
from qbench.quantizers.quantize import evidence_of
from qbench.records import Audit, KVAudit

PROBE_SHAPE = (2, 128)  # sequences, tokens: what logits are compared on
SPARE = 0.01  # of all weights: routers, convolutions and the like may stay as they are


def probe_of(vocabulary: int) -> Tensor:
    """Seeded token ids [B, T] on which logits are compared."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, PROBE_SHAPE, generator=generator)


@torch.no_grad()
def audit(
    original: nn.Module,
    quantized: nn.Module,
    config: QuantizationConfig,
    probe: Tensor,
    row_by_row: RowByRow | None = None,
) -> Audit:
    """Compare ``quantized`` with the ``original`` it was made from, on one device; ``original`` is
    consumed.

    ``probe``: token ids [batch, time], a text on which the logits must have moved. Within
    ``row_by_row`` of a model no row of its attention owes another its last bits. Never raises for a
    bad quantization: ``passed`` is False then, and ``problems`` says why, a line each.
    """
    problems = [f"the unquantized model: {line}" for line in not_finite(original)]
    problems = problems or not_finite(quantized)
    moved, wrong = _logits(original, quantized, probe)
    problems += wrong
    if config.precision.quantized and moved == 0 and set(config.parts) != {"pruning"}:
        problems.append("the logits are those of the unquantized model")
    sound = not wrong
    more: dict[str, Any] = {}
    if sound:
        more["causality"], more["batch_mates"], wrong = independence(
            original, quantized, config, probe, row_by_row
        )
        problems += wrong
    if config.transform is not None:
        more["treatment_error"], wrong = treat(original, quantized, config, probe)
        problems += wrong
    wanted = matrices(original)
    if sound:
        more["activations"], wrong = measure_inputs(wanted, quantized, config, probe)
        problems += wrong
        more["kv_cache"], wrong = _of_cache(quantized, config, probe)
        problems += wrong
        more["heads"], wrong = measure_heads(quantized, config, probe)
        problems += wrong
    with weights_alone(quantized):
        found = _of_weights(wanted, quantized, config, moved, problems)
    return found.model_copy(update=more)


def _of_cache(
    quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[KVAudit | None, list[str]]:
    try:
        return measure_kv(quantized, config, probe)
    except Exception as error:  # as for the weights
        return None, [f"the KV cache cannot be measured: {_line(error)}"]


def _of_weights(
    wanted: Mapping[str, Matrix],
    quantized: nn.Module,
    config: QuantizationConfig,
    moved: float,
    problems: list[str],
) -> Audit:
    if config.weights is None:
        return _audit_unquantized(wanted, quantized, config, moved, problems)
    stored = evidence_of(quantized, config).weights
    remaining = [matrix for name, matrix in wanted.items() if name not in stored]
    problems += _uncovered(remaining, wanted.values(), config)
    problems += _unasked(stored.keys(), remaining, wanted, quantized, config)
    measured: list[Measured] = []
    for name in wanted:
        if name not in stored:
            continue
        try:
            module = quantized.get_submodule(name)
            measured.append(measure(wanted[name], module, stored[name], config.weights))
            problems += measured[-1].problems
        except Exception as error:  # whatever a broken layer raises is what is wrong with it
            problems.append(f"{name}: cannot be measured: {_line(error)}")
    weights = _size(wanted.values())
    covered = sum(one.module.parameters for one in measured)
    bits = sum(one.module.bits_per_weight * one.module.parameters for one in measured)
    return Audit(
        passed=not problems,
        bits=config.weights.num_bits,
        coverage=covered / weights if weights else 0.0,
        bits_per_weight=bits / covered if covered else 0.0,
        weight_error=_ratio(
            sum(one.error_squared for one in measured), sum(one.norm_squared for one in measured)
        ),
        levels=max((one.module.levels for one in measured), default=0),
        logits_moved=moved,
        left_out=tuple(matrix.name for matrix in remaining),
        left_out_because=_because(remaining, config),
        problems=tuple(problems),
        modules=tuple(one.module for one in measured),
        digest=_digest({one.module.name: one.module.digest for one in measured}),
    )


def _uncovered(
    remaining: list[Matrix], wanted: Iterable[Matrix], config: QuantizationConfig
) -> list[str]:
    """What is not quantized though the settings ask for it: any linear layer, and other matrices
    that are more than ``SPARE`` of all weights together."""
    allowed = matching((matrix.name for matrix in remaining), config.ignore)
    missing = [matrix for matrix in remaining if matrix.name not in allowed]
    missing.sort(key=lambda matrix: -matrix.weight.numel())
    layers = [matrix for matrix in missing if matrix.linear]
    problems = [f"not quantized: {_some(layers)}"] if layers else []
    weights, others = _size(wanted), [matrix for matrix in missing if not matrix.linear]
    if _size(others) > SPARE * weights:
        problems.append(
            f"not quantized: {_some(others)}, {_size(others) / weights:.1%} of all weights; "
            f"{config.method} takes linear layers only: say ignore: "
            f"[{', '.join(dict.fromkeys(_word(matrix.name) for matrix in others))}] to allow it"
        )
    return problems


def _because(remaining: list[Matrix], config: QuantizationConfig) -> dict[str, str]:
    """Why each of these matrices is not quantized."""
    spared = matching((matrix.name for matrix in remaining), config.ignore)
    return {
        matrix.name: "ignore of the settings"
        if matrix.name in spared
        else f"{'not quantized' if matrix.linear else 'no linear layer'} ({matrix.holder})"
        for matrix in remaining
    }


def _unasked(
    stored: Iterable[str],
    remaining: list[Matrix],
    wanted: Mapping[str, Matrix],
    quantized: nn.Module,
    config: QuantizationConfig,
) -> list[str]:
    """What was done to layers that the settings do not ask for: embeddings, the LM head, and what
    they leave out, which must be the original's."""
    spared = matching(wanted, config.ignore)
    more = [name for name in stored if name not in wanted or name in spared]
    problems = [f"{name}: quantized, though the settings leave it out" for name in more]
    after = matrices(quantized)
    changed = [
        matrix.name
        for matrix in remaining
        if matrix.name not in after or not _same(after[matrix.name].weight, matrix.weight)
    ]
    return problems + [f"{name}: neither quantized nor the original" for name in changed]


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for a cast; NaN equals NaN."""
    if found.shape != wanted.shape:
        return False
    found, cast = values(found), values(wanted).to(found.dtype)
    return bool(((found == cast) | (found.isnan() & cast.isnan())).all())


def _audit_unquantized(
    wanted: Mapping[str, Matrix],
    quantized: nn.Module,
    config: QuantizationConfig,
    moved: float,
    problems: list[str],
) -> Audit:
    """The weights are the original's, but for the cast to the dtype that is computed in."""
    dtype = getattr(torch, config.compute_dtype)
    after = matrices(quantized)
    error_squared = norm_squared = 0.0
    for name, matrix in wanted.items():
        found = after[name].weight if name in after else None
        plain = found is not None and type(found.data) is Tensor
        if not plain or found.dtype != dtype or found.shape != matrix.weight.shape:
            problems.append(f"{name}: not a plain weight in {config.compute_dtype}")
            continue
        if not _same(found, matrix.weight):
            problems.append(f"{name}: not the original weights")
        error_squared += float((found.float() - matrix.weight.float()).square().sum())
        norm_squared += float(matrix.weight.float().square().sum())
    return Audit(
        passed=not problems,
        bits=None,
        coverage=0.0,
        bits_per_weight=8.0 * dtype.itemsize,
        weight_error=_ratio(error_squared, norm_squared),
        levels=0,
        logits_moved=moved,
        problems=tuple(problems),
    )


def _logits(original: nn.Module, quantized: nn.Module, probe: Tensor) -> tuple[float, list[str]]:
    """Largest movement of a logit among those that are finite, and what is wrong with them."""
    ids = probe.to(next(original.parameters()).device)
    before = original(input_ids=ids, use_cache=False).logits.float()
    try:
        after = quantized(input_ids=ids, use_cache=False).logits.float()
    except Exception as error:
        return 0.0, [f"the quantized model's forward fails: {_line(error)}"]
    problems = []
    if not torch.isfinite(before).all():
        problems.append("the unquantized model's logits are not finite")
    if not torch.isfinite(after).all():
        problems.append("logits are not finite")
    moved = (after - before).abs()
    return float(moved.where(torch.isfinite(moved), 0).max()), problems


def _digest(modules: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(modules.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _ratio(error_squared: float, norm_squared: float) -> float:
    """Infinite where a sum is not finite."""
    if not math.isfinite(error_squared) or not math.isfinite(norm_squared):
        return math.inf
    return math.sqrt(error_squared / norm_squared) if norm_squared else 0.0


def _size(matrices: Iterable[Matrix]) -> int:
    return sum(matrix.weight.numel() for matrix in matrices)


def _word(name: str) -> str:
    """What ``ignore`` would call a matrix: ``experts`` for fused ones, else its last part."""
    parts = name.split(".")
    return "experts" if "experts" in parts else parts[-1]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _some(matrices: list[Matrix]) -> str:
    shown = ", ".join(f"{m.name} {list(m.weight.shape)}" for m in matrices[:3])
    return shown if len(matrices) <= 3 else f"{shown} and {len(matrices) - 3} more"
