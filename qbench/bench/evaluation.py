"""The same model, tasks and documents through lm-eval's HFLM, exact and fast scoring."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qbench.errors import RecipeError
from qbench.running.environment import environment

if TYPE_CHECKING:
    import pandas as pd

    from qbench.evaluation.tasks import LoadedTask
    from qbench.evaluation.tolerance import Tolerance

MODES = ("lm-eval", "exact", "fast")
WARM_UP = 4  # documents of each task that every mode scores before the clock starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One mode on one task, or on all of them together (``task`` is "all").

    ``seconds`` is all of it: lm-eval's requests and metrics, tokenization, the model, and in
    fast mode the sample that is compared with exact. lm-eval's mode runs lm-eval as it is, ours
    with ``scoring.overhead``. ``scoring_seconds`` is the part inside the language model.
    ``speed`` is times HFLM's ``seconds``. Differences are from HFLM's
    log-likelihoods in nats; ``changed_answers`` counts documents whose likeliest choice (or
    greedy hit) is another.
    """

    task: str
    mode: str
    documents: int
    requests: int
    seconds: float
    scoring_seconds: float
    speed: float | None
    largest_difference: float | None
    mean_difference: float | None
    largest_relative: float | None
    changed_answers: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What ``compare`` measured. ``reports`` holds each mode's own report, with peak memory."""

    model: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    reports: dict[str, dict[str, Any]]
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[LoadedTask],
    *,
    max_length: int,
    batch_size: int | str = "auto",
    modes: Sequence[str] = MODES,
    limit: int | None = None,
    seed: int = 0,
    add_bos: bool = False,
    tolerance: Tolerance | None = None,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Score ``tasks`` with ``model`` in every mode, one after the other, softmax in float32.

    The first mode must be lm-eval, which the others are compared with. ``say`` gets a line for
    each task and mode. Raises RecipeError for modes that cannot be compared, and what scoring
    raises.
    """
    if not modes or modes[0] != "lm-eval" or set(modes) - set(MODES):
        raise RecipeError(f"--modes {', '.join(modes)}: lm-eval first, then exact and fast")
    rows: list[Row] = []
    reports = {}
    yardstick: dict[str, tuple[Row, pd.DataFrame]] = {}
    for mode in modes:
        scorer = _scorer(model, tokenizer, mode, batch_size, max_length, add_bos, tolerance)
        for task in tasks:
            _timed(scorer, mode, task, min(WARM_UP, limit or WARM_UP), seed)
        scorer = _scorer(model, tokenizer, mode, batch_size, max_length, add_bos, tolerance)
        for task in tasks:
            row = _measure(scorer, mode, task, limit, seed, yardstick)
            rows.append(row)
            if say is not None:
                say(f"{task.name} {mode}: {row.seconds:.2f} s")
        rows.append(_together([row for row in rows if row.mode == mode], rows))
        reports[mode] = scorer.report()
    device = model.device.type
    return Comparison(
        model={
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
        },
        settings={
            "batch_size": batch_size,
            "max_length": max_length,
            "limit": limit,
            "seed": seed,
            "add_bos": add_bos,
            "softmax_dtype": "float32",
            "bootstrap": 0,
        },
        rows=tuple(rows),
        reports=reports,
        environment=environment(device, ("lm-eval",)).model_dump(mode="json"),
    )


def table(comparison: Comparison) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| task | mode | requests | seconds | in the model | × lm-eval | largest difference | "
        "mean difference | changed answers |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in comparison.rows:
        cells = [
            row.task,
            row.mode,
            f"{row.requests:,}",
            f"{row.seconds:.2f}",
            f"{row.scoring_seconds:.2f}",
            _or_dash(row.speed, "{:.2f}"),
            _or_dash(row.largest_difference, "{:.3g}"),
            _or_dash(row.mean_difference, "{:.3g}"),
            _or_dash(row.changed_answers, "{}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _or_dash(value: float | None, form: str) -> str:
    return "—" if value is None else form.format(value)


def _scorer(
    model: Any,
    tokenizer: Any,
    mode: str,
    batch_size: int | str,
    max_length: int,
    add_bos: bool,
    tolerance: Tolerance | None,
) -> Any:
    from qbench.evaluation.scoring import language_model

    return language_model(
        model,
        tokenizer,
        mode=mode,
        batch_size=batch_size,
        max_length=max_length,
        add_bos=add_bos,
        tolerance=tolerance,
    )


def _measure(
    scorer: Any,
    mode: str,
    task: LoadedTask,
    limit: int | None,
    seed: int,
    yardstick: dict[str, tuple[Row, pd.DataFrame]],
) -> Row:
    seconds, inside, responses = _timed(scorer, mode, task, limit, seed)
    row = Row(
        task=task.name,
        mode=mode,
        documents=responses["document"].nunique(),
        requests=len(responses),
        seconds=seconds,
        scoring_seconds=inside,
        speed=None,
        largest_difference=None,
        mean_difference=None,
        largest_relative=None,
        changed_answers=None,
    )
    if mode == "lm-eval":
        yardstick[task.name] = row, responses
        return row
    theirs, expected = yardstick[task.name]
    ours = responses["log_likelihood"].to_numpy()
    reference = expected["log_likelihood"].to_numpy()
    difference = np.abs(ours - reference)
    return dataclasses.replace(
        row,
        speed=theirs.seconds / seconds,
        largest_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        largest_relative=float((difference / np.abs(reference).clip(min=1e-30)).max()),
        changed_answers=int((_answers(responses) != _answers(expected)).sum()),
    )


def _timed(
    scorer: Any, mode: str, task: LoadedTask, limit: int | None, seed: int
) -> tuple[float, float, pd.DataFrame]:
    """Seconds in all, seconds in the language model, and its responses."""
    import torch

    from qbench.evaluation.evaluate import evaluate
    from qbench.evaluation.scoring.overhead import less_overhead, usual_overhead

    inside = 0.0
    methods = ("loglikelihood", "loglikelihood_rolling")

    def clocked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                inside += time.perf_counter() - start

        return call

    for name in methods:
        setattr(scorer, name, clocked(getattr(scorer, name)))
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        with usual_overhead() if mode == "lm-eval" else less_overhead():
            result = evaluate(scorer, task, limit=limit, seed=seed)
        return time.perf_counter() - start, inside, result.responses
    finally:
        for name in methods:
            delattr(scorer, name)


def _answers(responses: pd.DataFrame) -> pd.Series:
    """One answer a document: its likeliest request, or for a single one whether it is greedy."""

    def answer(rows: pd.DataFrame) -> int:
        if len(rows) == 1:
            return int(rows["greedy"].iloc[0])
        return int(rows["request"].to_numpy()[rows["log_likelihood"].to_numpy().argmax()])

    columns = ["request", "log_likelihood", "greedy"]
    return responses.groupby("document", sort=True)[columns].apply(answer)


def _together(rows: Sequence[Row], before: Sequence[Row]) -> Row:
    """All tasks of one mode. ``before`` holds lm-eval's total, once there is one."""
    seconds = sum(row.seconds for row in rows)
    measured = rows[0].mode != "lm-eval"
    total = next((r.seconds for r in before if r.task == "all" and r.mode == "lm-eval"), None)
    requests = sum(row.requests for row in rows)
    return Row(
        task="all",
        mode=rows[0].mode,
        documents=sum(row.documents for row in rows),
        requests=requests,
        seconds=seconds,
        scoring_seconds=sum(row.scoring_seconds for row in rows),
        speed=total / seconds if measured and total else None,
        largest_difference=max(r.largest_difference for r in rows) if measured else None,
        mean_difference=(
            sum(r.mean_difference * r.requests for r in rows) / requests if measured else None
        ),
        largest_relative=max(r.largest_relative for r in rows) if measured else None,
        changed_answers=sum(r.changed_answers for r in rows) if measured else None,
    )
