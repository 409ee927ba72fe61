"""Compute the exact KL divergence of the unquantized from the quantized next-token distribution.

The unquantized cell keeps, of every scored token, the LM head's input, and the head. Such hidden
states take hidden size × bytes of the dtype: 768 bytes at the 27M pair's 384 in bfloat16, 2 kB at
340M parameters. Log-probabilities would take 64 kB and more. Beside each part of the quantized
model's logits, the unquantized model's are computed from them by its own LM head. The product has
the same shape, so both round alike: a model against itself gives 0. The divergence is over the
whole vocabulary. ``distributions`` and ``divergence_table`` summarize it for records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from qbench.errors import EvaluationError, OutputError, ResultsError
from qbench.evaluation.scoring.batching import Scored
from qbench.evaluation.scoring.forward import LMHead, LogitsPart, Projection, to_device, to_host
from qbench.files import clean_temporaries, write_tensors
from qbench.records import (
    ANSWERS,
    DIVERGENCE_COLUMNS,
    TOKENS_KEPT,
    Distributions,
    Divergence,
    Ratio,
)
from qbench.statistics.panel import score_error
from qbench.store import REMEDY, baseline_file, head_key, task_key, verify_baseline


class TaskHiddenStates(NamedTuple):
    """One task's LM head inputs ``states`` [N, H] and the ids ``token`` int32 [N] of its N scored
    tokens, request by request. ``lengths`` [requests] are the tokens of each, of the task
    ``ANSWERS`` alone: its tokens are the unquantized model's answers.
    """

    token: Tensor
    states: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BaselineHiddenStates:
    """Hidden states of the unquantized cell by task, and its LM head: ``weight`` [V, H], ``bias``
    [V]. A task that generates has none; the head is empty if no token was scored."""

    tasks: dict[str, TaskHiddenStates]
    weight: Tensor
    bias: Tensor | None

    def save(self, cache: Path, parts: Mapping[str, Any], task: str) -> None:
        """Write the hidden states of ``task`` into the folder ``cache`` (an empty file if it has
        none), and the LM head unless the cache has it, each with its digest. ``parts``: the cell's
        key parts. Raises ResultsError if a file cannot be written."""
        states, files, kept = self.tasks.get(task), dict[str, Any](), -1
        if baseline_file(cache, head_key(parts)).exists():
            with suppress(ResultsError):  # a damaged file is written anew
                kept = len(_read(cache, head_key(parts))["weight"])
        if kept < len(self.weight):
            files[head_key(parts)] = {"weight": self.weight, "bias": self.bias}
        # last: a cell that runs beside this one waits for it
        files[task_key(parts, task)] = {} if states is None else states._asdict()
        for key, tensors in files.items():
            path = baseline_file(cache, key)
            clean_temporaries(path.parent)
            named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            try:
                write_tensors(path, named, {"key": key})
            except OutputError as error:
                raise ResultsError(
                    f"{error}, or leave damage out with evaluation.damage: false"
                ) from error

    @classmethod
    def load(
        cls, cache: Path, parts: Mapping[str, Any], tasks: Iterable[str], more: Self | None = None
    ) -> Self:
        """Read the hidden states of ``tasks``, memory-mapped, and add those of ``more``; tasks that
        score no token are left out. ``parts``: the cell's key parts. Raises ResultsError if a file
        is missing, damaged or another cell's."""
        states = {} if more is None else dict(more.tasks)
        for task in tasks:
            if tensors := _read(cache, task_key(parts, task)):
                states[task] = TaskHiddenStates(**tensors)
        if more is not None and len(more.weight):
            return cls(states, more.weight, more.bias)
        head = _read(cache, head_key(parts)) if states else {"weight": torch.empty(0)}
        return cls(states, head["weight"], head.get("bias"))


def _read(cache: Path, key: str) -> dict[str, Tensor]:
    """Return the verified, memory-mapped tensors under ``key`` in the cache. Raises
    ResultsError."""
    path = baseline_file(cache, key)
    verify_baseline(path, key)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ResultsError(f"{path}: {error}; {REMEDY}") from error


