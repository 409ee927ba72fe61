"""The one way to get a language model for lm-eval."""

from __future__ import annotations

from typing import Any

from qbench.errors import RecipeError
from qbench.evaluation.scoring.asked import Ids
from qbench.evaluation.scoring.rows import Observer
from qbench.evaluation.scoring.scorer import Progress, Scorer
from qbench.evaluation.scoring.yardstick import Yardstick
from qbench.evaluation.settings import ScoringSettings


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
