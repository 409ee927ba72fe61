"""Do a token's logits depend on later tokens, or on the other rows of its batch?

Changed tokens leave every shape as it is, so that the same kernels run and a model without such a
dependence gives the same bits, unless its kernels do not repeat themselves, or experts get other
numbers of tokens: what the unquantized model moves by, and what a repetition moves, is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers.config import QuantizationConfig
from qbench.records import Leak
from qbench.streaming import together

RowByRow = Callable[[Any], AbstractContextManager[None]]
SHIFTS = (1, 7)  # other tokens: ids moved on by so many
LEEWAY = 4.0  # times what the unquantized model and a repetition move
ROUNDING = 1e-5  # of the largest logit


@torch.no_grad()
def independence(
    original: nn.Module,
    quantized: nn.Module,
    config: QuantizationConfig,
    probe: Tensor,
    row_by_row: RowByRow | None = None,
) -> tuple[Leak, Leak, list[str]]:
    """Causality and independence of batch-mates, and what of it is undeclared.

    ``probe``: token ids [batch of 2 or more, time]. A quantizer that amplifies rounding makes much
    of the last bits that a kernel's rows owe each other; it is measured within ``row_by_row`` of
    both models, where there are none.
    """
    with ExitStack() as stack:
        if config.amplifies_rounding and row_by_row is not None:
            for model in (original, quantized):
                stack.enter_context(row_by_row(model))
        return _independence(original, quantized, config, probe)


def _independence(
    original: nn.Module, quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[Leak, Leak, list[str]]:
    ids = probe.to(next(quantized.parameters()).device)
    vocabulary = int(ids.max()) + 1
    futures, mates = (list(change(ids, vocabulary)) for change in (_futures, _mates))
    base, again, *changed = _logits(quantized, [ids, ids, *futures, *mates])
    repeated = _moved(base, again)
    found = []
    for texts, watched, logits in (
        (futures, _before_last, changed[: len(futures)]),
        (mates, _first_row, changed[len(futures) :]),
    ):
        allowed = 0.0
        # the unquantized model only where it can decide
        moved = _most(base, logits, watched)
        if moved > ROUNDING * float(base.abs().max()):
            unchanged, *others = _logits(original, [ids, *texts])
            allowed = _most(unchanged, others, watched)
        tolerance = LEEWAY * (allowed + repeated) + ROUNDING * float(base.abs().max())
        found.append((moved, tolerance))
    (future, allow_future), (mates, allow_mates) = found
    causality = Leak(moved=future, tolerance=allow_future, declared=not config.causal)
    batch_mates = Leak(moved=mates, tolerance=allow_mates, declared=not config.batch_invariant)
    problems = []
    if not future <= allow_future and config.causal:
        problems.append(
            f"changing the last token changes earlier logits by {future:.2g} (rounding: "
            f"{allow_future:.2g}): the settings do not declare that tokens see the future"
        )
    if not mates <= allow_mates and config.batch_invariant:
        problems.append(
            f"changing the rest of a batch changes a row's logits by {mates:.2g} (rounding: "
            f"{allow_mates:.2g}): the settings do not declare that scores depend on the batch"
        )
    return causality, batch_mates, problems


def _futures(ids: Tensor, vocabulary: int) -> Iterator[Tensor]:
    for shift in SHIFTS:
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + shift) % vocabulary
        yield changed


def _mates(ids: Tensor, vocabulary: int) -> Iterator[Tensor]:
    for shift in SHIFTS:
        changed = ids.clone()
        changed[1:] = (changed[1:] + shift) % vocabulary
        yield changed


def _before_last(logits: Tensor) -> Tensor:
    return logits[:, :-1]


def _first_row(logits: Tensor) -> Tensor:
    return logits[:1]


def _most(base: Tensor, changed: list[Tensor], watched: Callable[[Tensor], Tensor]) -> float:
    """Largest movement of a watched logit over all changes."""
    return max(_moved(watched(base), watched(logits)) for logits in changed)


def _logits(model: nn.Module, texts: list[Tensor]) -> list[Tensor]:
    """Of each of ``texts``, token ids [B, T]."""

    def of(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits.float()

    return together(model, [partial(of, ids) for ids in texts])


def _moved(before: Tensor, after: Tensor) -> float:
    """Infinite where one is finite and the other not."""
    difference = (after - before).abs().nan_to_num(nan=torch.inf)
    difference[before.isnan() & after.isnan()] = 0
    return float(difference.max()) if difference.numel() else 0.0
