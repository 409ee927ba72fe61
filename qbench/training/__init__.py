"""Train pairs of models that differ only in their attention function."""
