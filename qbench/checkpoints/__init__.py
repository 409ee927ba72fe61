"""Checkpoints: weights, tokenizer and normalizer, read as a stock transformers model."""

from qbench.checkpoints.find import Checkpoint, find
from qbench.checkpoints.load import load_model, load_tokenizer

__all__ = ["Checkpoint", "find", "load_model", "load_tokenizer"]
