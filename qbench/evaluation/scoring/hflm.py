"""Wrap lm-eval's HFLM with every setting that moves scores stated. Exact and fast scoring are
compared with it, and it generates what slots cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from qbench.checkpoints.tokenizer import puts_bos
from qbench.errors import EvaluationError, first_line
from qbench.evaluation.scoring.generate import generate_by_hflm
from qbench.evaluation.scoring.requests import Counts
from qbench.evaluation.settings import ScoringSettings
from qbench.machine import peak_memory_gib, reset_peak_memory
from qbench.records import ScoringReport


def pinned_hflm(model: torch.nn.Module, tokenizer: Any, settings: ScoringSettings) -> HFLM:
    """Return HFLM over a loaded model, with the cell's settings."""
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


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Give a reason to errors of HFLM that have none, such as an IndexError for an empty choice."""
    try:
        yield
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise EvaluationError(
            f"lm-eval's HFLM stopped at the {what} ({type(error).__name__}: {first_line(error)}); "
            "a request may have an empty context or continuation, or more tokens than "
            "evaluation.max_length: scoring: exact says which"
        ) from error


class HFLMScorer(LM):
    """An lm-eval language model that scores by HFLM itself."""

    def __init__(self, model: Any, tokenizer: Any, settings: ScoringSettings) -> None:
        super().__init__()
        self.settings = settings
        self.hflm = pinned_hflm(model, tokenizer, settings)
        self._rolling: dict[str, None] = {}  # tasks that score whole texts
        reset_peak_memory(self.hflm.device.type)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        with _errors_named("log-likelihoods"):
            return self.hflm.loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        self._rolling |= {request.task_name: None for request in requests}
        self.hflm.batch_size_per_gpu = self.settings.window_batch_size
        try:
            with _errors_named("rolling log-likelihoods"):
                return self.hflm.loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.hflm.batch_size_per_gpu = self.settings.batch_size

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return generate_by_hflm(self.hflm, requests, Counts())

    def take_report(self) -> ScoringReport:
        """Return how the scores since the last report were made."""
        made = self.report()
        self._rolling = {}
        return made

    def report(self) -> ScoringReport:
        """Return how the scores were made."""
        return report(self.settings, self.hflm, rolling=self._rolling)


def report(
    settings: ScoringSettings, hflm: HFLM, *, rolling: Iterable[str], **counted: Any
) -> ScoringReport:
    """Return what the record says of how scores were made: the settings, and what was ``counted``.

    ``rolling`` are the tasks that score whole texts. lm-eval puts the prefix token before them,
    which is a second BOS if the tokenizer adds one.
    """
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
