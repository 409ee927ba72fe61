"""Measure whether a token's logits depend on later tokens, or on the other rows of its batch.

Changed tokens leave every shape as it is, so the same kernels run and a model without such a
dependence gives the same bits, unless its kernels do not repeat themselves, or experts get other
numbers of tokens: what the unquantized model moves by, and what a repetition moves, is allowed.
Both kinds of change are made at once first, and one by one only if that moves a logit.
Texts that are cut have other shapes and so other rounding. In 16 bits that may send single tokens
to other experts: there a share of all tokens must move, and more than in a batch of one row, whose
shape differs too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qbench.quantizers.config import QuantizationConfig
from qbench.records import BatchDependence
from qbench.streaming import lockstep

RowByRow = Callable[[Any], AbstractContextManager[None]]
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
    row_by_row: RowByRow = nullcontext,
) -> tuple[BatchDependence, BatchDependence, list[str]]:
    """Measure how far logits depend on later tokens, and on the other rows of a batch; return both,
    and a line per dependence that the settings do not declare.

    ``probe``: token ids [B ≥ 2, T]. Within ``row_by_row`` of a model no row of its attention
    changes the last bits of another, as rows of a kernel's tile may: both models are measured so.
    """
    length = probe.shape[1]
    lengths = sorted({max(1, n) for n in (length - CUT, length // 2, length // 4)})
    # Where activations are rounded to few bits, rounding alone moves every token as far.
    other_shapes = (
        [] if config.amplifies_rounding else [probe[:1], *(probe[:, :n] for n in lengths)]
    )
    with ExitStack() as stack:
        for model in (original, quantized):
            stack.enter_context(row_by_row(model))
        both = _changed(probe, LAST_TOKEN, OTHER_ROWS)
        base, *others = _logits(quantized, [probe, *both, *other_shapes])
        rounding = ROUNDING * float(base.abs().max())
        still = _most(base, others[: len(both)], FIRST_ROW_EARLIER) == 0

        def dependence(part: Any, watched: Any) -> BatchDependence:
            moved, tolerance = 0.0, rounding
            if not still:
                texts = [probe, *_changed(probe, part)]
                again, *changed = _logits(quantized, texts)
                moved = _most(base, changed, watched)
                tolerance += LEEWAY * _moved(base, again)
                if moved > rounding and config.batch_invariant:  # only if it can decide
                    unchanged, *changed = _logits(original, texts)
                    tolerance += LEEWAY * _most(unchanged, changed, watched)
            return BatchDependence(
                moved=moved, tolerance=tolerance, declared=not config.batch_invariant
            )

        causality = dependence(LAST_TOKEN, EARLIER)
        batch_mates = dependence(OTHER_ROWS, FIRST_ROW)
        dtype = next(quantized.parameters()).dtype
        by_length = _moved_by_length(base, others[len(both) :], dtype)
        if by_length > causality.moved:
            unchanged, *cuts = _logits(original, [probe, *other_shapes[1:]])
            allowed = max(_moved(unchanged[:, : cut.shape[1]], cut) for cut in cuts)
            tolerance = max(causality.tolerance, LEEWAY * allowed)
            causality = causality.model_copy(update={"moved": by_length, "tolerance": tolerance})
    problems = [
        f"changing {what} by {result.moved:.2g} (rounding: {result.tolerance:.2g}): the settings "
        f"do not declare that {declaration}"
        for result, what, declaration in (
            (causality, "later tokens changes earlier logits", "tokens see the future"),
            (
                batch_mates,
                "the rest of a batch changes a row's logits",
                "scores depend on the batch",
            ),
        )
        if not result.moved <= result.tolerance and not result.declared
    ]
    return causality, batch_mates, problems


def _moved_by_length(base: Tensor, other_shapes: list[Tensor], dtype: torch.dtype) -> float:
    """Return how far the logits ``base`` [B, T, V] of a model in ``dtype`` lie from those of the
    same texts with their last tokens left off; 0 if that is no more than rounding in other shapes.

    ``other_shapes``: the logits [1, T, V] of the first row in a batch of its own, then those of
    the texts cut, [B, < T, V]; may be empty."""
    if not other_shapes:
        return 0.0
    alone, *cuts = other_shapes
    moved, noise = 0.0, float(_far(alone, base[:1]).mean())
    for cut in cuts:
        same = base[:, : cut.shape[1]]
        if dtype in OTHER_SHAPES:
            leaks = bool(_far(cut, same, OTHER_SHAPES[dtype]).any())
        else:
            leaks = float(_far(cut, same).mean()) > max(FEW_TOKENS, LEEWAY * noise)
        moved = max(moved, _moved(same, cut)) if leaks else moved
    return moved


def _far(logits: Tensor, expected: Tensor, most: float = OTHER_SHAPES_OF_HALF) -> Tensor:
    """Return 1 for each token [B, T] whose ``logits`` [B, T, V] lie farther from the ``expected``
    than ``most`` of their norm, else 0."""
    return ((logits - expected).norm(dim=-1) > most * expected.norm(dim=-1)).float()


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


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the float32 logits [B, T, V] of token ids [B, T]."""
    device = next(model.parameters()).device
    return model(input_ids=ids.to(device), use_cache=False).logits.float()


def _logits(model: nn.Module, texts: list[Tensor]) -> list[Tensor]:
    return lockstep(model, [partial(logits, model, ids) for ids in texts])


def _moved(before: Tensor, after: Tensor) -> float:
    """Return the largest |difference|; infinite if one of a pair is finite and the other not."""
    difference = (after - before).abs().nan_to_num(nan=torch.inf)
    difference[before.isnan() & after.isnan()] = 0
    return float(difference.max()) if difference.numel() else 0.0
