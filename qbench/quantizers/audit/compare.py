"""Proof that a model was quantized as its cell says, or what speaks against it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from qbench.errors import first_line
from qbench.quantizers.activation_inputs import weights_alone
from qbench.quantizers.audit.activations import measure_inputs
from qbench.quantizers.audit.independence import RowByRow, independence, logits
from qbench.quantizers.audit.kv_cache import measure_kv
from qbench.quantizers.audit.transforms import measure_transform
from qbench.quantizers.audit.weights import (
    failing_layer,
    held,
    measure_weights,
    recorded_inputs,
)
from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.linear import matrices, not_finite, others
from qbench.quantizers.quantize import evidence_of
from qbench.quantizers.stored_bits import stored_size
from qbench.records import Audit

CANCELLED = 0.15  # relative, of logits: factors are fitted to rounded weights
COMPUTED = (  # what config.json says beside the weights' shapes of what is computed with them
    "rope_parameters", "hidden_act", "hidden_activation", "activation_function", "rms_norm_eps",
    "layer_norm_eps", "layer_norm_epsilon", "sliding_window", "layer_types", "logits_scaling",
    "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
)  # fmt: skip
PROBE_SHAPE = (2, 128)  # sequences, tokens: what logits are compared on


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
    row_by_row: RowByRow = nullcontext,
) -> Audit:
    """Compare ``quantized`` with the ``original`` it was made from, on one device; ``original`` is
    consumed.

    ``probe``: token ids [batch, time], a text on which the logits must have moved. Within
    ``row_by_row`` of a model no row of its attention owes another its last bits. Never raises for a
    bad quantization: ``passed`` is False then, and ``problems`` says why, a line each.
    """
    problems = [f"the unquantized model: {line}" for line in not_finite(original)]
    problems = problems or not_finite(quantized)
    problems += _other_settings(original, quantized)
    with recorded_inputs(quantized, evidence_of(quantized, config, "weights")) as inputs:
        moved, before, wrong = _logits(original, quantized, probe)
    problems += wrong
    whole = config.weights and config.weights.whole
    if config.precision.quantized and moved == 0 and not whole:
        problems.append("the logits are those of the unquantized model")
    sound = not wrong
    more: dict[str, Any] = {}
    if sound:
        more["causality"], more["batch_mates"], wrong = independence(
            original, quantized, config, probe, row_by_row
        )
        problems += wrong
    if config.transform is not None:
        more["treatment_error"], wrong = measure_transform(
            original, quantized, config, probe, before
        )
        problems += wrong
    wanted = matrices(original)
    if sound and config.activations is not None:
        more["activations"], wrong = measure_inputs(wanted, quantized, config, probe)
        problems += wrong
    if sound and config.kv_cache is not None:
        more["kv_cache"], wrong = measure_kv(quantized, config, probe)
        problems += wrong
    with weights_alone(quantized):
        weights, wrong = measure_weights(original, wanted, quantized, config, probe, inputs)
    problems += wrong
    if wanted:
        more["size"] = stored_size(original, wanted, config.weights, weights.get("modules", ()))
    if weights.get("rescaled"):
        problems += _uncancelled(original, quantized, probe, before)
    return Audit(
        passed=not problems, logits_moved=moved, problems=tuple(problems), **weights, **more
    )


def _other_settings(original: nn.Module, quantized: nn.Module) -> list[str]:
    """A line for each setting in which a copy's config.json is not the original's."""
    stated = [model.config.get_text_config().to_dict() for model in (original, quantized)]
    return [
        f"its config.json has {name} {theirs}, and the original's {wanted}"
        for name in COMPUTED
        for wanted, theirs in [[one.get(name) for one in stated]]
        if wanted != theirs
    ]


def _uncancelled(
    rescaled: nn.Module, quantized: nn.Module, probe: Tensor, before: Tensor
) -> list[str]:
    """A line where factors that were moved between layers do not cancel: the original with the
    ``rescaled`` weights and the quantized model's norms and biases must give its own logits
    ``before``."""
    for name, parameter in others(rescaled).items():
        theirs = held(quantized, name)
        if parameter.dim() == 1 and theirs is not None and theirs.shape == parameter.shape:
            parameter.data.copy_(theirs)
    off = float(((logits(rescaled, probe) - before).norm(dim=-1) / before.norm(dim=-1)).median())
    if off <= CANCELLED:
        return []
    return [
        "its layers are the original's up to factors of rows and columns, and these do not cancel: "
        f"with them the original's logits move by {off:.2g} of their size"
    ]


def _logits(
    original: nn.Module, quantized: nn.Module, probe: Tensor
) -> tuple[float, Tensor, list[str]]:
    """Largest movement of a logit among those that are finite, the original's [B, T, V], and what
    is wrong with them."""
    before = logits(original, probe)
    try:
        after = logits(quantized, probe)
    except Exception as error:
        place = failing_layer(error, quantized)
        return 0.0, before, [f"{place}the quantized model's forward fails: {first_line(error)}"]
    problems = []
    if not torch.isfinite(before).all():
        problems.append("the unquantized model's logits are not finite")
    if not torch.isfinite(after).all():
        problems.append("logits are not finite")
    moved = (after - before).abs()
    return float(moved.where(torch.isfinite(moved), 0).max()), before, problems
