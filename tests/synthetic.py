"""A results folder with seeded outcomes of known structure, written through the real Store.

The sizes are those of the real evaluation sets. Documents have a common difficulty, so that
outcomes of two cells are correlated as those of real models are; damage grows as bits fall.
"""

import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from qbench.records import (
    Audit,
    Environment,
    GridCell,
    ModuleAudit,
    Part,
    Precision,
    Record,
    RunManifest,
    Score,
    Stage,
    Trained,
)
from qbench.store import Store

SIZES = {"arc_easy": 2376, "lambada_openai": 5153, "piqa": 1838, "sciq": 1000, "wikitext": 62}
LABELS = {"sciq": "sciq [validation]"}
PAPER = ("bf16", "bnb-4bit", "bnb-8bit", "gptq-2bit", "gptq-3bit", "gptq-4bit", "gptq-8bit",
         "hqq-2bit", "hqq-3bit")  # fmt: skip
TITLES = {"none": "Unquantized", "bnb": "BNB", "gptq": "GPTQ", "hqq": "HQQ",
          "rtn": "Round to nearest"}  # fmt: skip
LAYERS = tuple(
    f"model.layers.{depth}.{part}"
    for depth in range(2)
    for part in ("self_attn.v_proj", "mlp.down_proj")
)
MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def parse(quantizer: str) -> tuple[str, float | None]:
    if quantizer in ("bf16", "fp32"):
        return "none", None
    method, bits = quantizer.split("-")
    return method, float(bits.removesuffix("bit"))


def precision(quantizer: str) -> Precision:
    bits = parse(quantizer)[1]
    return Precision(weights=Part(bits=bits, scheme=quantizer) if bits else None)


def key(checkpoint: str, quantizer: str) -> str:
    return hashlib.sha256(f"{checkpoint}/{quantizer}".encode()).hexdigest()


def make_store(
    directory: Path,
    *,
    checkpoints: Sequence[str] = ("softmax", "softpick"),
    quantizers: Sequence[str] = PAPER,
    sizes: dict[str, int] = SIZES,
    failed: Sequence[str] = (),
    missing: Sequence[str] = (),
    shift: dict[str, float] | None = None,
    seed: int = 0,
    replicates: dict[str, Sequence[str]] | None = None,
    trained: dict[str, Trained] | None = None,
) -> Store:
    """``shift`` makes the named cells worse by that much (in standard deviations). ``replicates``
    are the grid's groups, ``trained`` says how checkpoints were trained."""
    store = Store(directory)
    cells = [
        GridCell(
            checkpoint=c,
            quantizer=q,
            method=parse(q)[0],
            title=TITLES[parse(q)[0]],
            precision=precision(q),
            key=key(c, q),
        )
        for c in checkpoints
        for q in quantizers
    ]
    store.put_manifest(
        RunManifest(
            name=Path(directory).name,
            checkpoints=tuple(checkpoints),
            quantizers=tuple(quantizers),
            tasks=tuple(sizes),
            cells=tuple(cells),
            replicates={name: tuple(members) for name, members in (replicates or {}).items()},
        )
    )
    for cell in cells:
        if cell.cell in missing:
            continue
        if cell.cell in failed:
            store.put(make_record(cell, (), error="out of memory | while quantizing\nlayer 3"),
                      None, None)  # fmt: skip
            continue
        worse = (shift or {}).get(cell.cell, 0.0)
        table = outcomes(cell, checkpoints.index(cell.checkpoint), sizes, worse, seed)
        record = make_record(cell, scores(table))
        training = (trained or {}).get(cell.checkpoint)
        store.put(record.model_copy(update={"training": training}), table, None)
    return store


def outcomes(
    cell: GridCell, index: int, sizes: dict[str, int], worse: float, seed: int
) -> pd.DataFrame:
    """Per-document outcomes of one cell, columns as ``OUTCOME_COLUMNS``."""
    bits = bits_of(cell)
    damage = 0.0 if bits is None else 4.0 * 2.0**-bits / (1 + index) + 0.02
    damage += worse - 0.05 * index
    own = np.random.default_rng([seed, int(cell.key[:8], 16)])
    frames = []
    for number, (task, size) in enumerate(sizes.items()):
        common = np.random.default_rng([seed, number])
        difficulty = common.normal(size=size)
        words = np.maximum(20, common.lognormal(8, 0.7, size=size)).round()
        jitter = own.normal(scale=0.25, size=size)
        if task == "wikitext":
            nats = words * (3.2 + 0.2 * difficulty + 0.3 * damage + 0.05 * jitter)
            length = (words * 5.1).round()
            frames += [
                _frame(task, "word_perplexity", -nats, words),
                _frame(task, "byte_perplexity", -nats, length),
                _frame(task, "bits_per_byte", -nats, length),
            ]
        elif task == "lambada_openai":
            nats = np.exp(0.8 + 0.6 * difficulty + 0.4 * damage + 0.3 * jitter)
            frames += [_frame(task, "perplexity", -nats), _frame(task, "acc", (nats < 1.6) * 1.0)]
        else:
            margin = 0.2 * (number - 1) - difficulty - damage + jitter
            right = (margin > 0) * 1.0
            normed = (margin - 0.1 + 0.2 * own.normal(size=size) > 0) * 1.0
            frames += [_frame(task, "acc", right), _frame(task, "acc_norm", normed)]
    return pd.concat(frames, ignore_index=True)


