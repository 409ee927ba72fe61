"""Measure why a model suffers from quantization: sinks, outliers, sparsity."""
