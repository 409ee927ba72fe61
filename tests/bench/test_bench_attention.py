import re
import time
from collections import Counter
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from qbench.bench import checks as bench_checks
from qbench.bench.attention_speed import (
    CUDNN,
    FLASH,
    FLEX,
    SHAPES,
    bench_attention,
    contenders,
    table,
)
from qbench.bench.checks import DECODING, LIMIT, cases, check_kernels
from qbench.bench.timing import Shape
from qbench.errors import EvaluationError, UnavailableError

SHAPE, STEP = "B4 T4096 H16 D64", "B8 T1024 H16 D64"


def passed(variant, kernel, forward, backward, shape=SHAPE):
    return {"shape": shape, "variant": variant, "kernel": kernel, "forward": forward,
            "backward": backward}  # fmt: skip


RESULTS = {
    "hardware": "a GPU",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "ceilings": {"matmul_tflops": 785.2, "copy_tb_per_s": 4.3},
    "checks": [{"case": "softpick", "what": "output", "error": 2e-3, "limit": 1e-2}],
    "passes": [
        passed("causal", "softpick", 400.0, 300.0),
        passed("causal", CUDNN, 384.0, 339.0),
        passed("causal", FLASH, 257.0, 210.0),
        passed("causal", FLEX, 295.0, 241.0),
        passed("ALiBi", "softpick", 369.0, 283.0),
        passed("ALiBi", FLEX, 250.0, 239.0),
        {"shape": SHAPE, "variant": "window", "kernel": FLEX, "error": "no"},
        passed("window", "softmax", 283.0, 195.0),
    ],
    "steps": [
        {"shape": STEP, "kernel": "softpick", "ms": 0.5, "in_a_row_ms": 0.4, "captured_ms": 0.32},
        {"shape": STEP, "kernel": "sigmoid", "ms": 0.8},
        {"shape": STEP, "kernel": CUDNN, "ms": 0.4, "in_a_row_ms": 0.36, "captured_ms": 0.24},
        {"shape": STEP, "kernel": FLASH, "ms": 0.6, "captured_ms": 0.2},
    ],
    "decode": [
        {"shape": SHAPE, "kernel": "softpick", "ms": 0.25, "tb_per_s": 4.0, "share_of_copy": 0.93},
    ],
}


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(UnavailableError, match=r"CUDA GPU, and none is here$"):
        bench_attention(tmp_path / "attention.json", True, (), log=print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        f"| {SHAPE} | causal | softpick | 400 | 1.04 | 300 | 0.88 |",
        f"| {SHAPE} | causal | FlashAttention 2 | 257 | 0.67 | 210 | 0.62 |",
        f"| {SHAPE} | ALiBi | softpick | 369 | 1.48 | 283 | 1.18 |",
        f"| {SHAPE} | window | FlexAttention | – | – | – | – |",
        f"| {SHAPE} | window | softmax | 283 | – | 195 | – |",
        f"| {STEP} | softpick | 0.500 | 0.80 | 0.400 | 0.90 | 0.320 | 0.62 |",
        f"| {STEP} | sigmoid | 0.800 | 0.50 | – | – | – | – |",
        f"| {SHAPE} | softpick | 0.250 | 4.00 | 93% |",
    ],
)
def test_the_table_compares_with_the_best_peer_of_each_row(line):
    assert line in [re.sub(" +", " ", told) for told in table(RESULTS).splitlines()]


def test_peers_stand_beside_every_shape_and_variant_that_they_know():
    """What is timed, and in which order."""
    rows = [(str(shape), variant) for shape, variant, _ in contenders(SHAPES, ())]
    causal = [("B4 T4096 H16 D64", 13), ("B4 T4096 H16 D128", 13)]
    causal += [("B2 T8192 H32/8 D128", 6), ("B1 T32768 H16 D128", 6)]
    expected = {(shape, "causal"): count for shape, count in causal}
    varied = ("ALiBi", "soft cap", "window")
    expected |= {(shape, variant): 4 for shape, _ in causal[:2] for variant in varied}
    assert Counter(rows) == expected
    names = [name for _, _, name in contenders([Shape(4, 4096, 16, 16, 64)], ["softmax1"])]
    assert names == ["softmax1", CUDNN, FLASH, FLEX]


def test_all_normalizers_are_checked_and_what_is_timed_of_them():
    found = cases(False, ())
    assert 4 * len(found) == 248  # as docs/speed.md has it
    assert len(cases(True, ())) == 20
    assert len(cases(False, ["softmax1"])) == 3
    assert str(DECODING) == "B3 T1/1000 H8 D64"


def test_flop_count_the_pairs_that_are_seen():
    shape = Shape(2, 2000, 4, 4, 64)
    seen = torch.ones(2000, 2000, dtype=torch.bool).tril()
    assert shape.flop("causal") == 4 * 2 * 4 * 64 * int(seen.sum())
    assert shape.flop("window") == 4 * 2 * 4 * 64 * int(seen.triu(-1023).sum())


class Dying(Executor):
    """Its processes die."""

    def submit(self, fn, /, *args, **kwargs):
        call = Future()
        call.set_exception(BrokenProcessPool("a process was terminated abruptly"))
        return call


def test_checks_are_told_in_their_order_whichever_ends_first(monkeypatch):
    wanted = cases(True, ())

    def found(shape, variant, normalizer):
        time.sleep(0.03 if shape.queries is None else 0.01)
        return {"output": 0.1 * LIMIT, "key gradient": 0.0}

    monkeypatch.setattr(bench_checks, "errors", found)
    with ThreadPoolExecutor(8) as pool:
        told = check_kernels(pool, quick=True)
    assert [each["case"] for each in told[::2]] == [
        f"{name}, {shape}, {variant}" for shape, variant, name in wanted
    ]
    assert {each["what"] for each in told[1::2]} == {"key gradient"}


def test_a_red_check_is_named_with_its_limit(monkeypatch):
    def found(shape, variant, normalizer):
        wrong = normalizer == "softpick" and shape is DECODING
        return {"output": float("nan") if wrong else 0.0}

    monkeypatch.setattr(bench_checks, "errors", found)
    words = rf"nothing timed: softpick, {DECODING}, causal: output nan > 1e-02$"
    with ThreadPoolExecutor(1) as pool, pytest.raises(EvaluationError, match=words):
        check_kernels(pool, quick=True)


def test_a_check_whose_process_dies_is_named():
    words = r"^bench attention: softpick, .*: its process died, nothing timed$"
    with pytest.raises(EvaluationError, match=words):
        check_kernels(Dying(), quick=True, only=["softpick"])