@dataclass(eq=False)
class BaselineWriter:
    """An observer that keeps the unquantized model's hidden states in ``tasks``, by task."""

    tasks: dict[str, TaskHiddenStates] = field(default_factory=dict)
    _head: torch.nn.Linear | None = None  # without what its class makes of its products
    _copied: tuple[Tensor, Tensor | None] | None = None  # its weight and bias, on the host
    _rows: list[tuple[Callable[[], list[Tensor]], Scored]] = field(default_factory=list)  # a call's

    def hidden_states(self) -> BaselineHiddenStates:
        """Return the hidden states kept so far, and the LM head."""
        if self._head is None:
            return BaselineHiddenStates({}, torch.empty(0), None)
        if self._copied is None:
            weight, bias = self._head.weight.detach(), self._head.bias
            self._copied = weight.cpu().contiguous(), None if bias is None else bias.detach().cpu()
        return BaselineHiddenStates(dict(self.tasks), *self._copied)

    def begin(self, instances: Sequence[Any], lengths: Sequence[int], head: LMHead) -> Self:
        """Return a writer for a task, which stores it in ``tasks`` of this one. Raises
        EvaluationError if the LM head is not a plain linear layer."""
        if type(head.linear) is not torch.nn.Linear:
            raise EvaluationError(
                f"damage needs an LM head that is a linear layer, not {type(head.linear).__name__};"
                " set evaluation.damage: false"
            )
        self._head = head.linear
        call = replace(self, _rows=[])
        call._task, call._lengths = instances[0].task_name, lengths
        return call

    def prepare(self, scored: Scored) -> Scored:
        """Return the rows as they are."""
        return scored

    def batch(self, scored: Scored, hidden: Tensor, projection: Projection) -> None:
        """Copy the states to the host beside the GPU's work."""
        self._rows.append((to_host(hidden), scored))

    def end(self) -> Callable[[], None]:
        """Return a function that waits for the copies and stores the task's hidden states in
        ``tasks``."""
        return self._store

    def _store(self) -> None:
        head, tokens = self._head, sum(self._lengths)
        assert head is not None
        # as bytes by NumPy, which copies whole rows: a fifth of the time
        states = np.zeros((tokens, head.in_features * head.weight.itemsize), dtype=np.uint8)
        token = np.zeros(tokens, dtype=np.int32)
        for copied, scored in self._rows:
            (hidden,) = copied()
            token[scored.index] = scored.token
            rows = hidden.to(head.weight.dtype).contiguous().view(torch.uint8).numpy()
            states[scored.index] = rows[scored.row]
        lengths = torch.tensor(self._lengths) if self._task == ANSWERS else None
        kept = torch.from_numpy(states).view(head.weight.dtype)
        self.tasks[self._task] = TaskHiddenStates(torch.from_numpy(token), kept, lengths)
        self._rows.clear()  # whose memory is pinned: the next task is at work


