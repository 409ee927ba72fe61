"""Measure how much quantization hurts a language model, and whether the difference is real."""

__version__ = "0.1.0"
