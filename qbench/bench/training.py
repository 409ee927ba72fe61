"""``qbench bench training``: the training step of ``qbench train``, with our kernels and torch's.

FLOP count 6 a parameter in matrix products and token, and 6 · layers · hidden · context for
attention (see ``flops_per_token``); the share is of the GPU's measured bf16 matrix product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from qbench import bench
from qbench.bench import Row
from qbench.errors import RecipeError
from qbench.machine import (
    environment,
    free,
    hardware,
    peak_memory_gib,
    reset_peak_memory,
    synchronize,
)
from qbench.training.data import Sequences, dataloader
from qbench.training.loop import Step
from qbench.training.model import (
    PEAK,
    attention_kernels,
    deterministic,
    initial_model,
    utilization,
)
from qbench.training.recipe import Compute, TrainingRecipe

SHAPES = {  # hidden, layers, heads, vocabulary, context, sequences of a GPU
    "27m": (384, 12, 6, 8192, 2048, 32),
    "124m": (768, 12, 12, 32_000, 2048, 16),
    "340m": (1024, 24, 16, 32_000, 4096, 8),
}
TORCHS, CUDNN = "softmax, torch", "softmax, cuDNN"
BY_TORCH = {TORCHS: "softmax/torch", CUDNN: "softmax/cuDNN"}  # what their rows say
CONTENDERS = (*BY_TORCH, "softmax", "softpick")  # normalizers are those on our kernels
ALIBI = ", ALiBi"
KNOWN = (*CONTENDERS, "sigmoid", *(f"{name}{ALIBI}" for name in ("softmax", "softpick", "sigmoid")))
WARM_UP = 4  # steps; the first ones compile
RUNS, STEPS = 3, 8  # timed: runs of steps that nobody waits for one by one, as in a training
# As transformers has it, but plainly causal: the dense mask that it makes under torch.compile is
# several times slower.
TORCHS_NAME = "qbench-bench-torch"
AttentionInterface.register(TORCHS_NAME, sdpa_attention_forward)
AttentionMaskInterface.register(TORCHS_NAME, lambda *_, **__: None)


def bench_training(
    shapes: Sequence[str],
    contenders: Sequence[str],
    compute: Compute,
    processes: PartialState,
    *,
    sequences: int | None,
    forward: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every shape with every contender, one after the other; returns it as JSON. Without
    ``shapes`` all, without ``contenders`` the first four, as far as they run here.
    ``sequences`` None: as many as the shape says. ``forward``: the forward pass alone, without
    gradients. ``say`` gets a line as each part of it begins, and one with what each row gave.
    Raises RecipeError for an unknown one.

    Of a row ``tokens_per_s`` is of all GPUs together, ``ms`` a step's, the median of the timed
    runs, ``share`` of the GPUs' peak, None where that is not known, ``compile_s`` the first step's,
    and ``loss`` the last step's, on random tokens: about ln of the vocabulary."""
    kind, rows = processes.device.type, []
    possible = [name for name in KNOWN if kind == "cuda" or name != CUDNN]
    shapes = shapes or list(SHAPES)
    contenders = contenders or [name for name in CONTENDERS if name in possible]
    for what, known, named in (
        ("--shape", SHAPES, shapes),
        ("--attention", possible, contenders),
    ):
        for name in named:
            if name not in known:
                told = ", ".join(f"'{one}'" for one in known)
                raise RecipeError(f"{what} {name}: unknown, or not on {kind}; possible: {told}")
    for shape in shapes:
        for contender in contenders:
            by_cudnn = contender == CUDNN  # which has no deterministic gradient
            only = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if by_cudnn else nullcontext()
            recipe = _recipe(shape, contender, sequences, compute, processes)
            with deterministic(not by_cudnn), only:
                row = {"shape": shape, "deterministic": not by_cudnn}
                row |= _measured(shape, contender, recipe, processes, forward, say)
            rows.append(row)
            share = "" if row["share"] is None else f", {row['share']:.1%} of peak"
            speed = f"{row['tokens_per_s']:,.0f} tokens/s{share}, {row['ms']:.1f} ms"
            say(f"{shape} {contender}: {speed}")
            free(kind)
    return {
        "environment": environment(kind, ()).model_dump(mode="json"),
        "processes": processes.num_processes,
        "compute": compute.model_dump(mode="json"),
        "forward": forward,
        "shapes": {shape: SHAPES[shape] for shape in shapes},
        "rows": rows,
    }


