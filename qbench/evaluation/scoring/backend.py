"""What exact and fast scoring share: HFLM's interface, tokenization, windows, the report."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from qbench.errors import UnavailableError
from qbench.evaluation.scoring.head import try_out
from qbench.evaluation.scoring.memory import peak_memory_gib, reset_peak_memory
from qbench.evaluation.scoring.requests import Request, check_lengths
from qbench.evaluation.scoring.rows import Observer, Scored, rows_at_once
from qbench.evaluation.scoring.tokenization import check_bos, encode_pairs, encode_texts
from qbench.evaluation.settings import ScoringSettings
from qbench.record import ScoringReport

Answer = tuple[float, bool]  # log-likelihood in nats, and whether every token was the likeliest
Progress = Callable[[int, int], None]  # requests (or windows) done, and how many there are


class PinnedHFLM(HFLM):
    """lm-eval's own HFLM with every setting that moves scores stated: the yardstick."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any, settings: ScoringSettings) -> None:
        check_bos(tokenizer, settings.add_bos)
        logger = logging.getLogger("lm_eval.models.huggingface")
        level = logger.level
        logger.setLevel(logging.ERROR)  # it warns of every model that is given as an object
        try:
            super().__init__(
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
        self.settings = settings
        reset_peak_memory(self.device)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        requests_size = self.batch_size_per_gpu
        self.batch_size_per_gpu = self.settings.window_batch_size
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = requests_size

    def report(self) -> ScoringReport:
        """How the scores were made."""
        packed = self.settings.mode == "fast"
        return ScoringReport(
            mode=self.settings.mode,
            softmax_dtype=self.settings.softmax_dtype,
            shuffle=self.settings.shuffle,
            batching="packed" if packed else "padded, longest first",
            batch_tokens=self.settings.batch_tokens,
            batch_size=None if packed else self.settings.batch_size,
            window_batch_size=None if packed else self.settings.window_batch_size,
            peak_memory_gib=peak_memory_gib(self.device),
        )


class Backend(PinnedHFLM, abc.ABC):
    """Scores token ids by ``_score`` and ``_score_windows``; generation stays HFLM's."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        settings: ScoringSettings,
        *,
        progress: Progress | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(model, tokenizer, settings)
        self._progress = progress
        self._observer = observer
        self._instances: Sequence[Any] = ()
        self._done = self._total = 0
        self._counts = {"requests": 0, "batches": 0, "tokens": 0, "truncated": 0, "halvings": 0}
        self._decoder, self._head = _parts(model)
        self._vocabulary = model.config.vocab_size
        self._rows_at_once = rows_at_once(self._vocabulary)
        self._product = try_out(self._head, model.config.hidden_size, model.dtype, self.device)

    def report(self) -> ScoringReport:
        return super().report().model_copy(update=self._counts)

    @abc.abstractmethod
    def _score(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers in input order."""

    @abc.abstractmethod
    def _score_windows(self, windows: Sequence[Request]) -> list[Answer]:
        """The same for rolling windows, which HFLM batches differently."""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        encoded = encode_pairs(
            self.tokenizer,
            [instance.args for instance in requests],
            add_bos=self.settings.add_bos,
            prefix_id=self.prefix_token_id,
        )
        asked = [
            Request(ids.context + ids.continuation, len(ids.context), owner)
            for owner, ids in enumerate(encoded)
        ]
        return self._observed(requests, asked, self._score)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = encode_texts(
            self.tokenizer,
            [instance.args[0] for instance in requests],
            add_bos=self.settings.add_bos,
            prefix_id=self.prefix_token_id,
        )
        windows: list[Request] = []
        for owner, ids in enumerate(texts):
            place = 0
            for pair in get_rolling_token_windows(
                ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            ):
                context, continuation = make_disjoint_window(pair)
                windows.append(Request(context + continuation, len(context), owner, place))
                place += len(continuation)
        sums: list[float] = [0] * len(requests)
        answers = self._observed(requests, windows, self._score_windows)
        for window, (log_likelihood, _) in zip(windows, answers, strict=True):
            sums[window.owner] += log_likelihood
        return sums

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """lm-eval's inner interface: ((texts), context ids, continuation ids) each."""
        asked = [
            Request(list(context) + list(continuation), len(context), owner)
            for owner, (_, context, continuation) in enumerate(requests)
        ]
        check_lengths(asked, self.max_length)
        self._instances = ()
        return self._score(asked)

    def _observed(
        self,
        instances: Sequence[Any],
        requests: Sequence[Request],
        score: Callable[[Sequence[Request]], list[Answer]],
    ) -> list[Answer]:
        check_lengths(requests, self.max_length)
        self._instances = instances
        self._counts["requests"] += len(requests)
        self._counts["truncated"] += sum(len(r.tokens) > self.max_length + 1 for r in requests)
        self._done, self._total = 0, len(requests)
        if self._observer is None:
            return score(requests)
        lengths = [0] * len(instances)
        for request in requests:
            lengths[request.owner] += request.scored
        self._observer.begin(instances, lengths)
        answers = score(requests)
        self._observer.end()
        return answers

    @property
    def _observe(self) -> Callable[[Scored, torch.Tensor], None] | None:
        return None if self._observer is None else self._observer.observe

    def _document(self, owner: int) -> Hashable:
        """What the requests of one document have in common."""
        if not self._instances:
            return owner
        instance = self._instances[owner]
        return instance.task_name, instance.doc_id

    def _advance(self, requests: int) -> None:
        self._done += requests
        if self._progress is not None:
            self._progress(self._done, self._total)


def _parts(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Decoder and LM head, checked to be all there is between token ids and logits."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    probe = torch.arange(1, 9, device=model.device)[None]
    with torch.no_grad():
        whole = model(probe, use_cache=False).logits
        parts = head(decoder(probe, use_cache=False)[0])
    if not torch.equal(whole, parts):
        raise UnavailableError(
            f"{type(model).__name__} changes its logits after the LM head, which exact and fast "
            "scoring leave out; use scoring: lm-eval"
        )
    return decoder, head
