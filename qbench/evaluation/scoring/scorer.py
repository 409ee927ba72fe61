"""The scorer: batches, a forward, and what its log-probabilities add up to."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qbench.errors import EvaluationError, RecipeError
from qbench.evaluation.scoring.asked import Ids
from qbench.evaluation.scoring.batching import Packing, Padding
from qbench.evaluation.scoring.forward import (
    Forward,
    PackedForward,
    PaddedForward,
    decoder_and_head,
)
from qbench.evaluation.scoring.generate import generate, greedy, pinned_hflm
from qbench.evaluation.scoring.hflm import Yardstick, report
from qbench.evaluation.scoring.logits import (
    Answer,
    Observer,
    Projection,
    RowScores,
    Total,
    as_hflm,
    free_cached_memory,
    in_float64,
    in_order,
    is_out_of_memory,
    peak_memory_gib,
    reset_peak_memory,
    rows_at_once,
    score_rows,
    to_device,
    try_out,
)
from qbench.evaluation.scoring.requests import (
    Batch,
    Batching,
    Planned,
    Request,
    check_lengths,
    check_tokens,
    encode_pairs,
    encode_texts,
)
from qbench.evaluation.scoring.side_by_side import packs_at_once, side_by_side
from qbench.evaluation.settings import ScoringSettings, Tolerance, beyond
from qbench.records import DifferenceFromExact, SampleDifference, ScoringReport


@dataclass(slots=True)
class Check:
    """Differences so far. ``by_bias``: judged by their mean with its sign."""

    tolerance: Tolerance
    by_bias: bool = False
    samples: list[SampleDifference] = field(default_factory=list)
    largest: float = 0.0
    total: float = 0.0

    def draw(self, documents: Sequence[Hashable], count: int, seed: int) -> list[int]:
        """Indexes of all requests of ``count`` documents, drawn with ``seed``, in order."""
        distinct = list(dict.fromkeys(documents))
        chosen = set(random.Random(seed).sample(distinct, min(count, len(distinct))))
        return [i for i, document in enumerate(documents) if document in chosen]

    def add(
        self,
        *,
        task: str,
        documents: Sequence[Hashable],
        tokens: Sequence[int],
        fast: Sequence[Answer],
        exact: Sequence[Answer],
    ) -> None:
        """One entry a request. Raises EvaluationError where they leave the tolerance."""
        if not tokens:
            return
        if not all(math.isfinite(score) for score, _ in (*fast, *exact)):
            raise EvaluationError(
                f"{task}: log-likelihoods of the sample are not numbers; the model gives NaN or "
                "infinite logits, which no scoring mode can mend"
            )
        differences = [abs(a - b) for (a, _), (b, _) in zip(fast, exact, strict=True)]
        per_token = [d / count for d, count in zip(differences, tokens, strict=True)]
        groups: dict[Hashable, list[int]] = {}
        for i, document in enumerate(documents):
            groups.setdefault(document, []).append(i)
        signed = [a - b for (a, _), (b, _) in zip(fast, exact, strict=True)]
        bias, stderr = _bias([d / n for d, n in zip(signed, tokens, strict=True)], groups)
        sample = SampleDifference(
            task=task,
            documents=len(groups),
            requests=len(tokens),
            mean_per_token=sum(per_token) / len(per_token),
            largest_per_token=max(per_token),
            changed_answers=sum(_answer(fast, at) != _answer(exact, at) for at in groups.values()),
            bias_per_token=bias,
            bias_stderr=stderr,
            by_bias=self.by_bias,
        )
        if reason := beyond(self.tolerance, sample):
            raise EvaluationError(f"{reason}; use scoring: exact or raise it")
        self.samples.append(sample)
        self.largest = max(self.largest, *differences)
        self.total += sum(differences)

    def report(self) -> DifferenceFromExact:
        """For the record; differences in nats, of whole requests and per scored token."""
        samples = self.samples
        requests = sum(sample.requests for sample in samples)
        count = max(1, requests)
        return DifferenceFromExact(
            documents=sum(sample.documents for sample in samples),
            requests=requests,
            largest=self.largest,
            mean=self.total / count,
            largest_per_token=max((s.largest_per_token for s in samples), default=0.0),
            mean_per_token=sum(s.mean_per_token * s.requests for s in samples) / count,
            changed_answers=sum(sample.changed_answers for sample in samples),
            samples=tuple(samples),
        )


def _bias(
    values: Sequence[float], groups: Mapping[Hashable, Sequence[int]]
) -> tuple[float, float | None]:
    """Mean over documents, whose requests go together, and its standard error."""
    means = [fmean(values[i] for i in at) for at in groups.values()]
    stderr = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return fmean(means), stderr


def _answer(scores: Sequence[Answer], indexes: Sequence[int]) -> int | bool:
    """The likeliest choice, or for a single request whether it is the greedy continuation."""
    if len(indexes) == 1:
        return scores[indexes[0]][1]
    return max(indexes, key=lambda i: scores[i][0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """``as_whole``: the LM head must round as it does over the whole batch."""

    batching: Batching
    forward: Forward
    total: Total
    as_whole: bool
    at_once: int  # batches side by side


def exact_way(settings: ScoringSettings, decoder: torch.nn.Module, device: torch.device) -> Way:
    """HFLM's scores to the bit, without what does not change them: the LM head and log-softmax
    of rows that nobody scores, the KV cache, a [B, L, V] tensor, one tokenizer call a request,
    and two waits for the device a request.

    For the sample of fast scoring the right scores, even where HFLM misreads.
    """
    sample = settings.mode == "fast"
    padding = Padding(
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        window_batch_size=1 if sample else settings.window_batch_size,
        misread=not sample,
        shuffle=None if sample else settings.shuffle,
    )
    forward = PaddedForward(decoder, device)
    return Way(batching=padding, forward=forward, total=as_hflm, as_whole=True, at_once=1)


def fast_way(settings: ScoringSettings, model: Any, decoder: torch.nn.Module) -> Way:
    """Shared prefixes once and no padding. Batch-mates change rounding only, so that a pack that
    was halved for want of memory gives the same scores but for rounding.

    Raises UnavailableError where the model cannot be scored so.
    """
    assert settings.batch_tokens is not None
    packing = Packing(
        max_length=settings.max_length,
        batch_tokens=settings.batch_tokens,
        shuffle=settings.shuffle,
    )
    return Way(
        batching=packing,
        forward=PackedForward(model, decoder),
        total=in_float64,
        as_whole=False,
        at_once=packs_at_once(model.device),
    )


Progress = Callable[[int, int], None]  # requests (or windows) done, and how many there are

SAMPLED_WINDOWS = 2  # of fast scoring's sample; one has up to max_length scored tokens


@dataclass(slots=True)
class Counts:
    """What was scored so far; ``tokens`` are computed ones, padding included."""

    requests: int = 0
    batches: int = 0
    tokens: int = 0
    truncated: int = 0
    halvings: int = 0


class Scorer(LM):
    """An lm-eval language model with exact or fast scores; ``report()`` says how it ran.

    ``progress(done, total)`` counts requests; ``known`` are token ids that are not asked of the
    tokenizer again. Raises UnavailableError where the mode does not
    fit the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: ScoringSettings,
        *,
        progress: Progress | None = None,
        observer: Observer | None = None,
        known: Ids | None = None,
    ) -> None:
        super().__init__()
        self.settings, self._known = settings, known or Ids()
        self.hflm = pinned_hflm(model, tokenizer, settings)  # generates, and knows the tokenizer
        self._device = self.hflm.device
        self._progress, self._observer = progress, observer
        decoder, self.head = decoder_and_head(model)
        shape = model.config.get_text_config()
        self._embedded = len(model.get_input_embeddings().weight)
        self._rows_at_once = rows_at_once(shape.vocab_size)
        self._product = try_out(self.head, shape.hidden_size, model.dtype, self._device)
        self._logits_bytes = shape.vocab_size * model.dtype.itemsize
        self._counts, self._lock = Counts(), threading.Lock()
        self.way = self._exact = exact_way(settings, decoder, self._device)
        self._check: Check | None = None
        if settings.mode == "fast":
            self.way = fast_way(settings, model, decoder)
            self._check = Check(settings.tolerance, settings.amplifies_rounding)
        reset_peak_memory(self._device)

    def report(self) -> ScoringReport:
        """How the scores were made."""
        found = report(self.settings, peak_memory_gib(self._device))
        return found.model_copy(
            update={
                **{name: getattr(self._counts, name) for name in Counts.__slots__},
                "fused_steps": self.way.forward.fused_steps,
                "difference_from_exact": self._check.report() if self._check else None,
            }
        )

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        prefix_id = self.hflm.prefix_token_id
        encoded = self._known.of_pairs(requests, prefix_id) or encode_pairs(
            self.hflm.tokenizer,
            [instance.args for instance in requests],
            add_bos=self.settings.add_bos,
            prefix_id=prefix_id,
        )
        asked = [
            Request(ids.context + ids.continuation, len(ids.context), owner)
            for owner, ids in enumerate(encoded)
        ]
        return self._observed(requests, asked, windows=False)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        prefix_id = self.hflm.prefix_token_id
        texts = self._known.of_texts(requests, prefix_id) or encode_texts(
            self.hflm.tokenizer,
            [instance.args[0] for instance in requests],
            add_bos=self.settings.add_bos,
            prefix_id=prefix_id,
        )
        windows: list[Request] = []
        for owner, ids in enumerate(texts):
            first = 0
            for pair in get_rolling_token_windows(
                ids, prefix_id, self.settings.max_length, context_len=1
            ):
                context, continuation = make_disjoint_window(pair)
                windows.append(Request(context + continuation, len(context), owner, first))
                first += len(continuation)
        sums: list[float] = [0] * len(requests)
        answers = self._observed(requests, windows, windows=True)
        for window, (log_likelihood, _) in zip(windows, answers, strict=True):
            sums[window.owner] += log_likelihood
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return generate(self.hflm, requests, disable_tqdm)

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """See :func:`qbench.evaluation.scoring.greedy.greedy`."""
        check_tokens(prompts, self._embedded)
        return greedy(self.hflm.model, prompts, tokens, progress=self._progress)

    def _observed(
        self, instances: Sequence[Any], requests: Sequence[Request], *, windows: bool
    ) -> list[Answer]:
        check_lengths(requests, self.settings.max_length)
        check_tokens((request.tokens for request in requests), self._embedded)
        self._counts.requests += len(requests)
        self._counts.truncated += sum(
            len(r.tokens) > self.settings.max_length + 1 for r in requests
        )
        if self._observer is not None:
            lengths = np.zeros(len(instances), dtype=np.int64)
            for request in requests:
                lengths[request.owner] += request.scored
            self._observer.begin(instances, lengths.tolist(), self.head)
        answers = self._score(
            self.way, requests, windows=windows, observer=self._observer, counts=self._counts
        )
        if self._observer is not None:
            self._observer.end()
        if self._check is not None:
            self._compare(self._check, instances, requests, answers, windows)
        return answers

    def _compare(
        self,
        check: Check,
        instances: Sequence[Any],
        requests: Sequence[Request],
        answers: Sequence[Answer],
        windows: bool,
    ) -> None:
        """Fast answers with exact ones, of some documents (of few windows just one: each costs
        as much to score exactly as it does fast)."""
        documents: list[Hashable] = [
            (instances[r.owner].task_name, i if windows else instances[r.owner].doc_id)
            for i, r in enumerate(requests)
        ]
        count = self.settings.sample
        if windows:
            count = min(SAMPLED_WINDOWS, count, max(1, len(requests) // 20))
        chosen = check.draw(documents, count, self.settings.seed)
        sample = [requests[i] for i in chosen]
        exact = self._score(self._exact, sample, windows=windows, observer=None, counts=Counts())
        check.add(
            task=", ".join(sorted({instance.task_name for instance in instances})),
            documents=[documents[i] for i in chosen],
            tokens=[request.scored for request in sample],
            fast=[answers[i] for i in chosen],
            exact=exact,
        )

    def _score(
        self,
        way: Way,
        requests: Sequence[Request],
        *,
        windows: bool,
        observer: Observer | None,
        counts: Counts,
    ) -> list[Answer]:
        """Answers in the order of ``requests``."""
        if not requests:
            return []
        results: list[tuple[Batch, RowScores]] = []
        done, way.forward.stopped = 0, threading.Event()
        with (
            way.forward.ready(),
            side_by_side(way.at_once, way.forward.stopped) as each,
        ):
            plan = way.batching.plan(requests, windows=windows)
            found = each(lambda batch: self._run(way, batch, requests, observer, counts), plan)
            for batch, scores in zip(plan, found, strict=True):
                results += scores
                done += batch.requests
                if self._progress is not None and counts is self._counts:
                    self._progress(done, len(requests))
        return in_order(results, len(requests), way.total)

    def _run(
        self,
        way: Way,
        planned: Planned,
        requests: Sequence[Request],
        observer: Observer | None,
        counts: Counts,
    ) -> list[tuple[Batch, RowScores]]:
        """Scores on the device; a batch that does not fit is halved."""
        batch = planned.lay(requests)
        halves = planned.halves()
        try:
            result = self._rows(way, batch, observer)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if halves is None:
                raise EvaluationError(
                    f"out of memory on one document of {planned.longest} tokens; "
                    "lower evaluation.max_length or use a larger device"
                ) from error
        else:
            with self._lock:
                counts.batches += 1
                counts.tokens += batch.ids.size
            return [(batch, result)]
        # Outside the handler: there the traceback would keep the failed forward's tensors.
        free_cached_memory(self._device)
        with self._lock:
            counts.halvings += 1
        return [
            scores for half in halves for scores in self._run(way, half, requests, observer, counts)
        ]

    def _rows(self, way: Way, batch: Batch, observer: Observer | None) -> RowScores:
        with torch.no_grad():
            hidden = way.forward(batch)
            rows = to_device(batch.rows, self._device)
            projection = Projection()
            if way.as_whole:
                projection = self._product.projection(batch.ids.size, rows, self._logits_bytes)
            return score_rows(
                self.head,
                hidden.index_select(0, rows),
                batch.scored,
                projection,
                read=batch.read,
                softmax_dtype=self.hflm.softmax_dtype,
                at_once=self._rows_at_once // way.at_once,
                observer=observer,
            )


def language_model(
    model: Any,
    tokenizer: Any,
    settings: ScoringSettings,
    *,
    progress: Progress | None = None,
    observer: Observer | None = None,
    known: Ids | None = None,
) -> Scorer | Yardstick:
    """An lm-eval language model over ``model``, a causal LM of transformers in eval mode.

    Mode ``lm-eval`` is HFLM itself with these settings stated, ``exact`` gives its scores faster,
    ``fast`` gives scores that lie within ``settings.tolerance`` of exact ones.
    ``progress(done, total)`` counts requests; ``observer`` sees hidden states, logits and
    log-probabilities of every scored token; ``known`` are token ids of requests, if there are any
    by now. ``report()`` of what is returned says how it ran.

    Raises RecipeError for settings that cannot be, UnavailableError where exact and fast
    scoring do not fit the model; scoring itself raises EvaluationError.
    """
    if settings.mode != "lm-eval":
        return Scorer(model, tokenizer, settings, progress=progress, observer=observer, known=known)
    if observer is not None:
        raise RecipeError(
            "scoring: lm-eval shows nobody its log-probabilities; use exact or fast for damage"
        )
    return Yardstick(model, tokenizer, settings)
