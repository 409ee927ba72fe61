"""Compare a quantized model with its original and its settings: the audit of a cell. Measure
whether a token's logits depend on later tokens, or on the other rows of its batch.

Changed tokens leave every shape as it is, so the same kernels run and a model without such a
dependence gives the same bits, unless its kernels do not repeat themselves, or experts get other
numbers of tokens: what the unquantized model moves by, and what a repetition moves, is allowed.
Texts that are cut have other shapes and so other rounding. In 16 bits that may send single tokens
to other experts: there a share of all tokens must move, and more than in a batch of one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qbench.attention.transformers import batch_invariant
from qbench.errors import first_line
from qbench.progress import Advance
from qbench.quantizers.activation_inputs import ATTRIBUTE
from qbench.quantizers.audit.activations import measure_inputs
from qbench.quantizers.audit.kv_cache import measure_kv
from qbench.quantizers.audit.weights import failing_layer, held, measure_weights, recorded_dtypes
from qbench.quantizers.config import QuantizationConfig, WeightSettings
from qbench.quantizers.linear import Matrix, matrices, matrices_size, named_ends, not_finite, others
from qbench.quantizers.quantize import TRANSFORM, backend, evidence_of
from qbench.records import GIB, Audit, BatchDependence, ModuleAudit, StoredSize
from qbench.streaming import lockstep

SHIFTS = (1, 7)  # other tokens: ids moved on by so many
CUT = 10  # tokens that are left off at the end; and half, and three quarters of the text
OTHER_SHAPES = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, of any token's logits
OTHER_SHAPES_OF_HALF = 0.1  # of ``FEW_TOKENS`` in 16 bits
FEW_TOKENS = 0.02
LEEWAY = 4.0  # times what the unquantized model and a repetition move
ROUNDING = 1e-5  # of the largest logit
# What is changed of token ids [B, T], and the logits [B, T, V] that must not move
LAST_TOKEN, EARLIER = np.s_[:, -1:], np.s_[:, :-1]
OTHER_ROWS, FIRST_ROW = np.s_[1:], np.s_[:1]
FIRST_ROW_EARLIER = np.s_[:1, :-1]


@torch.no_grad()
def independence(
    original: nn.Module,
    quantized: nn.Module,
    config: QuantizationConfig,
    probe: Tensor,
    known: Tensor,
) -> tuple[BatchDependence, BatchDependence, list[str]]:
    """Measure how far logits of ``quantized`` depend on later tokens, and on the other rows of a
    batch; return both, and a line per dependence that ``config`` does not declare. ``original`` is
    measured too if rounding might explain it. ``probe``: token ids [B ≥ 2, T], and ``known`` its
    logits."""
    length = probe.shape[1]
    lengths = sorted({max(1, n) for n in (length - CUT, length // 2, length // 4)})
    # Where activations are rounded to few bits, rounding alone moves every token as far.
    cut = [probe[:1], *(probe[:, :n] for n in lengths)]
    other_shapes = [] if config.amplifies_rounding else cut
    with ExitStack() as stack:
        _, same = [stack.enter_context(batch_invariant(model)) for model in (original, quantized)]
        both = _changed(probe, LAST_TOKEN, OTHER_ROWS)
        first = [known] if same else []
        texts = [probe, *both, *other_shapes][len(first) :]
        base, *others = first + logits(quantized, *texts)
        rounding = ROUNDING * float(base.abs().max())
        still = _most(base, others[: len(both)], FIRST_ROW_EARLIER) == 0

        def dependence(part: Any, watched: Any) -> BatchDependence:
            moved, tolerance = 0.0, rounding
            if not still:
                texts = [probe, *_changed(probe, part)]
                again, *changed = logits(quantized, *texts)
                moved = _most(base, changed, watched)
                tolerance += LEEWAY * _moved(base, again)
                if moved > rounding and config.batch_invariant:  # only if it can decide
                    unchanged, *changed = logits(original, *texts)
                    tolerance += LEEWAY * _most(unchanged, changed, watched)
            declared = not config.batch_invariant
            return BatchDependence(moved=moved, tolerance=tolerance, declared=declared)

        causality = dependence(LAST_TOKEN, EARLIER)
        batch_mates = dependence(OTHER_ROWS, FIRST_ROW)
        dtype = next(quantized.parameters()).dtype
        by_length = _moved_by_length(base, others[len(both) :], dtype)
        if by_length > causality.moved:
            unchanged, *cuts = logits(original, probe, *other_shapes[1:])
            allowed = max(_moved(unchanged[:, : cut.shape[1]], cut) for cut in cuts)
            tolerance = max(causality.tolerance, LEEWAY * allowed)
            causality = causality.model_copy(update={"moved": by_length, "tolerance": tolerance})
    problems = [
        f"a change of {what} by {result.moved:.2g}, more than rounding ({result.tolerance:.2g}), "
        f"and the settings do not declare that {declaration}"
        for result, what, declaration in (
            (causality, "later tokens moves earlier logits", "tokens see the future"),
            (batch_mates, "the rest of a batch moves a row's logits", "scores depend on the batch"),
        )
        if not result.moved <= result.tolerance and not result.declared
    ]
    return causality, batch_mates, problems


def _moved_by_length(base: Tensor, other_shapes: list[Tensor], dtype: torch.dtype) -> float:
    """Return the largest difference between the logits ``base`` [B, T, V] and those of the same
    texts without their last tokens; 0 if rounding in other shapes, in ``dtype``, explains it.
    ``other_shapes``: the logits [1, T, V] of the first row in a batch of its own, then those of the
    shortened texts, [B, < T, V]; may be empty."""

    def share(logits: Tensor, expected: Tensor) -> float:
        """Return the share of tokens whose logits differ by more than rounding."""
        most = OTHER_SHAPES.get(dtype, OTHER_SHAPES_OF_HALF) * expected.norm(dim=-1)
        return float(((logits - expected).norm(dim=-1) > most).float().mean())

    if not other_shapes:
        return 0.0
    single_row, *cuts = other_shapes
    few = 0.0 if dtype in OTHER_SHAPES else max(FEW_TOKENS, LEEWAY * share(single_row, base[:1]))
    pairs = [(base[:, : cut.shape[1]], cut) for cut in cuts]
    return max(_moved(*pair) if share(*pair[::-1]) > few else 0.0 for pair in pairs)


def _changed(ids: Tensor, *parts: Any) -> list[Tensor]:
    """Return copies of ``ids`` [B, T] with other tokens in ``parts``, one per shift."""
    vocabulary, copies = int(ids.max()) + 1, []
    for shift in SHIFTS:
        other = ids.clone()
        for part in parts:
            other[part] = (ids[part] + shift) % vocabulary
        copies.append(other)
    return copies


def _most(base: Tensor, changed: list[Tensor], watched: Any) -> float:
    """Return the largest difference of a ``watched`` logit over all ``changed`` texts."""
    return max(_moved(base[watched], logits[watched]) for logits in changed)


def logits(model: nn.Module, *texts: Tensor) -> list[Tensor]:
    """Return the float32 logits [B, T, V] of each of ``texts``, token ids [B, T]. Gradients are the
    caller's to switch off. A streamed model reads its weights once for all texts."""
    device = next(model.parameters()).device
    return lockstep(model, [
        lambda ids=ids: model(input_ids=ids.to(device), use_cache=False).logits.float()
        for ids in texts
    ])  # fmt: skip


