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
    "profile": [
        {"model": "340M", "tokens": 2048, "part": "encoding int8 a token, q", "ms": 0.01,
         "tflops": None, "tb_per_s": 3.2},
        {"model": "340M", "tokens": 2048, "part": "bf16 product, q", "ms": 0.1, "tflops": 612.4,
         "tb_per_s": 1.1},
    ],
}  # fmt: skip


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(UnavailableError, match=r"need a GPU of compute capability 8\.9$"):
        bench_products(tmp_path / "products.json", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "| 340M | 2048 | fp8 a token | 0.200 | 1.25 |",
        "| 340M | 2048 | encoding int8 a token, q | 0.010 | – | 3.20 |",
        "| 340M | 2048 | bf16 product, q | 0.100 | 612 | 1.10 |",
    ],
)
def test_the_table_says_how_fast_each_is_beside_bf16(line):
    assert line in [re.sub(" +", " ", told) for told in table(RESULTS).splitlines()]
