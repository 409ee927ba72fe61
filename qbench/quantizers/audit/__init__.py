"""Measure whether a model was quantized as its cell says."""
