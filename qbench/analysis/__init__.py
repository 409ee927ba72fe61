"""Why a model suffers from quantization: sinks, outliers, sparsity, on one pass over a text."""
