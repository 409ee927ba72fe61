"""lm-eval language models over a transformers model: the yardstick, exact and fast scoring."""

from qbench.evaluation.scoring.language_model import language_model
from qbench.evaluation.scoring.rows import Observer, Scored

__all__ = ["Observer", "Scored", "language_model"]
