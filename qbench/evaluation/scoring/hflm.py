"""HFLM itself: what exact and fast scoring are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM

from qbench.errors import RecipeError
from qbench.evaluation.scoring.generate import generate, greedy, pinned_hflm
from qbench.evaluation.scoring.logits import peak_memory_gib, reset_peak_memory
from qbench.evaluation.settings import ScoringSettings
from qbench.records import ScoringReport


class Yardstick(LM):
    """HFLM itself, with its settings stated: what the others are compared with."""

    def __init__(self, model: Any, tokenizer: Any, settings: ScoringSettings) -> None:
        super().__init__()
        if settings.shuffle is not None:
            raise RecipeError("scoring: lm-eval has no other order of batches; use exact or fast")
        self.settings = settings
        self.hflm = pinned_hflm(model, tokenizer, settings)
        reset_peak_memory(self.hflm.device)

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
        return generate(self.hflm, requests, disable_tqdm)

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """See :func:`qbench.evaluation.scoring.greedy.greedy`."""
        return greedy(self.hflm.model, prompts, tokens)

    def report(self) -> ScoringReport:
        """How the scores were made."""
        return report(self.settings, peak_memory_gib(self.hflm.device))


def report(settings: ScoringSettings, peak_memory_gib: float) -> ScoringReport:
    """What settings say of how scores are made."""
    packed = settings.mode == "fast"
    return ScoringReport(
        mode=settings.mode,
        softmax_dtype=settings.softmax_dtype,
        shuffle=settings.shuffle,
        batching="packed" if packed else "padded, longest first",
        batch_tokens=settings.batch_tokens,
        batch_size=None if packed else settings.batch_size,
        window_batch_size=None if packed else settings.window_batch_size,
        peak_memory_gib=peak_memory_gib,
    )
