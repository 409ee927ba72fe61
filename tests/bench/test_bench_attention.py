import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from qbench.bench import attention_speed as bench_checks
from qbench.bench.attention_speed import (
    DECODING,
    LIMIT,
    Shape,
    bench_attention,
    cases,
    check_kernels,
)
from qbench.errors import EvaluationError, UnavailableError


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(UnavailableError, match=r"CUDA GPU, and none is here$"):
        bench_attention(tmp_path / "attention.json", True, (), log=print)
    assert list(tmp_path.iterdir()) == []


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
