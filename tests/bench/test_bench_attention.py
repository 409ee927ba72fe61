import os
import pickle
import re
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from qbench.attention.kernels import supported
from qbench.bench import attention_checks
from qbench.bench.attention import bench_attention, table
from qbench.bench.attention_checks import (
    CASES,
    LIMITS,
    QUICK,
    check_kernels,
    checks,
    errors,
    relative_error,
    usual_sizes,
)
from qbench.bench.attention_prefill import (
    CUDNN,
    FLASH,
    FLEX,
    PLAIN_SOFTPICK,
    SHAPES,
    WANTED,
    contenders,
    every_row,
    prefill,
    wanted_first,
)
from qbench.bench.attention_warm_up import settle_cache, warm_ups
from qbench.bench.side_by_side import alone, processes
from qbench.errors import EvaluationError, UnavailableError

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


class Dying(Executor):
    """Its processes die."""

    def submit(self, fn, /, *args, **kwargs):
        call = Future()
        call.set_exception(BrokenProcessPool("a process was terminated abruptly"))
        return call


def test_checks_are_told_in_their_order_whichever_ends_first(monkeypatch):
    wanted = checks(QUICK, ())

    def found(case, normalizer, dtype, seed):
        time.sleep(0.01 * (3 - seed))
        return {"output": 0.1 * LIMITS[dtype], "gradient of s": 0.0}

    monkeypatch.setattr(attention_checks, "errors", found)
    with ThreadPoolExecutor(8) as pool:
        told = check_kernels(pool, quick=True)
    names = [
        f"{name}, {str(dtype).removeprefix('torch.')}, {case}" for case, name, dtype, _ in wanted
    ]
    assert [each["case"] for each in told[::2]] == names
    assert {each["what"] for each in told[1::2]} == {"gradient of s"}


def test_a_red_check_is_named_with_its_limit(monkeypatch):
    def found(case, normalizer, dtype, seed):
        wrong = normalizer == "softpick" and dtype == torch.float16 and seed == 1
        return {"output": float("nan") if wrong else 0.0}

    monkeypatch.setattr(attention_checks, "errors", found)
    words = rf"nothing timed: softpick, float16, {QUICK[1]}: output nan > 2e-03$"
    with ThreadPoolExecutor(1) as pool, pytest.raises(EvaluationError, match=words):
        check_kernels(pool, quick=True)


def test_a_check_whose_process_dies_is_named():
    words = r"^bench attention: softpick, bfloat16, .*: its process died, nothing timed$"
    with pytest.raises(EvaluationError, match=words):
        check_kernels(Dying(), quick=True, only=["softpick"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told without a GPU")
def test_an_error_of_a_check_is_that_of_one_process():
    one = checks(QUICK, ["softpick"])[0]
    with pytest.raises((AssertionError, RuntimeError)) as here:
        errors(*one)
    with processes(1, device="cpu") as pool, pytest.raises(type(here.value)) as there:
        check_kernels(pool, quick=True, only=["softpick"])
    assert str(there.value) == str(here.value)


def test_calls_of_processes_can_be_pickled():
    for each in (*checks(CASES, ()), *warm_ups(every_row(SHAPES, ()), False, ())):
        assert pickle.loads(pickle.dumps((alone, *each)))[0] is alone


@pytest.mark.parametrize("only", [(), ("sigmoid",)])
def test_every_timed_kernel_is_called_before_once(only):
    rows = every_row(SHAPES, only)
    called = warm_ups(rows, False, only)
    groups = [group for measure, group, *_ in called if measure is prefill]
    compiled = [row for row in rows if row[1] not in (FLASH, CUDNN, PLAIN_SOFTPICK)]
    assert sorted(row for group in groups for row in group) == sorted(compiled)
    for group in groups:
        assert len({(name, shape[3]) for shape, name in group}) == 1
    kernels = [(group[0][1], group[0][0][3]) for group in groups if group[0][1] != FLEX]
    assert len(set(kernels)) == len(kernels)
    others = [measure.__name__ for measure, *_ in called if measure is not prefill]
    assert others == (["decode"] if only else ["packed", "decode"])


def test_the_rows_that_are_wanted_most_are_measured_first():
    rows = every_row(SHAPES, ())
    first = wanted_first(rows)
    assert sorted(first) == sorted(rows)
    plain = [f"qbench {name}" for name in supported()] + [FLASH, CUDNN]
    assert first[: 2 * len(plain)] == [(shape, name) for shape in WANTED for name in plain]
    assert {name for _, name in first[-2 * len(SHAPES) :]} == {FLEX, PLAIN_SOFTPICK}


def test_a_normalizer_is_measured_beside_its_plain_kernel_and_torchs_fastest():
    assert contenders(["scalable-softpick"]) == [
        "qbench scalable-softpick", "qbench softpick", FLASH, CUDNN,
    ]  # fmt: skip
    assert contenders(["sigmoid"]) == [
        "qbench sigmoid", "qbench softmax", "qbench sigmoid, ALiBi",
        "qbench sigmoid, trained ALiBi", "qbench sigmoid, soft cap", FLASH, CUDNN,
    ]  # fmt: skip


@pytest.mark.parametrize("named", [None, "/somewhere/triton"])
def test_torchs_compiler_keeps_kernels_where_triton_does(monkeypatch, named):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    if named is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", named)
    before = triton.knobs.cache.dir
    settle_cache()
    assert os.environ["TRITON_CACHE_DIR"] == triton.knobs.cache.dir == before
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    assert triton_cache_dir(0) == before


def test_a_sum_that_happens_to_be_nothing_is_held_to_what_it_usually_is():
    """Rounding of 1 in 700 rows' sum of both signs is no wrong gradient where the sum is 0."""
    torch.manual_seed(0)
    rows = torch.randn(2, 350, dtype=torch.float64)
    rows = torch.cat([rows, -rows], dim=1)  # what each row adds, by head
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)
    output = (rows * scale[:, None])[None, :, :, None]
    gradient = torch.ones(1, 2, 700, 1, dtype=torch.float64)
    (truth,) = torch.autograd.grad(output, [scale], gradient, retain_graph=True)
    assert truth.norm() < 1e-12
    (size,) = usual_sizes(output, [scale], gradient, torch.Generator().manual_seed(0))
    expected = float(rows.square().sum().sqrt())
    assert expected / 3 < size < expected * 3
    off = truth + torch.tensor([0.1, 0.0])
    assert relative_error(off, truth) > 1
    assert relative_error(off, truth, least=size) < 0.01
    assert relative_error(off + size, truth, least=size) > 1
    assert usual_sizes(output, [], gradient, torch.Generator()) == []
