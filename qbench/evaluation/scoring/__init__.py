"""lm-eval language models over a transformers model: HFLM itself, exact and fast scoring."""

from qbench.evaluation.scoring.hflm import HFLMScorer
from qbench.evaluation.scoring.language_model import language_model
from qbench.evaluation.scoring.logits import LogitsPart, Observer
from qbench.evaluation.scoring.requests import Scored
from qbench.evaluation.scoring.scorer import Scorer

__all__ = ["HFLMScorer", "LogitsPart", "Observer", "Scored", "Scorer", "language_model"]
