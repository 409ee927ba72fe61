"""lm-eval language models over a transformers model: the yardstick, exact and fast scoring."""

from qbench.evaluation.scoring.logits import Observer, Part
from qbench.evaluation.scoring.requests import Scored
from qbench.evaluation.scoring.scorer import language_model

__all__ = ["Observer", "Part", "Scored", "language_model"]
