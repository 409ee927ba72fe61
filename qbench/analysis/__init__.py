"""Measure why a model suffers from quantization: sinks, outliers, sparsity, in one pass over a
text."""
