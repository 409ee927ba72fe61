import re

import pytest

from qbench.bench.products import bench_products, table
from qbench.errors import UnavailableError

RESULTS = {
    "hardware": "a GPU",
    "versions": {"torch": "2.11.0"},
    "checks": [{"case": "340M int8 a token q 19", "error": 1e-3, "limit": 2e-3}],
    "blocks": [
        {"model": "340M", "tokens": 2048, "arithmetic": "bf16", "ms": 0.25, "speed": 1.0},
        {"model": "340M", "tokens": 2048, "arithmetic": "fp8 a token", "ms": 0.2, "speed": 1.25},
    ],
}


def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(UnavailableError, match=r"need a GPU of compute capability 8\.9$"):
        bench_products(True)


def test_the_table_says_how_fast_each_is_beside_bf16():
    told = re.sub(" +", " ", table(RESULTS))
    assert "| 340M | 2048 | fp8 a token | 0.200 | 1.25 |" in told
