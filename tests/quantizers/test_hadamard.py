"""Hadamard matrices of every order that models have, and none where none is known."""

import math

import pytest
import torch

from qbench.quantizers.hadamard import factors
from qbench.quantizers.rotation import hadamard_transform

# Head widths, hidden and intermediate sizes of models, and small orders of each construction.
ORDERS = [1, 2, 8, 12, 20, 28, 36, 64, 100, 148, 344, 384, 640]


@pytest.mark.parametrize("order", ORDERS)
def test_a_transform_is_a_hadamard_matrix_over_the_root_of_its_order(order):
    matrix = hadamard_transform(torch.eye(order, dtype=torch.float64))
    assert torch.equal((matrix * math.sqrt(order)).round().abs(), torch.ones_like(matrix))
    identity = torch.eye(order, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [3, 6, 50, 92, 1001])
def test_orders_without_a_known_matrix_are_none(order):
    assert factors(order) is None