def _frame(task: str, metric: str, value: np.ndarray, weight: np.ndarray | float = 1.0):
    columns = {"task": task, "document": np.arange(len(value)), "metric": metric}
    return pd.DataFrame({**columns, "value": value, "weight": weight})


AGGREGATIONS = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}


def scores(table: pd.DataFrame) -> tuple[Score, ...]:
    """What lm-eval would make of the outcomes."""
    made = []
    for (task, metric), rows in table.groupby(["task", "metric"], sort=False):
        aggregation = AGGREGATIONS.get(metric, "mean")
        mean = rows["value"].sum() / rows["weight"].sum()
        value = {"mean": mean, "bits_per_byte": -mean / math.log(2)}.get(aggregation)
        stderr = rows["value"].std() / math.sqrt(len(rows)) if aggregation == "mean" else None
        made.append(
            Score(
                task=task,
                label=LABELS.get(task, task),
                metric=metric,
                value=math.exp(-mean) if value is None else value,
                stderr=stderr,
                higher_is_better=aggregation == "mean",
                aggregation=aggregation,
                documents=len(rows),
            )
        )
    return tuple(made)


def bits_of(cell: GridCell) -> float | None:
    return cell.precision.weights.bits if cell.precision.weights else None


def layer(cell: GridCell, name: str) -> ModuleAudit:
    bits = bits_of(cell)
    return ModuleAudit(
        name=name,
        kind="PackedLinear",
        parameters=4096,
        bits_per_weight=bits + 0.5,
        weight_error=0.6 * 2.0**-bits,
        gain=0.998,
        levels=int(2**bits),
        digest=hashlib.sha256(f"{cell.cell}/{name}".encode()).hexdigest(),
    )


def make_record(
    cell: GridCell, scores: tuple[Score, ...], error: str | None = None, audited: bool = True
) -> Record:
    known = bits_of(cell)
    bits = known or 16.0
    audit = Audit(
        passed=True,
        bits=known,
        coverage=1.0 if known else 0.0,
        bits_per_weight=bits + (0.5 if known else 0.0),
        weight_error=0.6 * 2.0**-bits if known else 0.0,
        levels=int(2**bits),
        logits_moved=2.0**-bits if known else 0.0,
        modules=tuple(layer(cell, name) for name in LAYERS) if known else (),
    )
    stages = [("load", 1.5, 2.0), ("quantize", 28.0, 3.1), ("audit", 0.9, 3.1), ("evaluate", 60.0, 8.6)]  # fmt: skip  # noqa: E501
    return Record(
        key=cell.key,
        key_parts={
            "weights": {"digest": hashlib.sha256(cell.checkpoint.encode()).hexdigest()},
            "quantizer": {"name": cell.quantizer, "bits": known},
            "numerics": {"dtype": "bfloat16", "softmax_dtype": "float32"},
            "versions": {"torch": "2.11.0", "transformers": "5.17.0"},
        },
        checkpoint=cell.checkpoint,
        quantizer=cell.quantizer,
        method=cell.method,
        title=cell.title,
        precision=cell.precision,
        normalizer=cell.checkpoint,
        attention=f"{cell.checkpoint}/triton",
        status="failed" if error else "ok",
        error=error,
        scores=scores,
        audit=audit if audited and not error else None,
        stages=tuple(Stage(name=n, seconds=s, peak_memory_gib=g) for n, s, g in stages),
        environment=Environment(
            python="3.12.3",
            platform="Linux",
            device="cuda",
            hardware="NVIDIA H200",
            versions={"torch": "2.11.0", "transformers": "5.17.0"},
            git_revision="0" * 40,
            qbench="0.1.0",
        ),
        started=MOMENT,
        finished=MOMENT + timedelta(seconds=91),
    )