@dataclass(eq=False)
class KLObserver:
    """An observer that compares a quantized model's distributions with those of ``base``. Tasks
    that ``base`` lacks are not compared.

    ``divergences``: a table per task, a row per scored token. ``kl`` in nats; ``agrees`` on the
    likeliest token; ``change`` of the target's log-probability in nats, quantized − unquantized;
    the ``document`` and ``request`` that the token, with the id ``token``, belongs to; for the task
    ``ANSWERS`` also ``margin``, how far its logit lies above the largest other one.
    """

    base: BaselineHiddenStates
    divergences: dict[str, pd.DataFrame] = field(default_factory=dict)
    _head: list[Tensor | None] = field(default_factory=list)  # weight and bias on the device, later
    _task: TaskHiddenStates | None = None  # of a call; None: nothing to measure

    def begin(self, instances: Sequence[Any], lengths: Sequence[int], head: LMHead) -> Self:
        """Return an observer of a task, which stores its table in ``divergences`` of this one; it
        ignores what follows if ``base`` lacks the task."""
        name = instances[0].task_name
        call = replace(self, _task=self.base.tasks.get(name))
        if call._task is None:
            return call
        call._name, call._device, call._finish = name, head.device, head.finish
        call._document = np.repeat([instance.doc_id for instance in instances], lengths)
        call._request = np.repeat([instance.idx for instance in instances], lengths)
        tokens = len(call._task.token)
        assert tokens == len(call._document), "both cells' keys say what is asked"
        # kl, agrees, change, and of answers margin
        rows = 4 if name == ANSWERS else 3
        call._values = torch.full((rows, tokens), torch.nan, device=head.device)
        return call

    def prepare(self, scored: Scored) -> tuple[np.ndarray, Tensor, Tensor] | None:
        """Return the rows of the scored tokens in order, these tokens' rows, indexes and ids on the
        device, and the unquantized model's states there; None for a task that ``base`` lacks."""
        if self._task is None:
            return None
        tokens = self._task.token.numpy()[scored.index]
        assert np.array_equal(tokens, scored.token), "both cells' keys say what is asked"
        order = np.argsort(scored.row, kind="stable")
        rows, indexes = scored.row[order], scored.index[order]
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))  # of each row: all have its input
        kept = self._task.states[torch.from_numpy(indexes[firsts])]
        entries = np.stack((rows, indexes, scored.token[order]))
        return rows, to_device(entries, self._device), to_device(kept, self._device)

    def batch(
        self, prepared: Any, hidden: Tensor, projection: Projection
    ) -> Callable[[LogitsPart], None] | None:
        """Return a function that compares a part's logits with the unquantized model's, for ``end``
        to store; None for a task that ``base`` lacks."""
        if prepared is None:
            return None
        rows, entries, before = prepared
        assert len(before) == len(hidden)
        if not self._head:  # now, since a GPU is at work on ``hidden``
            # Copied even on a CPU: a product may round by where in memory its weight begins.
            kept = self.base.weight, self.base.bias
            self._head += [None if t is None else t.to(self._device, copy=True) for t in kept]
        logits_of = projection.of(
            lambda states: self._finish(functional.linear(states, *self._head)), before
        )

        def measure(part: LogitsPart) -> None:
            low, high = np.searchsorted(rows, (part.first, part.last))
            row, index, token = entries[:, low:high]
            unquantized = logits_of(part.first, part.last)
            self._values[:3, index] = _compare(unquantized, part, row - part.first, token)
            if len(self._values) == 4:
                self._values[3, index] = _margin(part.logits, row - part.first, token)

        return measure

    def end(self) -> Callable[[], None]:
        """Return a function that waits for the device and stores the task's table in
        ``divergences``. It raises EvaluationError if a KL is not a number."""
        return (lambda: None) if self._task is None else partial(self._store, to_host(self._values))

    def _store(self, copied: Callable[[], list[Tensor]]) -> None:
        (values,), task = copied(), self._task
        assert task is not None
        kl, agrees, change, *margin = values.numpy()
        if bad := int((~np.isfinite(kl)).sum()):
            raise EvaluationError(
                f"{self._name}: the divergence of {bad} of {len(kl)} tokens is not a number; the "
                "model gives NaN or infinite logits there; try another compute_dtype, or leave the "
                "cell out"
            )
        self.divergences[self._name] = pd.DataFrame(
            {
                "kl": kl,
                "agrees": agrees == 1,
                "change": change,
                "document": self._document,
                "request": self._request,
                "token": task.token.numpy(),
                **({"margin": margin[0]} if margin else {}),
            }
        )


