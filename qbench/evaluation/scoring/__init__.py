"""Language models of lm-eval over a transformers model or another runtime: HFLM itself, exact
scoring and fast scoring.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM

from qbench.evaluation.scoring.logits import Observer
from qbench.evaluation.scoring.scorer import HFLMScorer, Scorer
from qbench.evaluation.settings import ScoringSettings
from qbench.progress import Advance

__all__ = ["HFLMScorer", "Observer", "Scorer", "language_model"]


def language_model(
    model: Any,
    tokenizer: Any,
    settings: ScoringSettings,
    *,
    progress: Advance | None = None,
    observer: Observer | None = None,
) -> Any:
    """Return an lm-eval language model over ``model``: a causal LM of transformers in eval mode, or
    a runtime of lm-eval or llama.cpp, which scores in its one way, whatever the mode.

    Mode ``lm-eval`` is HFLM itself with these settings, ``exact`` gives its scores faster, ``fast``
    gives scores within ``settings.tolerance`` of exact ones. ``progress(done, total)`` counts
    requests; ``observer`` sees hidden states, logits and log-probabilities of every scored token.
    HFLM and lm-eval's runtimes call neither. The result's ``report()`` says how it scored.

    Raises UnavailableError if exact and fast scoring do not fit the model; scoring itself raises
    EvaluationError.
    """
    if isinstance(model, LM):  # lm-eval's, of another runtime
        from qbench.evaluation.llamacpp import ExternalScorer  # which imports parts of this package

        return ExternalScorer(model, settings)
    if hasattr(model, "scorer"):  # llama.cpp's
        return model.scorer(tokenizer, settings, progress=progress, observer=observer)
    if settings.mode != "lm-eval":
        return Scorer(model, tokenizer, settings, progress=progress, observer=observer)
    assert observer is None, "HFLM gives no log-probabilities"
    return HFLMScorer(model, tokenizer, settings)
