"""lm-eval's HFLM with every setting that moves scores stated, and generation through it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from qbench.errors import EvaluationError
from qbench.evaluation.scoring.tokenization import check_bos
from qbench.evaluation.settings import ScoringSettings


def pinned_hflm(model: torch.nn.Module, tokenizer: Any, settings: ScoringSettings) -> HFLM:
    """Raises RecipeError where the tokenizer cannot add the BOS that is asked for."""
    check_bos(tokenizer, settings.add_bos)
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


def generate(hflm: HFLM, requests: list[Any], disable_tqdm: bool) -> list[str]:
    """HFLM's generated texts. Raises EvaluationError where a step's logits are not numbers:
    the likeliest of them would be a token like any other."""
    with _finite(hflm.model):
        return hflm.generate_until(requests, disable_tqdm=disable_tqdm)


@contextlib.contextmanager
def _finite(model: torch.nn.Module) -> Iterator[None]:
    """Checks the logits of each step's last token. The verdict stays on the device until the
    end, so that no step waits for it."""
    broken: Tensor | None = None

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal broken
        found = ~torch.isfinite(output.logits[:, -1]).all()
        broken = found if broken is None else broken | found

    hook = model.register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()
    if broken is not None and bool(broken):
        raise EvaluationError(
            "logits of generated tokens are NaN or infinite, which no scoring mode can mend; "
            "look at the model's weights, its quantizer and its dtype"
        )
