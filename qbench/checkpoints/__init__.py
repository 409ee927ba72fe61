"""Read checkpoints, weights, tokenizer and normalizer, as stock models of transformers.

``find`` reads files without torch; ``load`` makes the model."""

from qbench.checkpoints.find import Checkpoint, find
