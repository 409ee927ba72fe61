"""Weights that hardware can multiply as they are stored: int8 and fp8 codes times a scale."""
