"""Score requests exactly or fast, as an lm-eval language model. A request goes through these steps,
top to bottom.

1. ``start``, whose answers may be waited for later, turns text into ``Requests`` of token ids;
2. ``_queue`` plans batches of them (``batching``: HFLM's own, or packs that share beginnings);
3. ``_run`` collates one batch, or those that go through a streamed model together
   (``qbench.streaming``), and splits what does not fit the device. Of its hidden states, those
   that are scored become log-probabilities (``forward``);
4. ``in_order`` adds these up, request by request.

lm-eval's HFLM, with every setting that moves scores stated, is what exact and fast scoring are
compared with, and generates what slots cannot.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from qbench.checkpoints.tokenizer import puts_bos
from qbench.errors import EvaluationError, first_line
from qbench.evaluation.scoring.batching import (
    Batch,
    BatchPlan,
    Counts,
    Packing,
    Padding,
    Requests,
    check_tokens,
    join,
    requests_of,
)
from qbench.evaluation.scoring.forward import (
    JOINED_TOKENS,
    LOG_PROBABILITY_BYTES,
    JoinedForward,
    LogLikelihood,
    Observer,
    PackedForward,
    PaddedForward,
    Projection,
    RowScores,
    decoder_and_head,
    in_order,
    joined_forward,
    probe_matmul,
    rope_limit,
    score_rows,
    to_device,
    to_host,
)
from qbench.evaluation.scoring.generate import (
    Prompt,
    decode,
    decode_by_transformers,
    generate,
    generate_by_hflm,
    unsupported_by_slots,
)
from qbench.evaluation.settings import (
    ScoringSettings,
    merge_differences,
    sample_violation,
    undecided,
)
from qbench.machine import peak_memory_gib, reset_peak_memory
from qbench.progress import Advance
from qbench.records import ANSWERS, DifferenceFromExact, SampleDifference, ScoringReport
from qbench.streaming import stream_of


def pinned_hflm(model: torch.nn.Module, tokenizer: Any, settings: ScoringSettings) -> HFLM:
    """Return lm-eval's HFLM over a loaded model, with the cell's batch size, length, BOS and
    softmax dtype."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of every model that is given as an object
    try:
        return HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            add_bos_token=settings.add_bos,
            softmax_dtype=None if settings.softmax_dtype == "model" else "float32",
        )
    finally:
        logger.setLevel(level)


class HFLMScorer(LM):
    """An lm-eval language model that scores by HFLM itself."""

    def __init__(self, model: Any, tokenizer: Any, settings: ScoringSettings) -> None:
        super().__init__()
        self.settings = settings
        self.hflm = pinned_hflm(model, tokenizer, settings)
        reset_peak_memory(self.hflm.device.type)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether greedy) of each request, by HFLM. Raises
        EvaluationError if HFLM stops."""
        return self._by_hflm("log-likelihoods", self.hflm.loglikelihood, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each request's whole text, by HFLM in batches of
        ``window_batch_size``. Raises EvaluationError if HFLM stops."""
        self.hflm.batch_size_per_gpu = self.settings.window_batch_size
        try:
            score = self.hflm.loglikelihood_rolling
            return self._by_hflm("rolling log-likelihoods", score, requests)
        finally:
            self.hflm.batch_size_per_gpu = self.settings.batch_size

    def _by_hflm(
        self, what: str, score: Callable[..., list[Any]], requests: list[Any]
    ) -> list[Any]:
        """Return HFLM's scores. Raises EvaluationError, naming ``what`` was scored, in place of its
        bare errors such as an IndexError for an empty choice."""
        try:
            return score(requests, disable_tqdm=True)
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise EvaluationError(
                f"lm-eval's HFLM stopped at the {what} ({type(error).__name__}: "
                f"{first_line(error)}); a request may have an empty context or continuation, or "
                "more tokens than evaluation.max_length: scoring: exact says which"
            ) from error

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return HFLM's answers as texts, see ``generate_by_hflm``."""
        return generate_by_hflm(self.hflm, requests, Counts())

    def report(self, rolling: Iterable[str] = ()) -> ScoringReport:
        """Return how scores are made; ``rolling``: tasks that score whole texts."""
        return report(self.settings, self.hflm, rolling)


