"""Measurements of qbench itself against what its users would use otherwise."""
