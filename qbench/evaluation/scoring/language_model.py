"""The one way to get a language model for lm-eval."""

from __future__ import annotations

from typing import Any, Literal

from qbench.errors import RecipeError, UnavailableError
from qbench.evaluation.scoring.backend import PinnedHFLM, Progress
from qbench.evaluation.scoring.exact import ExactLM
from qbench.evaluation.scoring.fast import FastLM
from qbench.evaluation.scoring.rows import Observer
from qbench.evaluation.scoring.settings import (
    AUTO_BATCH_SIZE,
    AUTO_BATCH_TOKENS,
    AUTO_SAMPLE,
    AUTO_WINDOW_BATCH_SIZE,
    Mode,
    Settings,
)
from qbench.evaluation.tolerance import Tolerance


def mixes_batches(model: Any) -> bool:
    """True for LLM.int8 models: their outlier columns are chosen over the whole batch."""
    return any(type(module).__name__ == "Linear8bitLt" for module in model.modules())


def resolve_mode(model: Any, scoring: Literal["auto", "exact", "fast", "lm-eval"]) -> Mode:
    """What ``auto`` means for this model: fast on CUDA, exact on the CPU and for LLM.int8."""
    if scoring != "auto":
        return scoring
    return "fast" if model.device.type == "cuda" and not mixes_batches(model) else "exact"


def language_model(
    model: Any,
    tokenizer: Any,
    *,
    mode: Mode,
    max_length: int,
    batch_size: int | Literal["auto"] = "auto",
    batch_tokens: int | Literal["auto"] = "auto",
    add_bos: bool = False,
    softmax_dtype: Literal["float32", "model"] = "float32",
    tolerance: Tolerance | None = None,
    sample: int | Literal["auto"] = "auto",
    seed: int = 0,
    shuffle: int | None = None,
    progress: Progress | None = None,
    observer: Observer | None = None,
) -> PinnedHFLM:
    """An lm-eval language model over ``model``, a causal LM of transformers in eval mode.

    ``lm-eval`` is HFLM itself with these settings stated, ``exact`` gives its scores faster,
    ``fast`` gives scores that lie within ``tolerance`` of exact ones, checked on ``sample``
    documents a call.
    ``batch_size`` counts requests, in fast mode those of the sample; "auto" is a constant of the
    device type, since scores depend on it. ``batch_tokens`` is a pack's size in fast mode; "auto"
    is a constant too, or less where the device's memory holds less. ``max_length`` is in tokens.
    ``shuffle`` seeds an order of batches other than longest first (not for lm-eval).
    ``progress(done, total)`` counts requests; ``observer`` sees the log-probabilities of every
    scored token. ``report()`` of what is returned says how it ran.

    Raises RecipeError for settings that cannot be, UnavailableError where exact and fast
    scoring do not fit the model; scoring itself raises EvaluationError.
    """
    device = model.device.type
    automatic = batch_size == "auto"
    settings = Settings(
        mode=mode,
        batch_size=AUTO_BATCH_SIZE.get(device, 8) if automatic else batch_size,
        window_batch_size=AUTO_WINDOW_BATCH_SIZE.get(device, 1) if automatic else batch_size,
        batch_tokens=(
            AUTO_BATCH_TOKENS.get(device, 2_048) if batch_tokens == "auto" else batch_tokens
        ),
        measure_memory=batch_tokens == "auto",
        max_length=max_length,
        add_bos=add_bos,
        softmax_dtype=softmax_dtype,
        tolerance=tolerance or Tolerance(),
        sample=AUTO_SAMPLE.get(device, 8) if sample == "auto" else sample,
        seed=seed,
        shuffle=shuffle,
    )
    if settings.batch_size < 1 or max_length < 2:
        raise RecipeError(
            f"evaluation: batch_size {batch_size} and max_length {max_length}: "
            "needs at least 1 request and 2 tokens"
        )
    if mode == "lm-eval":
        if observer is not None:
            raise RecipeError(
                "scoring: lm-eval shows nobody its log-probabilities; use exact or fast for damage"
            )
        if shuffle is not None:
            raise RecipeError("scoring: lm-eval has no other order of batches; use exact or fast")
        return PinnedHFLM(model, tokenizer, settings)
    if mode == "exact":
        return ExactLM(model, tokenizer, settings, progress=progress, observer=observer)
    if mode == "fast":
        if mixes_batches(model):
            raise UnavailableError(
                "LLM.int8 chooses its outlier columns over the whole batch, so packing changes "
                "its scores; use scoring: exact"
            )
        return FastLM(model, tokenizer, settings, progress=progress, observer=observer)
    raise RecipeError(f"unknown scoring {mode!r}; known: exact, fast, lm-eval")
