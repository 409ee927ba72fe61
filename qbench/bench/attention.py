"""``qbench bench attention``: the kernels against what else runs on this GPU, once they are right.

TFLOP/s count 4 · B · H · T² · D / 2 for a causal forward pass and 2.5 times that for the
backward pass, whatever a kernel really multiplies. Every time is the median of CUDA-event
timings after a warm-up; the two ceilings are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch

from qbench.attention.kernels import require
from qbench.bench.attention_checks import check_kernels
from qbench.bench.attention_decode import decode, decode_table, packed, packed_table
from qbench.bench.attention_prefill import (
    SHAPES,
    SLOW,
    every_row,
    flash_sigmoid_lines,
    prefill,
    prefill_table,
    step_table,
    steps,
    wanted_first,
)
from qbench.bench.attention_timing import clock, milliseconds
from qbench.bench.attention_warm_up import PATIENCE_S, settle_cache, warm_up, warm_ups
from qbench.bench.kept import gathered, kept_in
from qbench.bench.side_by_side import alone, default_jobs, processes
from qbench.errors import UnavailableError


def bench_attention(
    out: Path | None,
    device: str,
    quick: bool,
    only: Collection[str] = (),
    jobs: int | None = None,
) -> dict[str, Any]:
    """Checks the kernels, then times them; returns what was measured and writes it to ``out``
    as it goes (JSON, and the table beside it in Markdown). ``quick`` leaves out most shapes and
    repeats. ``only``: these normalizers, what they are measured beside,
    and no packed sequences. ``jobs``: processes that compile and check; all have
    ended before anything is timed, in this one.

    Raises RecipeError for an unknown normalizer, UnavailableError for one without kernels and
    without a CUDA device, EvaluationError where a check is red: then
    nothing is timed.
    """
    require_gpu(device)
    for name in only:
        require(name)
    repeat_ms = 20 if quick else 100
    rows = every_row(SHAPES[:1] if quick else SHAPES, only)
    settle_cache()
    with processes(jobs or default_jobs()) as pool:
        called = [pool.submit(alone, warm_up, *each) for each in warm_ups(rows, quick, only)]
        checks = check_kernels(pool, quick, only)
        wait(called, timeout=PATIENCE_S)
    by = clock(repeat_ms)
    ceilings = _ceilings(repeat_ms)
    about = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": _triton_version()},
        "units": "TFLOP/s for prefill; share of the copy's TB/s for decode; ms for packed",
        "ceilings": ceilings,
        "checks": checks,
    }
    first = wanted_first(rows)
    parts = [
        ("prefill", prefill([row for row in first if row[1] not in SLOW], by)),
        ("steps", steps(repeat_ms, only)),
        ("decode", decode(by, quick, only, ceilings["copy_tb_per_s"])),
        ("packed", () if only else packed(by, quick)),
        ("prefill", prefill([row for row in first if row[1] in SLOW], by)),
    ]
    places = {"prefill": lambda row: rows.index((row["shape"], row["kernel"]))}
    return gathered(about, parts, kept_in(out, table), places)


def require_gpu(device: str = "cuda") -> None:
    """Raises UnavailableError without a CUDA device."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise UnavailableError("bench attention: the kernels run on a CUDA GPU, and none is here")


def table(results: dict[str, Any]) -> str:
    """What :func:`bench_attention` measured, in Markdown."""
    ceilings = results["ceilings"]
    lines = [
        f"# Attention on one {results['hardware']}",
        "",
        f"torch {results['versions']['torch']}, triton {results['versions']['triton']}, bf16, "
        f"causal. bf16 matrix product {ceilings['matmul_tflops']:.0f} TFLOP/s, device-to-device "
        f"copy {ceilings['copy_tb_per_s']:.2f} TB/s, in the same run.",
        "",
        prefill_table(results["prefill"]),
        *flash_sigmoid_lines(results["prefill"]),
        *step_table(results["steps"]),
        *decode_table(results["decode"]),
    ]
    if results["packed"]:
        lines += packed_table(results["packed"])
    worst = max(check["error"] / check["limit"] for check in results["checks"])
    lines += [
        "",
        f"{len(results['checks'])} checks against the float64 reference passed before timing; "
        f"the worst used {worst:.0%} of its tolerance.",
    ]
    return "\n".join(lines) + "\n"


def _ceilings(repeat_ms: int) -> dict[str, float]:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds(lambda: left @ right, repeat_ms)
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    copied = milliseconds(lambda: target.copy_(source), repeat_ms)
    return {
        "matmul_tflops": 2 * 8192**3 / product / 1e9,
        "copy_tb_per_s": 2 * source.nbytes / copied / 1e9,
    }


def _triton_version() -> str:
    import triton

    return triton.__version__
