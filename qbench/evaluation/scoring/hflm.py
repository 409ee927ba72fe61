"""lm-eval's HFLM with every setting that moves scores stated: what exact and fast scoring are
compared with, and what generates for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from qbench.evaluation.scoring.generate import generate_by_hflm, greedy
from qbench.evaluation.settings import ScoringSettings
from qbench.machine import peak_memory_gib, reset_peak_memory
from qbench.records import ScoringReport


def pinned_hflm(model: torch.nn.Module, tokenizer: Any, settings: ScoringSettings) -> HFLM:
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
    """lm-eval's own scoring, as it is."""

    def __init__(self, model: Any, tokenizer: Any, settings: ScoringSettings) -> None:
        super().__init__()
        self.settings = settings
        self.hflm = pinned_hflm(model, tokenizer, settings)
        reset_peak_memory(self.hflm.device.type)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return self.hflm.loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        self.hflm.batch_size_per_gpu = self.settings.window_batch_size
        try:
            return self.hflm.loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.hflm.batch_size_per_gpu = self.settings.batch_size

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return generate_by_hflm(self.hflm, requests)

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """See :func:`qbench.evaluation.scoring.generate.greedy`."""
        return greedy(self.hflm.model, prompts, tokens)

    def report(self) -> ScoringReport:
        """How the scores were made."""
        return report(self.settings, self.hflm.device.type)


def report(settings: ScoringSettings, device: str, **counted: Any) -> ScoringReport:
    """What settings say of how scores are made, and what was ``counted`` meanwhile."""
    packed = settings.mode == "fast"
    return ScoringReport(
        **{"batching": "packed" if packed else "padded, longest first", **counted},
        mode=settings.mode,
        softmax_dtype=settings.softmax_dtype,
        batch_tokens=settings.batch_tokens,
        batch_size=None if packed else settings.batch_size,
        window_batch_size=None if packed else settings.window_batch_size,
        peak_memory_gib=peak_memory_gib(device),
    )
