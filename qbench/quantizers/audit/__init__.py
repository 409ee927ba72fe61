"""Proof that a model was quantized as its cell says."""
