"""Quantizers of activations: what products with weight matrices take in."""
