"""Time the same model, tasks and documents through lm-eval's HFLM, exact and fast scoring, and what
measuring damage adds to fast scoring (``qbench bench evaluation``)."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qbench import bench
from qbench.bench import Row
from qbench.cell import load
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.evaluation.evaluate import (
    Instances,
    LoadedTask,
    Outcomes,
    ask,
    in_turn,
    judge,
    load_task,
)
from qbench.evaluation.kl_observer import BaselineWriter, KLObserver
from qbench.evaluation.scoring import language_model
from qbench.evaluation.scoring.batching import forget_requests
from qbench.evaluation.settings import ScoringSettings
from qbench.machine import environment, synchronize
from qbench.plan import scoring_settings
from qbench.runner.workers import SWITCH_SECONDS

if TYPE_CHECKING:
    from qbench.evaluation.scoring import Observer
    from qbench.plan import Plan

MODES = ("lm-eval", "exact", "fast")
ASKED = ("loglikelihood", "loglikelihood_rolling", "generate_until", "greedy")  # of a model
DOCUMENT = ["task", "document"]
WARM_UP = 2  # full batches of each task that every mode scores before the clock starts


def bench_evaluation(planned: Plan, *, log: Callable[[str], None]) -> dict[str, Any]:
    """Return :func:`compare` of the plan's first cell and its tasks, with the softmax in float32 in
    every mode."""
    cell, evaluation = planned.cells[0], planned.recipe.evaluation
    if planned.device == "cuda":
        sys.setswitchinterval(SWITCH_SECONDS)  # as in a cell's process
    model, tokenizer = load(cell, planned), load_tokenizer(cell.checkpoint)
    settings = {
        mode: scoring_settings(
            evaluation.model_copy(update={"scoring": mode, "softmax_dtype": "float32"}),
            cell.checkpoint,
            cell.quantization,
            device=planned.device,
        )
        for mode in MODES
    }
    return compare(model, tokenizer, [load_task(task) for task in planned.tasks], settings, log=log)


def compare(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[LoadedTask],
    settings: Mapping[str, ScoringSettings],
    *,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Score ``tasks`` with ``model`` in every mode, one after the other, and in the last mode,
    unless it is lm-eval's, twice more: while hidden states are kept, as of an unquantized model,
    and while damage is measured against them.

    ``settings``: the settings of each mode, lm-eval's first, with which the others are compared.
    ``log`` is called with a line per task and mode. Returns the model's name, the settings by mode,
    each run's report with its peak memory, and rows: one mode on one task, or on all of them
    (``task`` is "all"). HFLM scores one task after the other; in the other modes, as in a cell, the
    next task is prepared, and the one before judged, while one is scored.

    ``seconds`` of a row is everything: lm-eval's requests and metrics, tokenization, the model, and
    in fast mode the sample that is scored exactly; ``scoring_seconds`` is the part inside the
    language model; ``speed`` is HFLM's ``seconds`` over ``seconds``. Differences are those of
    log-likelihoods from HFLM's, in nats; None for generated answers. ``changed_answers`` counts
    documents with another text, likeliest choice or greedy hit."""
    rows: list[Row] = []
    reports: dict[str, Any] = {}
    runs: dict[str, list[Timed]] = {}

    def run(
        name: str, chosen: ScoringSettings, observe: Callable[[], Observer | None] = lambda: None
    ) -> Observer | None:
        scorer = language_model(model, tokenizer, chosen)  # an observer measures all documents
        most = WARM_UP * chosen.batch_size
        few = dataclasses.replace(chosen, limit=min(most, chosen.limit or most))
        _timed(scorer, tasks, few)
        observer = observe()
        if chosen.mode != "lm-eval":  # the same HFLM: its first call is none of its speed
            scorer = language_model(model, tokenizer, chosen, observer=observer)
        forget_requests()  # of the mode before
        apart = [[task] for task in tasks] if chosen.mode == "lm-eval" else [tasks]
        runs[name] = [each for part in apart for each in _timed(scorer, part, chosen)]
        for index, task in enumerate(tasks):
            each = slice(index, index + 1)
            rows.append(_row(task.name, name, runs[name][each], runs["lm-eval"][each]))
            log(f"{task.name} {name}: {rows[-1]['seconds']:.2f} s")
        rows.append(_row("all", name, runs[name], runs["lm-eval"]))
        texts = [t.name for t in tasks if t.task.OUTPUT_TYPE == "loglikelihood_rolling"]
        reports[name] = scorer.report(texts).model_dump(mode="json")
        return observer

    for mode, chosen in settings.items():
        run(mode, chosen)
    if mode != "lm-eval":  # again, as the unquantized and as a quantized cell measure damage
        kept = run(f"{mode}, rows kept", chosen, BaselineWriter)
        run(f"{mode}, damage measured", chosen, lambda: KLObserver(kept.hidden_states()))
    return {
        "model": {
            "name": type(model).__name__,
            "parameters": model.num_parameters(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
        },
        "settings": {mode: dataclasses.asdict(chosen) for mode, chosen in settings.items()},
        "rows": rows,
        "reports": reports,
        "environment": environment(model.device.type, ("lm-eval",)).model_dump(mode="json"),
    }


def table(comparison: dict[str, Any]) -> str:
    """Return the result of :func:`compare` as a Markdown table."""
    columns = {
        "task": ("task", ""), "mode": ("mode", ""), "requests": ("requests", ","),
        "seconds": ("seconds", ".2f"), "in the model": ("scoring_seconds", ".2f"),
        "× lm-eval": ("speed", ".2f"), "largest difference": ("largest_difference", ".3g"),
        "mean difference": ("mean_difference", ".3g"), "changed answers": ("changed_answers", "d"),
    }  # fmt: skip
    return bench.table(comparison["rows"], columns) + (
        "\n\nDifferences are from lm-eval's log-likelihoods, in nats. Rows kept: as an unquantized "
        "cell, which keeps hidden states; damage measured: as a quantized one, against them."
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """One mode's run over a task: seconds in all, seconds in the language model, its responses."""

    seconds: float
    inside: float
    responses: pd.DataFrame


def _row(name: str, mode: str, timed: list[Timed], hflm: list[Timed]) -> Row:
    """Return the row of a mode on one task or on all, compared with HFLM's seconds and answers."""
    responses = pd.concat([run.responses for run in timed])
    seconds = sum(run.seconds for run in timed)
    row = {
        "task": name,
        "mode": mode,
        "documents": responses.groupby(DOCUMENT).ngroups,
        "requests": len(responses),
        "seconds": seconds,
        "scoring_seconds": sum(run.inside for run in timed),
    }
    if mode == "lm-eval":
        return row
    expected = pd.concat([run.responses for run in hflm])
    difference = (responses["log_likelihood"] - expected["log_likelihood"].to_numpy()).abs()
    return row | {
        "speed": sum(run.seconds for run in hflm) / seconds,
        "largest_difference": None if difference.isna().all() else float(difference.max()),
        "mean_difference": None if difference.isna().all() else float(difference.mean()),
        "changed_answers": int((_answers(responses) != _answers(expected)).sum()),
    }


def _timed(scorer: Any, tasks: Sequence[LoadedTask], settings: ScoringSettings) -> list[Timed]:
    """Score ``tasks`` as a cell does, on the clock: the next task is prepared and the one before
    judged while one is scored. A task's seconds end with its scores, the last's with metrics."""
    clocked = Clocked(scorer)
    synchronize(scorer.hflm.device.type)
    marks = [(time.perf_counter(), 0.0)]

    def score(task: LoadedTask, get_requests: Callable[[], Instances]) -> Callable[[], Outcomes]:
        wait = ask(clocked, task, get_requests())

        def work() -> Outcomes:
            wait()
            marks.append((time.perf_counter(), clocked.count(0)))
            return judge(task, settings)

        return work

    judged = [future for _, future in in_turn(clocked, tasks, settings, score)]
    responses = [future.result().responses for future in judged]
    marks[-1] = time.perf_counter(), clocked.count(0)
    timed = []
    for (seconds, model), given in zip(np.diff(marks, axis=0).tolist(), responses, strict=True):
        given = given[given["filter"].isna()]  # not what filters took from it
        timed.append(Timed(seconds, min(model, seconds), given))  # of two clocks
    return timed


class Clocked:
    """A language model that adds up the seconds in which it has calls to answer, which may
    overlap."""

    def __init__(self, scorer: Any) -> None:
        self.scorer, self._lock = scorer, threading.Lock()
        self._calls, self._spent, self._since = 0, 0.0, 0.0

    def count(self, change: int) -> float:
        """Change the number of calls that run now by ``change``; return the seconds so far."""
        with self._lock:
            now = time.perf_counter()
            self._spent += now - self._since if self._calls else 0.0
            self._calls, self._since = self._calls + change, now
            return self._spent

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.scorer, name)
        if name not in ("start", *ASKED):
            return attribute

        def call(*asked: Any) -> Any:
            self.count(1)
            answers = attribute(*asked)

            def wait() -> Any:
                given = answers() if name == "start" else answers
                self.count(-1)
                return given

            return wait if name == "start" else wait()

        return call


def _answers(responses: pd.DataFrame) -> pd.Series:
    """Return one answer per document: its text, else its likeliest request, else whether its only
    request is greedy."""
    likeliest_first = responses.sort_values("log_likelihood", ascending=False, kind="stable")
    by_document = likeliest_first.groupby(DOCUMENT)
    greedy = by_document["greedy"].first().astype(int)
    chosen = by_document["request"].first().where(by_document.size() > 1, greedy)
    return by_document["answer"].first().combine_first(chosen)