def _margin(logits: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """Return how far the logit of each ``token`` [M] lies above the largest of the others, in its
    ``row`` [M] of ``logits`` [R, V]: the difference of their log-probabilities, in nats."""
    two, ids = logits.float().topk(2, dim=-1)
    chosen, first = logits[row, token].float(), ids[row, 0] == token
    return chosen - torch.where(first, two[row, 1], two[row, 0])


def _compare(before: Tensor, part: LogitsPart, row: Tensor, token: Tensor) -> Tensor:
    """Return kl, agrees and change [3, M] of the scored tokens with the ids ``token``
    [M] in the rows ``row`` [M] of ``part``. ``before`` [R, V] are the unquantized logits.
    """
    if before.is_cuda:
        from qbench.evaluation.logits import divergence  # which imports Triton

        kl, log_p, log_q, agrees = divergence(before, part.logits)
        change = (part.logits[row, token] - log_q[row]) - (before[row, token] - log_p[row])
        return torch.stack((kl.clamp_(min=0.0)[row], agrees[row].float(), change))
    after = part.log_probabilities
    if after.dtype != torch.float32:
        after = functional.log_softmax(part.logits, dim=-1, dtype=torch.float32)
    log_p = functional.log_softmax(before, dim=-1, dtype=torch.float32)
    difference = log_p - after
    change = -difference[row, token]
    top = before.argmax(dim=-1)
    agrees = (top == part.logits.argmax(dim=-1))[row]
    # Σ p ln(p/q); rounding alone can bring it below 0.
    kl = log_p.exp_().mul_(difference).sum(dim=-1).clamp_(min=0.0)[row]
    return torch.stack((kl, agrees.float(), change))


PERCENTILES = (90, 99, 99.9)


def distributions(measured: pd.DataFrame) -> Distributions:
    """Return mean, quantiles and largest KL and the share of agreeing tokens. ``measured`` has a
    row per scored token with the columns ``kl``, ``agrees`` and ``document``. ``kl`` is Σ p ln(p/q)
    over the vocabulary in nats, p unquantized, q quantized. The mean's standard error is over
    documents."""
    kl, document = measured["kl"].to_numpy(), measured["document"].to_numpy()
    # tokens of one document are not independent
    tokens, sums = np.bincount(document), np.bincount(document, kl.astype(np.float64))
    of_documents = ratio(sums[tokens > 0], tokens[tokens > 0])
    p90, p99, p99_9 = (float(p) for p in np.percentile(kl, PERCENTILES))
    return Distributions(
        tokens=len(kl),
        kl=Divergence(
            mean=float(kl.mean()),
            mean_stderr=of_documents.stderr,
            median=float(np.median(kl)),
            p90=p90,
            p99=p99,
            p99_9=p99_9,
            largest=float(kl.max()),
        ),
        top1_agreement=float(measured["agrees"].to_numpy().mean()),
    )


def divergence_table(
    task: str, measured: pd.DataFrame, texts_of: Callable[[np.ndarray], list[str]] | None = None
) -> pd.DataFrame:
    """Return a table with the columns ``DIVERGENCE_COLUMNS`` from ``measured``, a table of
    ``KLObserver``: a row per request of ``task`` with means over its tokens. With ``texts_of``,
    which gives the texts of token ids [N], the first documents have a row per token instead, up to
    ``TOKENS_KEPT`` tokens. ``kl`` and ``change`` are rounded to float16."""
    tokens = measured[["document", "request", "kl", "change"]]
    requests = tokens.groupby(["document", "request"], sort=False)
    table = requests.mean().reset_index().assign(tokens=requests.size().to_numpy(), text=None)
    if texts_of is not None:
        by_token = table["document"][table["tokens"].cumsum() <= TOKENS_KEPT]
        kept = tokens["document"].isin(by_token)
        single = tokens[kept].assign(tokens=1, text=texts_of(measured["token"][kept].to_numpy()))
        table = pd.concat([single, table[~table["document"].isin(by_token)]], ignore_index=True)
    # float16: half the bytes, without meaningless digits
    table = table.assign(task=task)[list(DIVERGENCE_COLUMNS)]
    return table.astype({"kl": "float16", "change": "float16"}).astype(
        {"kl": "float32", "change": "float32"}
    )


def ratio(values: np.ndarray, weights: np.ndarray) -> Ratio:
    """Return Σ values / Σ weights of two arrays [documents] with the standard error that tables
    give it. ``value`` is None if there are no documents, ``stderr`` is None if one document has all
    the weight."""
    count, total = len(values), float(weights.sum())
    if count == 0:
        return Ratio(value=None, stderr=None, documents=0)
    value = float(values.sum()) / total
    error = None
    if count > 1 and weights.max() < total:
        error = score_error(values.astype(float), weights.astype(float), "mean")
    return Ratio(value=value, stderr=error, documents=count)
