"""Train pairs of models that differ in their attention function alone."""