def _measured(
    name: str,
    contender: str,
    recipe: TrainingRecipe,
    processes: PartialState,
    forward: bool,
    say: Callable[[str], None],
) -> Row:
    compute, kind = recipe.compute, processes.device.type
    which = f"{name} {contender}"
    begins = "compiling the step" if compute.compile else "a first step"
    say(f"{which}: {begins}, {recipe.batch.tokens:,} tokens")
    model, attention = initial_model(
        recipe.model, normalizer=contender.partition(",")[0], seed=0, device=processes.device,
        attention=compute.attention,
    )  # fmt: skip
    if contender in BY_TORCH:
        model.set_attn_implementation(TORCHS_NAME)
        attention = BY_TORCH[contender]
    elif contender.endswith(ALIBI):
        attention += ALIBI
    step = Step(model, recipe, processes)
    draw = np.random.default_rng(0)
    ids = draw.integers(0, recipe.model.vocabulary, 4 * recipe.batch.tokens, np.uint16)
    source = Sequences(tokens=ids, context=recipe.model.context, bos=None)
    batches = dataloader(source, recipe, processes, first=0, seed=0)

    def take(number: int) -> Tensor:
        """Its loss."""
        if not forward:
            return step(number, batches)[0]
        with torch.no_grad():
            return step.loss(next(batches))

    def seconds(first: int, count: int) -> float:
        """Of ``count`` steps in a row, each."""
        synchronize(kind)
        began = time.perf_counter()
        for number in range(first, first + count):
            take(number)
        synchronize(kind)
        return (time.perf_counter() - began) / count

    reset_peak_memory(kind)
    compiled = seconds(0, 1)
    say(f"{which}: first step {compiled:.1f} s; {WARM_UP} more before any is timed")
    warm = seconds(1, WARM_UP - 1)
    kernels = attention_kernels(lambda: take(WARM_UP), processes.device)
    say(f"{which}: timing {RUNS} runs of {STEPS} steps, about {STEPS * warm:.1f} s each")
    median = statistics.median(seconds(WARM_UP + 1 + run * STEPS, STEPS) for run in range(RUNS))
    loss = take(recipe.steps - 1)
    speed = recipe.batch.tokens / median
    own = speed / processes.num_processes / (3 if forward else 1)  # forward: a third of the work
    return {
        "attention": attention,
        "tokens_per_s": speed,
        "ms": 1000 * median,
        "share": utilization(model, recipe.model.context, own, hardware(kind)),
        "memory_gib": peak_memory_gib(kind),
        "compile_s": compiled,
        "kernels": kernels,
        "loss": loss.item(),
    }


def _recipe(
    name: str, contender: str, sequences: int | None, compute: Compute, processes: PartialState
) -> TrainingRecipe:
    hidden, layers, heads, vocabulary, context, usual = SHAPES[name]
    sequences = sequences or usual
    alibi = {"rope_theta": None, "parameters": {"alibi_slopes": {}}}
    batch = sequences * context * processes.num_processes
    return TrainingRecipe(
        name="bench",
        model={
            "hidden": hidden, "layers": layers, "heads": heads, "vocabulary": vocabulary,
            "context": context, **(alibi if contender.endswith(ALIBI) else {}),
        },
        normalizers=("softmax",),
        data={"tokens": "none"},
        tokens=batch * (WARM_UP + RUNS * STEPS + 2),
        batch={"tokens": batch, "sequences": sequences},
        optimizer={"learning_rate": 1e-4},
        schedule={"warmup_steps": 1},
        compute=compute,
    )  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    rows, about, compute = found["rows"], found["environment"], found["compute"]
    took, what = "a step", "data, forward, backward, clipping, AdamW"
    if found["forward"]:
        took, what = "the forward pass", "data and forward pass, without gradients"
    lines = []
    for row in rows:
        hidden, layers, heads, vocabulary, context, _ = SHAPES[row["shape"]]
        torchs = [
            other["tokens_per_s"]
            for other in rows
            if other["shape"] == row["shape"] and other["attention"] in BY_TORCH.values()
        ]
        shape = f"{row['shape']}: {hidden} × {layers}, {heads} heads, {vocabulary:,} ids, context "
        same = "yes" if row["deterministic"] else "no"
        beside = row["tokens_per_s"] / max(torchs) if torchs else None
        lines.append(row | {"shape": f"{shape}{context:,}", "same": same, "beside": beside})
    columns = {
        "shape": ("shape", ""), "attention": ("attention", ""), "deterministic": ("same", ""),
        "tokens/s": ("tokens_per_s", ",.0f"), "× torch's best": ("beside", ".3f"),
        "of peak": ("share", ".1%"), f"ms {took}": ("ms", ".1f"), "GiB": ("memory_gib", ".1f"),
        "first s": ("compile_s", ".0f"),
    }  # fmt: skip
    peaks = ", ".join(f"{name}: {rate / 1e12:.0f}" for name, rate in PEAK.items())
    ran = [f"- {row['shape']}, {row['attention']}: {', '.join(row['kernels'])}" for row in rows]
    page = [
        f"# Training on {found['processes']} {about['hardware']}",
        f"torch {about['versions']['torch']}, triton {about['versions']['triton']}, transformers "
        f"{about['versions']['transformers']}; {compute['precision']} passes over float32 "
        f"weights, torch.compile: {compute['compile'] or 'no'}. "
        "Deterministic: the same bits every time. Share of peak: 6 FLOP a parameter in "
        "matrix products and token, and 6 · layers · hidden · context for attention "
        "(a third of it for the forward pass), of a "
        f"measured bf16 matrix product ({peaks} TFLOP/s). "
        f"Medians of {RUNS} runs of {STEPS} steps in a row, as a training takes them: "
        f"{what}.",
        bench.table(lines, columns),
        "Kernels of attention, as a profile of one step named them:",
        "\n".join(ran),
    ]
    return "\n\n".join(page) + "\n"
