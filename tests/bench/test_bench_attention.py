import re

import pytest

from qbench.bench.attention import bench_attention, table
from qbench.errors import UnavailableError

SHAPE, STEP = (4, 4096, 16, 64), (8, 1024, 16, 64)
RESULTS = {
    "hardware": "a GPU",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "ceilings": {"matmul_tflops": 785.2, "copy_tb_per_s": 4.3},
    "checks": [{"case": "softpick", "what": "output", "error": 2e-3, "limit": 1e-2}],
    "prefill": [
        {"shape": SHAPE, "kernel": "qbench softpick", "forward": 400.0, "backward": 300.0},
        {"shape": SHAPE, "kernel": "qbench softpick, ALiBi", "forward": 392.0, "backward": 150.0},
        {"shape": SHAPE, "kernel": "qbench scalable-softpick", "forward": 380.0, "backward": 285.0},
        {"shape": SHAPE, "kernel": "qbench sigmoid", "forward": 468.0, "backward": None},
        {"shape": SHAPE, "kernel": "torch flash softmax", "forward": 400.0, "backward": 250.0},
        {"shape": SHAPE, "kernel": "cuDNN softmax", "forward": 410.0, "backward": 375.0},
        {"shape": SHAPE, "kernel": "plain PyTorch softpick", "forward": 4.0, "backward": None},
    ],
    "steps": [
        {"shape": STEP, "kernel": "qbench softpick", "ms": 0.5, "captured_ms": 0.32},
        {"shape": STEP, "kernel": "qbench sigmoid", "ms": 0.8},
        {"shape": STEP, "kernel": "cuDNN softmax", "ms": 0.4, "captured_ms": 0.24},
    ],
    "decode": [
        {"shape": SHAPE, "kernel": "qbench softpick", "ms": 0.25, "tb_per_s": 4.0,
         "share_of_copy": 0.93},
    ],
    "packed": [{"sequences": 64, "tokens": 9000, "kernel": "qbench softpick", "ms": 1.5}],
    "skipping": [],
}  # fmt: skip


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(UnavailableError, match=r"CUDA GPU, and none is here$"):
        bench_attention(tmp_path / "attention.json", "cpu", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "| 4, 4096, 16, 64 | qbench softpick | 400 | 0.98 | – | 300 | 0.80 | – |",
        "| 4, 4096, 16, 64 | qbench softpick, ALiBi | 392 | 0.96 | 0.98 | 150 | 0.40 | 0.50 |",
        "| 4, 4096, 16, 64 | qbench scalable-softpick | 380 | 0.93 | 0.95 | 285 | 0.76 | 0.95 |",
        "| 4, 4096, 16, 64 | plain PyTorch softpick | 4 | 0.01 | – | – | – | – |",
        "| 4, 4096, 16, 64 | 1.17 |",
        "| 8, 1024, 16, 64 | qbench softpick | 0.500 | 0.80 | 0.320 | 0.75 |",
        "| 8, 1024, 16, 64 | qbench sigmoid | 0.800 | 0.50 | – | – |",
        "| 4, 4096, 16, 64 | qbench softpick | 0.250 | 4.00 | 93% |",
        "| 64 | 9000 | qbench softpick | 1.500 |",
    ],
)
def test_the_table_compares_with_cudnn_and_the_copy(line):
    assert line in [re.sub(" +", " ", told) for told in table(RESULTS).splitlines()]
