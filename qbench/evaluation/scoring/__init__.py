"""Language models of lm-eval over a transformers model or another runtime: HFLM itself, exact
scoring and fast scoring.
"""

from qbench.evaluation.scoring.forward import Observer
from qbench.evaluation.scoring.scorer import HFLMScorer, Scorer, language_model

__all__ = ["HFLMScorer", "Observer", "Scorer", "language_model"]
