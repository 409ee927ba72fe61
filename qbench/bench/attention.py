"""``qbench bench attention``: the kernels against what else runs on this GPU, once they are right.

TFLOP/s count 4 · B · H · T² · D / 2 for a causal forward pass and 2.5 times that for the
backward pass, whatever a kernel really multiplies. Every time is the median of CUDA-event
timings after a warm-up; the two ceilings are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qbench.attention import kernels
from qbench.attention.kernels.families import computed, require
from qbench.attention.normalizers import NORMALIZERS
from qbench.bench.attention_checks import check_kernels
from qbench.bench.attention_prefill import (
    SHAPES,
    flash_sigmoid_lines,
    prefill,
    prefill_table,
    step_table,
    steps,
)
from qbench.bench.attention_skipping import measure_skipping, skipping_table
from qbench.bench.attention_timing import given, milliseconds, random_tensor, sparse_keys
from qbench.bench.kept import gathered, kept_in
from qbench.errors import UnavailableError
from qbench.text import markdown

DECODE = (64, 4096, 16, 64)
PACKED = (64, 4096, 16, 64)  # sequences, most tokens of one, heads, width


def bench_attention(
    out: Path | None,
    device: str,
    quick: bool,
    checkpoint: str | None = None,
    text: Path | None = None,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """Checks the kernels, then times them; returns what was measured and writes it to ``out``
    as it goes (JSON, and the table beside it in Markdown). ``quick`` leaves out most shapes and
    repeats. With a softpick ``checkpoint`` and a ``text`` to run it over, skipping of empty tiles
    is measured on its activations too. ``only``: these normalizers, what they are measured beside,
    and neither packed sequences nor skipping.

    Raises RecipeError for an unknown normalizer, UnavailableError for one without kernels and
    without a CUDA device, EvaluationError where a check is red: then
    nothing is timed.
    """
    require_gpu(device)
    for name in only:
        require(name)
    checks = check_kernels(quick, only)
    repeat_ms = 20 if quick else 100
    shapes = SHAPES[:1] if quick else SHAPES
    ceilings = _ceilings(repeat_ms)
    about = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": _triton_version()},
        "units": "TFLOP/s for prefill; share of the copy's TB/s for decode; ms for packed",
        "ceilings": ceilings,
        "checks": checks,
    }
    parts = {
        "prefill": (row for shape in shapes for row in prefill(shape, repeat_ms, only)),
        "steps": steps(repeat_ms, only),
        "decode": _decode(repeat_ms, quick, only, ceilings["copy_tb_per_s"]),
        "packed": () if only else _packed(repeat_ms, quick),
        "skipping": () if only else _skipping(repeat_ms, checkpoint, text),
    }
    return gathered(about, parts, kept_in(out, table))


def _skipping(repeat_ms: int, checkpoint: str | None, text: Path | None) -> Iterator[dict]:
    yield from measure_skipping(repeat_ms, checkpoint, text)


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
        "",
        "Decode, one query a sequence. Bytes count all keys and values, read or skipped.",
        "",
        markdown.table(
            ("B, T, H, D", "kernel", "ms", "TB/s", "of the copy"),
            [
                [", ".join(map(str, row["shape"])), row["kernel"], f"{row['ms']:.3f}",
                 f"{row['tb_per_s']:.2f}", f"{row['share_of_copy']:.0%}"]
                for row in results["decode"]
            ],
            align="llrrr",
        ),
    ]  # fmt: skip
    if results["packed"]:
        lines += _packed_table(results["packed"])
    if results["skipping"]:
        lines += skipping_table(results["skipping"])
    worst = max(check["error"] / check["limit"] for check in results["checks"])
    lines += [
        "",
        f"{len(results['checks'])} checks against the float64 reference passed before timing; "
        f"the worst used {worst:.0%} of its tolerance.",
    ]
    return "\n".join(lines) + "\n"


def _packed_table(rows: list[dict[str, Any]]) -> list[str]:
    cells = [[row["sequences"], row["tokens"], row["kernel"], f"{row['ms']:.3f}"] for row in rows]
    return [
        "",
        "Packed sequences of many lengths, forward.",
        "",
        markdown.table(("sequences", "tokens", "kernel", "ms"), cells, align="rrlr"),
    ]


def _decode(
    repeat_ms: int, quick: bool, only: Collection[str], copied: float
) -> Iterator[dict[str, Any]]:
    """``copied``: TB/s of a copy."""
    batch, length, heads, width = DECODE
    batch = 8 if quick else batch
    key, value = (random_tensor(batch, length, heads, width).contiguous() for _ in range(2))
    query = random_tensor(batch, 1, heads, width)
    sparse = sparse_keys(query, key)
    size = key.nbytes + value.nbytes

    def row(name: str, run: Callable[[], Tensor]) -> dict[str, Any]:
        ms = milliseconds(run, repeat_ms)
        shape = (batch, length, heads, width)
        rate = size / ms / 1e9
        return {"shape": shape, "kernel": name, "ms": ms, "tb_per_s": rate,
                "share_of_copy": rate / copied}  # fmt: skip

    with torch.no_grad():
        for normalizer in only or computed():
            parameters = given(normalizer, heads)
            for name, keys in (("random keys", key), ("99 % of scores negative", sparse)):
                if keys is sparse and not NORMALIZERS.get(normalizer).sparse:
                    continue
                yield row(
                    f"qbench {normalizer}, {name}",
                    lambda n=normalizer, k=keys, p=parameters: kernels.attention(
                        query, k, value, normalizer=n, parameters=p
                    ),
                )
        yield row("torch softmax", lambda: F.scaled_dot_product_attention(query, key, value))


def _packed(repeat_ms: int, quick: bool) -> Iterator[dict[str, Any]]:
    sequences, longest, heads, width = PACKED
    sequences = 8 if quick else sequences
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, longest + 1, (sequences,), generator=generator)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    tokens = int(cu_seqlens[-1])
    packed = [random_tensor(1, tokens, heads, width) for _ in range(3)]
    padded = [random_tensor(sequences, longest, heads, width) for _ in range(3)]
    most = int(lengths.max())
    cu_seqlens = cu_seqlens.cuda()
    runs = {
        "qbench softpick, packed": lambda: kernels.packed_attention(
            *packed, normalizer="softpick", cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=most, max_seqlen_k=most,
        ),
        "qbench softpick, padded to the longest": lambda: kernels.attention(
            *padded, normalizer="softpick", causal=True
        ),
    }  # fmt: skip
    with torch.no_grad():
        for name, run in runs.items():
            ms = milliseconds(run, repeat_ms)
            yield {"sequences": sequences, "tokens": tokens, "kernel": name, "ms": ms}


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