def _moved(before: Tensor, after: Tensor) -> float:
    """Return the largest |difference|; infinite if only one value of a pair is finite."""
    difference = (after - before).abs().nan_to_num(nan=torch.inf)
    difference[before.isnan() & after.isnan()] = 0
    return float(difference.max()) if difference.numel() else 0.0


CANCELLED = 0.15  # relative, of logits: factors are fitted to rounded weights
SAME_SETTINGS = (  # of config.json: they change what is computed with the same weights
    "rope_parameters", "hidden_act", "hidden_activation", "activation_function", "rms_norm_eps",
    "layer_norm_eps", "layer_norm_epsilon", "sliding_window", "layer_types", "logits_scaling",
    "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
)  # fmt: skip
# How far a transform may move logits, of their norm. Changed weights are rounded anew, and so
# is what passes between layers: as much as another order of sums gives: 0.008 was seen in bfloat16
# through 12 layers.
MOST_MOVED = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
PROBE_SHAPE = (2, 128)  # sequences, tokens: what logits are compared on


def probe_of(vocabulary: int) -> Tensor:
    """Return seeded token ids [B, T] below ``vocabulary``, on which logits are compared."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, PROBE_SHAPE, generator=generator)


@torch.no_grad()
def audit(
    original: nn.Module,
    quantized: nn.Module,
    config: QuantizationConfig,
    probe: Tensor,
    progress: Advance = lambda done, total: None,
) -> Audit:
    """Compare ``quantized`` with its ``original``, on one device. The original may be changed: do
    not use it afterwards. ``probe``: token ids [B, T] of a text on which quantization must move the
    logits. ``progress(done, total)`` is called as layers are measured. The result's ``passed`` is
    False if a check fails, and ``problems`` has a line per failed check."""
    problems = [f"the unquantized model: {line}" for line in not_finite(original)]
    problems = problems or not_finite(quantized)
    ours, theirs = (model.config.get_text_config().to_dict() for model in (original, quantized))
    problems += [
        f"config.json has {name} {theirs.get(name)}, and the original's {ours.get(name)}"
        for name in SAME_SETTINGS
        if ours.get(name) != theirs.get(name)
    ]
    moved, runs, (before,) = 0.0, False, logits(original, probe)
    stored = evidence_of(quantized, config, "weights")
    with recorded_dtypes(quantized, stored) as dtypes:
        try:
            after = before if original is quantized else logits(quantized, probe)[0]
        except Exception as error:
            place = failing_layer(error, quantized)
            problems.append(f"{place}the quantized model's forward fails: {first_line(error)}")
        else:
            differences = (after - before).abs()
            moved = float(differences.where(differences.isfinite(), 0).max())
            wrong = {"the unquantized model's logits": before, "logits": after}
            wrong = [what for what, values in wrong.items() if not values.isfinite().all()]
            problems += [f"{what} are not finite" for what in wrong]
            runs = not wrong
    fields: dict[str, Any] = {}
    if runs:
        fields["causality"], fields["batch_mates"], failures = independence(
            original, quantized, config, probe, after
        )
        problems += failures
    if config.transform is not None:
        backend(config.transform).transform(
            original, config.transform, getattr(quantized, TRANSFORM)
        )
        off = float((logits(original, probe)[0] - before).norm() / before.norm())
        fields["treatment_error"] = off
        if not off <= (most := MOST_MOVED[next(original.parameters()).dtype]):
            problems.append(
                f"the transform moved the unquantized model's logits by {off:.2g} of their norm; "
                f"it should change nothing beyond rounding, which is less than {most:g}"
            )
    originals = matrices(original)
    if runs and config.activations is not None:
        fields["activations"], failures = measure_inputs(originals, quantized, config, probe)
        problems += failures
    if runs and config.kv_cache is not None:
        fields["kv_cache"], failures = measure_kv(quantized, config, probe)
        problems += failures
    originals |= {
        name: Matrix(name=name, weight=layer.weight, linear=True)
        for name, layer in named_ends(original, config.weights).items()
    }
    inputs = getattr(quantized, ATTRIBUTE, SimpleNamespace())
    inputs.paused = True  # not rounded
    weights, failures = measure_weights(
        original, originals, quantized, stored, config, probe, dtypes, progress
    )
    inputs.paused = False
    problems += failures
    # Weights may lie on the format's levels, as those of a copy that was written in 16 bits again.
    exact = config.weights and set(config.parts) == {"weights"} and weights["weight_error"] == 0
    unrounded = config.weights and (config.weights.unrounded or (exact and weights["modules"]))
    if config.precision.quantized and moved == 0 and not unrounded:
        problems.append("the logits equal the unquantized model's: nothing was quantized")
    if originals:
        modules = weights.get("modules", ())
        fields["size"] = stored_size(original, originals, config.weights, modules)
    if weights.get("rescaled"):
        # Factors that were moved between layers must cancel: the original with its rescaled weights
        # and the quantized model's norms and biases gives the logits that it gave before
        for name, parameter in others(original).items():
            theirs = held(quantized, name)
            if parameter.dim() == 1 and theirs is not None and theirs.shape == parameter.shape:
                parameter.data.copy_(theirs)
        off = (logits(original, probe)[0] - before).norm(dim=-1) / before.norm(dim=-1)
        if (typical := float(off.median())) > CANCELLED:
            problems.append(
                "its layers are the original's up to factors of rows and columns, and these do not "
                f"cancel: with them the original's logits move by {typical:.2g} of their size"
            )
    return Audit(
        passed=not problems, logits_moved=moved, problems=tuple(problems), **weights, **fields
    )


def stored_size(
    original: nn.Module,
    originals: Mapping[str, Matrix],
    weights: WeightSettings | None,
    modules: Iterable[ModuleAudit],
) -> StoredSize:
    """Return the stored size of ``original``, whose matrices are ``originals``, with the audited
    ``modules`` in their place; for a published copy the size of its files, None if not counted. A
    weight's bits are those of all tensors kept for its matrix over the numbers of the unquantized
    one, for matrices outside embeddings and LM head, unquantized ones too. Biases and norms count
    in GiB only."""
    if weights is not None and weights.prequantized:
        return weights.size
    head = original.get_output_embeddings()
    stored = {m.name: m.bits_per_weight * m.parameters for m in modules}
    plain = {name: 8.0 * matrix.weight.nbytes for name, matrix in originals.items()}
    bits = {**plain, **stored}
    at_ends = named_ends(original, weights)
    inner = {name: matrix for name, matrix in originals.items() if name not in at_ends}
    of_head = [bits[name] for name, layer in at_ends.items() if layer is head]
    if head is not None and not of_head:
        of_head = [8.0 * head.weight.nbytes]
    unquantized = sum(8.0 * p.nbytes for p in original.parameters())
    return StoredSize(
        bits_per_weight=sum(bits[name] for name in inner) / matrices_size(inner.values()),
        head_bits_per_weight=of_head[0] / head.weight.numel() if of_head else None,
        gib=(unquantized - sum(plain.values()) + sum(bits.values())) / GIB,
    )
