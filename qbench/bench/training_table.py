"""What ``qbench bench training`` measured, as a table and as files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from qbench import text
from qbench.bench.training import RUNS, SHAPES, STEPS, Row
from qbench.bench.training_profile import Profile
from qbench.files import write_atomically
from qbench.machine import environment
from qbench.training.compute import Compute
from qbench.training.processes import Processes


def table(rows: list[Row], processes: Processes, compute: Compute) -> str:
    """What was measured, in Markdown."""
    about = environment(processes.device.type, ("triton",))
    torchs: dict[str, float] = {}  # the faster of the two
    for row in rows:
        if row.attention in ("softmax/torch", "softmax/cuDNN"):
            torchs[row.shape] = max(row.tokens_per_s, torchs.get(row.shape, 0.0))
    lines = []
    for row in rows:
        hidden, layers, heads, vocabulary, context, _ = SHAPES[row.shape]
        beside = torchs.get(row.shape)
        lines.append(
            [
                f"{row.shape}: {hidden} × {layers}, {heads} heads, {vocabulary:,} ids, context "
                f"{context:,}",
                row.attention,
                "yes" if row.deterministic else "no",
                f"{row.tokens_per_s:,.0f}",
                "–" if beside is None else f"{row.tokens_per_s / beside:.3f}",
                "–" if row.share is None else f"{row.share:.1%}",
                f"{row.ms:.1f}",
                f"{row.memory_gib:.1f}",
                f"{row.compile_s:.0f}",
            ]
        )
    head = (
        *("shape", "attention", "deterministic", "tokens/s", "× torch's best", "of peak"),
        *("ms a step", "GiB", "first step s"),
    )
    ran = [f"- {row.shape}, {row.attention}: {', '.join(row.kernels)}" for row in rows]
    return (
        "\n".join(
            [
                f"# Training on {processes.count} {about.hardware}",
                "",
                f"torch {about.versions['torch']}, triton {about.versions['triton']}, transformers "
                f"{about.versions['transformers']}; {compute.precision} passes over float32 "
                f"weights, torch.compile: {compute.compile or 'no'}. "
                "Deterministic: the same bits every time. Share of peak: 6 FLOP a parameter in "
                "matrix products and token, and 6 · layers · hidden · context for attention, of a "
                "measured bf16 matrix product (H200: 790 TFLOP/s). "
                f"Medians of {RUNS} runs of {STEPS} steps in a row, as a training takes them: "
                "data, forward, backward, clipping, AdamW.",
                "",
                text.table(head, lines, align="lllrrrrrr"),
                "",
                "Kernels of attention, as a profile of one step named them:",
                "",
                *ran,
            ]
        )
        + "\n"
    )


def write(
    out: Path, rows: list[Row], profiles: list[Profile], text: str, processes: Processes
) -> list[Path]:
    """JSON to ``out``, the table and the profiles beside it in Markdown."""
    about = environment(processes.device.type, ("triton",))
    values = {
        "environment": about.model_dump(mode="json"),
        "processes": processes.count,
        "shapes": {row.shape: SHAPES[row.shape] for row in rows},
        "rows": [asdict(row) for row in rows],
        "profiles": [asdict(profile) for profile in profiles],
    }
    write_atomically(out, (json.dumps(values, indent=1) + "\n").encode())
    written = [out]
    if out.suffix:  # /dev/stdout has nothing beside it
        beside = out.with_suffix(".md")
        write_atomically(beside, text.encode())
        written.append(beside)
    return written
