"""lm-eval language models over a transformers model: the yardstick, exact and fast scoring."""

from qbench.evaluation.scoring.language_model import language_model
from qbench.evaluation.scoring.requests import Scored
from qbench.evaluation.scoring.rows import Observer, Part

__all__ = ["Observer", "Part", "Scored", "language_model"]