def report(
    settings: ScoringSettings, hflm: HFLM, rolling: Iterable[str], **counted: Any
) -> ScoringReport:
    """Return the record's report on scoring: the settings, peak memory, and ``counted``, other
    fields of the report. ``rolling``: tasks that score whole texts. lm-eval puts the prefix token
    before these; if the tokenizer adds a BOS too, the report lists them as ``doubled_bos``."""
    fast, device = settings.mode == "fast", hflm.device.type
    packed = fast and settings.packed
    bos = settings.add_bos is not False and puts_bos(hflm.tokenizer)
    doubled = bos and hflm.prefix_token_id == hflm.tokenizer.bos_token_id
    return ScoringReport(
        bos=bos,
        doubled_bos=tuple(rolling) if doubled else (),
        **{"batching": "packed" if packed else "padded, longest first", **counted},
        mode=settings.mode,
        softmax_dtype=settings.softmax_dtype,
        batch_tokens=settings.batch_tokens,
        batch_size=None if fast else settings.batch_size,
        window_batch_size=None if fast else settings.window_batch_size,
        peak_memory_gib=peak_memory_gib(device),
    )


STATES_BYTES = 16 * 2**30  # of hidden states that wait on the host while a model is streamed
ROLLING = "loglikelihood_rolling"  # lm-eval's method for whole texts
LIKELIHOODS = ("loglikelihood", ROLLING)
SAMPLE_TOKENS = 4096  # of a batch of fast scoring's sample: few are padding
SAMPLED_WINDOWS = 2  # of fast scoring's sample; one has up to max_length scored tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A way to score: how requests become batches, and the forward pass that fits them.

    ``exact`` gives HFLM's scores to the bit, without the work that does not change them: LM head
    and log-softmax of rows that are not scored, the KV cache, a [B, L, V] tensor, and for each
    request a tokenizer call and two waits for the device. Else batches are as large as the device's
    memory suggests. If the model takes packs, shared beginnings are computed once and nothing
    is padded. Batch-mates change rounding only, unless a quantizer's scales are shared by a batch.
    """

    batching: Padding | Packing
    forward: PaddedForward | PackedForward
    exact: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Requests for a ``backend`` to score, and what counts them, sees their rows, and is told of
    their progress."""

    backend: Backend
    requests: Requests
    counts: Counts
    observer: Observer | None = None
    progress: Advance | None = None


