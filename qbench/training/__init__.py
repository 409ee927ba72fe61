"""Pairs of models trained alike in all but the attention normalizer."""
