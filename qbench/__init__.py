"""qbench: how much a quantizer hurts a softpick model, how much a softmax model."""

__version__ = "0.1.0"