class Scorer(LM):
    """An lm-eval language model with exact or fast scores; ``report()`` says how they were made.

    A task whose fast scores leave the tolerance is scored exactly if ``settings.fallback`` says so,
    else refused. ``progress(done, total)`` counts requests; ``samples``: as of ``language_model``.
    Raises UnavailableError if the mode does not fit the model.
    """

    _batching: Mapping[str, str] = {}  # in a report, if it is not that of the settings

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: ScoringSettings,
        *,
        progress: Advance | None = None,
        observer: Observer | None = None,
        samples: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.settings = settings
        self.hflm = pinned_hflm(model, tokenizer, settings)  # generates, and holds the tokenizer
        self._device = self.hflm.device
        self._progress, self._observer, self._samples = progress, observer, samples
        decoder, self.head = decoder_and_head(model, "; set scoring: lm-eval")
        vocabulary = model.config.get_text_config().vocab_size
        self._embedded = len(model.get_input_embeddings().weight)
        self._by_kernel = self._device.type == "cuda" and self.hflm.softmax_dtype == torch.float32
        # Logits and log-probabilities of 4 bytes each, and a copy; by kernels 1 GiB of logits.
        self._rows_at_once = max(16, LOG_PROBABILITY_BYTES // (12 * vocabulary))
        self._more_by_kernel = max(1, 24 // model.dtype.itemsize)
        self._product = probe_matmul(self.head.linear, model.dtype, self._device)
        self._logits_bytes = vocabulary * model.dtype.itemsize
        self._stream = stream_of(model)
        self._state_bytes = model.get_input_embeddings().weight.shape[1] * model.dtype.itemsize
        self._counts, self._turn = Counts(), threading.Lock()
        kind, limit = rope_limit(model.config.get_text_config())
        padding = Padding(
            max_length=settings.max_length,
            batch_size=settings.batch_size,
            window_batch_size=settings.window_batch_size,
            rope_limit=limit,
            one_length=kind is not None and kind.startswith(("dynamic", "top-k")),
        )
        padded = PaddedForward(decoder, self._device)
        exact = None
        if not (self._stream or settings.shares_scales):
            exact = joined_forward(model, padded, self._product)
        self.exact = Backend(batching=padding, forward=exact or padded, exact=True)
        self.fast: Backend | None = None
        if settings.mode == "fast":
            right = padding
            if not settings.shares_scales:  # joined batches are large: they share beginnings
                size = {"window_batch_size": 1} if exact else {"batch_tokens": SAMPLE_TOKENS}
                right = replace(padding, **size)
            self._reference = replace(self.exact, batching=right)
            tokens = settings.batch_tokens
            if settings.packed:
                batching = Packing(max_length=settings.max_length, batch_tokens=tokens)
                forward = PackedForward(model, decoder)
            else:
                batching, forward = replace(padding, batch_tokens=tokens), padded
            self.fast = Backend(batching=batching, forward=forward, exact=False)
        reset_peak_memory(self._device.type)

    def report(self, rolling: Iterable[str] = ()) -> ScoringReport:
        """Return how the scores since the last report were made, and start a new report.
        ``rolling``: tasks that score whole texts."""
        counted, self._counts = asdict(self._counts), Counts()
        differences = counted.pop("differences")
        if self.settings.mode == "fast":
            counted["difference_from_exact"] = merge_differences(differences)
        return report(self.settings, self.hflm, rolling, **self._batching, **counted)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[LogLikelihood]:
        """Return (log-likelihood in nats, whether greedy) of each request's continuation after its
        context. Raises as ``read``, and for a request without tokens in either."""
        return self.start("loglikelihood", requests)()

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each request's whole text in nats, the sum over its rolling
        windows. Raises as ``read``."""
        return self.start(ROLLING, requests)()

    def start(self, kind: str, requests: list[Any]) -> Callable[[], list[Any]]:
        """Begin a call of the method ``kind``. Return a function that waits for its answers; a GPU
        may get the next call's work before."""
        if kind not in LIKELIHOODS:
            answers = getattr(self, kind)(requests)
            return lambda: answers
        encoded = self._requests(kind, requests)
        scores = self.read(requests, encoded)
        if kind != ROLLING:
            return scores

        def add_up() -> list[float]:
            """Return the log-likelihood of each text, the sum of those of its windows."""
            sums: list[float] = [0] * len(requests)
            for owner, (log_likelihood, _) in zip(encoded.owners.tolist(), scores(), strict=True):
                sums[owner] += log_likelihood
            return sums

        return add_up

    def _requests(self, kind: str, instances: Sequence[Any]) -> Requests:
        """Return the requests of lm-eval's ``instances`` for the method ``kind``."""
        return requests_of(
            self.hflm.tokenizer,
            [instance.args for instance in instances],
            add_bos=self.settings.add_bos,
            prefix_id=self.hflm.prefix_token_id,
            window=self.settings.max_length if kind == ROLLING else None,
        )

    def prepare(self, kind: str, instances: Sequence[Any]) -> None:
        """Encode ``instances`` and plan their batches for the next call of the method ``kind``,
        beside a call of another task. Raises EvaluationError for a request without tokens."""
        if kind in LIKELIHOODS:
            requests = self._requests(kind, instances)
            backend = self.fast or self.exact
            if backend and len(requests):
                requests.plan(backend.batching)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to lm-eval's requests as texts: decoded in slots, or by HFLM if these
        do not support model or task."""
        kwargs = [request.args[1] for request in requests]
        if reason := unsupported_by_slots(self.hflm.model, kwargs):
            reasons = {request.task_name: reason for request in requests}
            self._counts.transformers_generation |= reasons
            return generate_by_hflm(self.hflm, requests, self._counts)
        return generate(self.hflm, requests, progress=self._progress, counts=self._counts)

    def answer(self, prompts: Sequence[Prompt], ends: Collection[int]) -> list[list[int]]:
        """Return the token ids of the model's answer to each of ``prompts``, up to and with one of
        ``ends``, or up to the prompt's limit."""
        model = self.hflm.model
        if reason := unsupported_by_slots(model, [{}]):
            self._counts.transformers_generation[ANSWERS] = reason
            size = self.settings.batch_size
            return decode_by_transformers(model, prompts, ends=ends, batch_size=size)
        return decode(
            model, prompts, ends=ends, longest=self.hflm.max_length, progress=self._progress,
            counts=self._counts,
        )  # fmt: skip

    def read(
        self, instances: Sequence[Any], requests: Requests
    ) -> Callable[[], list[LogLikelihood]]:
        """Queue ``requests``, whose ``owners`` are indexes in lm-eval's ``instances``, all of one
        task, on the device. Return a function that waits for their log-likelihoods and adds the
        call to the report. Either raises EvaluationError if a continuation or all requests are too
        long, if memory is short, or if fast scores leave the tolerance without ``fallback``."""
        if not len(requests):
            return list
        most, task = self.settings.max_length, instances[0].task_name
        if (longest := requests.scored.max()) > most:
            raise EvaluationError(  # HFLM would stop with a bare assertion
                f"a continuation of {longest} tokens does not fit into "
                f"evaluation.max_length {most}; raise max_length, or leave the task out"
            )
        check_tokens([[requests.tokens.max()]], self._embedded)
        truncated = int((requests.lengths > most + 1).sum())
        counts = Counts()
        counts.add_requests(task, len(requests), truncated, most)
        lengths = np.bincount(requests.owners, requests.scored, len(instances)).astype(np.int64)

        def observed(backend: Backend) -> Callable[[], list[LogLikelihood]]:
            """Queue all requests on the device; return a function that waits for their scores."""
            observer, wait = self._observer, None
            if observer is not None:
                observer = observer.begin(instances, lengths.tolist(), self.head)
            queued = self._queue(Work(backend, requests, counts, observer, self._progress))
            if observer is not None:
                wait = observer.end()

            @cache
            def scores() -> list[LogLikelihood]:
                in_input_order = queued()
                if wait is not None:
                    wait()
                return in_input_order

            return scores

        scores = observed(self.fast or self.exact)
        reasons: Iterator[str | None] = iter((None, None))
        if self.fast is not None:
            # Windows are independent: each costs as much to score exactly as fast
            documents: Sequence[Hashable] = range(len(requests))
            if not requests.windows:
                documents = [instances[owner].doc_id for owner in requests.owners.tolist()]
            reasons = self._compare(task, requests, documents, scores, counts)
        next(reasons)

        def finish() -> list[LogLikelihood]:
            reason, answers = next(reasons), scores
            if reason is not None:
                if not self.settings.fallback:
                    raise EvaluationError(reason)
                counts.exact_tasks[task] = reason
                answers = observed(self.exact)
            in_input_order = answers()
            self._counts.add(counts)
            return in_input_order

        return finish

    def _compare(
        self,
        task: str,
        requests: Requests,
        documents: Sequence[Hashable],
        fast: Callable[[], Sequence[LogLikelihood]],
        counts: Counts,
    ) -> Iterator[str | None]:
        """Yield None when a sample of documents (of windows two) is queued to be scored exactly;
        then why the scores that ``fast`` waits for are too far from exact ones, None if they are
        not. ``documents``: the document of each request. The sample is doubled while it does not
        tell whether the bias is within its bound, and before a small one is said to be too far."""
        exact, distinct = dict[int, LogLikelihood](), list(dict.fromkeys(documents))
        # In an order in which a larger sample holds a smaller one
        order = random.Random(self.settings.seed).sample(distinct, len(distinct))
        most = self.settings.sample
        if requests.windows:
            most = min(most, SAMPLED_WINDOWS)
        count = min(most, self._samples.get(task, most))
        if not count:
            yield from (None, None)
            return
        while True:
            chosen = set(order[:count])
            indexes = [i for i, document in enumerate(documents) if document in chosen]
            new = [i for i in indexes if i not in exact]
            queued = self._queue(Work(self._reference, requests.take(new), Counts()))
            if not exact:
                yield None
            scores = fast()
            exact |= dict(zip(new, queued(), strict=True))
            difference = compare(
                task,
                documents=[documents[i] for i in indexes],
                tokens=requests.scored[indexes].tolist(),
                fast=[scores[i] for i in indexes],
                exact=[exact[i] for i in indexes],
                by_bias=self.settings.amplifies_rounding,
                population=len(order),
            )
            (sample,) = difference.samples
            reason = sample_violation(self.settings.tolerance, sample)
            unclear = undecided(self.settings.tolerance, sample) or (reason and count < most)
            if count >= len(order) or not unclear:
                break
            count *= 2
        if reason:
            yield f"{reason}; use scoring: exact, or raise this tolerance"
        counts.differences.append(difference)
        yield None

    def _queue(self, work: Work) -> Callable[[], list[LogLikelihood]]:
        """Score batches of requests, which a GPU may go on with; return a function that waits for
        the scores, in the order of the requests."""
        backend, requests, progress = work.backend, work.requests, work.progress
        plans = requests.plan(backend.batching)
        parts = [[p] for p in plans]
        if self._stream:
            parts = list(_parts(plans, STATES_BYTES // self._state_bytes))
        elif isinstance(backend.forward, JoinedForward):
            parts = list(_parts(plans, JOINED_TOKENS, backend.forward.least - 1))
        results: list[tuple[Batch, RowScores]] = []
        done = 0
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        # A thread reads the next part while the device computes; one call at a time has it.
        with self._turn, torch.cuda.stream(stream), ThreadPoolExecutor(1) as thread:
            read = partial(thread.submit, self._read_rows, work, stream)
            following = read(parts[0])
            for part, after in zip(parts, [*parts[1:], None], strict=True):
                batches, following = following.result, after and read(after)
                count = sum(planned.requests for planned in part)

                def tell(share: float, done: int = done, count: int = count) -> None:
                    if progress is not None:
                        progress(done + round(share * count), len(requests))

                results += self._run(work, part, batches, tell)
                tell(1.0)
                done += count
        assert sum(len(batch.counts) for batch, _ in results) == len(requests)
        values, flags = zip(*((s.log_probability, s.likeliest) for _, s in results), strict=True)
        copied = to_host(torch.cat(values), torch.cat(flags))
        return lambda: in_order(results, copied(), exact=backend.exact)

    def _read_rows(
        self, work: Work, stream: torch.cuda.Stream | None, part: Sequence[BatchPlan]
    ) -> list[tuple[Batch, Any]]:
        """Return the batches of ``part``, joined if the backend takes them so, each with what the
        observer reads ahead for it: of a streamed model nothing, since they would not fit the
        device. Copies are queued on ``stream``."""
        observer = work.observer
        with torch.cuda.stream(stream):
            batches = [planned.collate(work.requests) for planned in part]
            forward = work.backend.forward
            if isinstance(forward, JoinedForward) and batches[0].ids.size >= forward.least:
                batches = [join(batches)]
            if observer is None or self._stream:
                return [(batch, None) for batch in batches]
            return [(batch, observer.prepare(batch.scored)) for batch in batches]

    def _run(
        self,
        work: Work,
        part: Sequence[BatchPlan],
        read: Callable[[], list[tuple[Batch, Any]]],
        tell: Callable[[float], None],
    ) -> list[tuple[Batch, RowScores]]:
        """Score batches on the device, and split those that do not fit its memory. The batches
        ``part`` of a streamed model go through its blocks together; if one does not fit, all are
        split. ``read`` gives what ``_read_rows`` does; ``tell(share done)`` is called meanwhile."""
        backend, observer, counts = work.backend, work.observer, work.counts
        by_kernel, at_once = self._by_kernel and not backend.exact, self._rows_at_once
        at_once *= self._more_by_kernel if by_kernel else 1
        try:
            batches = read()
            calls = [partial(backend.forward, batch) for batch, _ in batches]
            with torch.no_grad():
                states = (
                    self._stream.lockstep(calls, tell) if self._stream else (f() for f in calls)
                )
                results = []
                for (batch, prepared), hidden in zip(batches, states, strict=True):
                    rows, projection = to_device(batch.rows, self._device), Projection()
                    if backend.exact:
                        size = batch.ids.size
                        projection = self._product.projection(size, rows, self._logits_bytes)
                    hidden, watch = hidden.index_select(0, rows), None
                    if observer is not None:
                        if self._stream:
                            prepared = observer.prepare(batch.scored)
                        watch = observer.batch(prepared, hidden, projection)
                    scores = score_rows(
                        self.head,
                        hidden,
                        batch.scored,
                        projection,
                        softmax_dtype=self.hflm.softmax_dtype,
                        at_once=at_once,
                        by_kernel=by_kernel,
                        watch=watch,
                    )
                    results.append((batch, scores))
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            halves = [half for planned in part for half in planned.split() or (planned,)]
            if len(halves) == len(part):
                raise EvaluationError(
                    f"out of memory on one document of {max(planned.tokens for planned in part)} "
                    "tokens; lower evaluation.max_length or use a larger device"
                ) from error
        else:
            counts.batches += len(batches)
            counts.tokens += sum(batch.ids.size for batch, _ in batches)
            return results
        # Outside the handler: there the traceback would keep the failed forward's tensors.
        clear_device_cache(garbage_collection=True)
        counts.halvings += len(halves) - len(part)
        parts = [halves] if self._stream else [[half] for half in halves]
        results = []
        for smaller in parts:
            read = partial(self._read_rows, work, None, smaller)
            results += self._run(work, smaller, read, tell)
        return results


def language_model(
    model: Any,
    tokenizer: Any,
    settings: ScoringSettings,
    *,
    progress: Advance | None = None,
    observer: Observer | None = None,
    samples: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Return an lm-eval language model over ``model``: a causal LM of transformers in eval mode, or
    a runtime of lm-eval or llama.cpp, which scores in its one way, whatever the mode.

    Mode ``lm-eval`` is HFLM itself with these settings, ``exact`` gives its scores faster, ``fast``
    gives scores within ``settings.tolerance`` of exact ones. ``progress(done, total)`` counts
    requests; ``observer`` sees hidden states, logits and log-probabilities of every scored token.
    HFLM and lm-eval's runtimes call neither. ``samples``: of how many documents of a task fast
    scores are compared with exact ones at first, if fewer than ``settings.sample``. The result's
    ``report()`` says how it scored.

    Raises UnavailableError if exact and fast scoring do not fit the model; scoring itself raises
    EvaluationError.
    """
    if isinstance(model, LM):  # lm-eval's, of another runtime
        from qbench.evaluation.llamacpp import ExternalScorer  # which imports this module

        return ExternalScorer(model, settings)
    if hasattr(model, "scorer"):  # llama.cpp's
        return model.scorer(tokenizer, settings, progress=progress, observer=observer)
    if settings.mode != "lm-eval":
        return Scorer(
            model, tokenizer, settings, progress=progress, observer=observer, samples=samples
        )
    assert observer is None, "HFLM gives no log-probabilities"
    return HFLMScorer(model, tokenizer, settings)


def _parts(plans: Sequence[BatchPlan], most: int, least: int = 0) -> Iterator[list[BatchPlan]]:
    """Yield batches of at most ``most`` tokens together; one of ``least`` or fewer alone."""
    part: list[BatchPlan] = []
    held = 0
    for planned in plans:
        held += planned.tokens
        if part and (held > most or min(planned.tokens, part[-1].tokens) <= least):
            yield part
            part, held = [], planned.tokens
        part.append(planned)
    if part:
        yield part


def compare(
    task: str,
    *,
    documents: Sequence[Hashable],
    tokens: Sequence[int],
    fast: Sequence[LogLikelihood],
    exact: Sequence[LogLikelihood],
    by_bias: bool = False,
    population: int | None = None,
) -> DifferenceFromExact:
    """Compare ``fast`` with ``exact`` scores of a sample of ``task``, one entry per request: its
    document, scored ``tokens`` and log-likelihood. With ``by_bias`` the sample will be judged by
    its mean difference alone; ``population``: how many documents it was drawn from. Raises
    EvaluationError for scores that are not numbers."""
    if not all(math.isfinite(score) for score, _ in (*fast, *exact)):
        why = "fast scoring gives NaN or infinite logits, exact does not; set scoring: exact"
        if not all(math.isfinite(score) for score, _ in exact):
            why = (
                "the model gives NaN or infinite logits, which no scoring mode can fix; try "
                "another compute_dtype, or leave the cell out"
            )
        raise EvaluationError(f"{task}: log-likelihoods of the sample are not numbers; {why}")
    sample = pd.DataFrame({"document": list(documents), "tokens": list(tokens)})
    sample["off"] = [a - b for (a, _), (b, _) in zip(fast, exact, strict=True)]
    sample["per_token"] = sample["off"] / sample["tokens"]
    by_document = sample.groupby("document", sort=False)

    def answer(scores: Sequence[LogLikelihood], indexes: Sequence[int]) -> int | bool:
        """Return the likeliest choice; of a single request whether it is greedy."""
        best = max(indexes, key=lambda i: scores[i][0])
        return best if len(indexes) > 1 else scores[best][1]

    bias = by_document["per_token"].mean()  # requests of a document go together
    rows = by_document.indices.values()
    off, far = sample["off"].abs(), sample["per_token"].abs()
    difference = SampleDifference(
        task=task,
        documents=len(bias),
        population=population,
        requests=len(sample),
        mean_per_token=far.mean(),
        largest_per_token=far.max(),
        changed_answers=sum(answer(fast, at) != answer(exact, at) for at in rows),
        bias_per_token=bias.mean(),
        bias_stderr=bias.sem() if len(bias) > 1 else None,
        by_bias=by_bias,
    )
    shared = difference.model_dump(include={*DifferenceFromExact.model_fields} - {"samples"})
    return DifferenceFromExact(largest=off.max(), mean=off.mean(), samples=(difference,), **shared)
