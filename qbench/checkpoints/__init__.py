"""Checkpoints: weights, tokenizer and normalizer, read as a stock transformers model.

``load`` makes the model; what stands here imports no torch.
"""

from qbench.checkpoints.find import Checkpoint, find

__all__ = ["Checkpoint", "find"]
