"""Ready combinations of weights and activations that hardware multiplies. Imports no torch."""

from qbench.quantizers.names import register_combination

for _name, _weights, _activations, _line in (
    ("w8a8-int8", "int8-row", "int8-token", "int8: weights a row, activations a token"),
    ("w8a8-int8-static", "int8-row", "int8-static", "int8: weights a row, activations fixed"),
    ("w8a8-fp8", "fp8-row", "fp8-row", "fp8 e4m3: weights a row, activations a token"),
    ("w8a8-fp8-tensor", "fp8-tensor", "fp8-tensor", "fp8 e4m3: one scale a matrix and a batch"),
):
    register_combination(
        _name,
        f"{_line}; multiplied as such where the device can",
        weights=_weights,
        activations={"name": _activations, "arithmetic": "auto"},
    )
