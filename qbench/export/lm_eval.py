"""lm-eval's own result files, which its tools and others read: results and samples of each cell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from qbench.files import write_atomically
from qbench.records import Record, Score
from qbench.store import Store

NO_STDERR = "N/A"  # lm-eval's word for it
VALUE = ("metric", "value", "weight")


class Answer(NamedTuple):
    """A row of the responses."""

    document: int
    request: int
    log_likelihood: float
    greedy: Any
    answer: Any
    filter: Any
    cut: int


def write(store: Store, folder: Path) -> list[Path]:
    """``<checkpoint>__<quantizer>/results_<date>.json`` and ``samples_<task>_<date>.jsonl`` below
    ``folder``, for every good cell of the grid. Documents' texts are not kept, and so not there."""
    paths = []
    for record in store.records():
        if record.status != "ok":
            continue
        place = folder / f"{record.checkpoint}__{record.quantizer}"
        date = record.finished.strftime("%Y-%m-%dT%H-%M-%S.%f")
        path = place / f"results_{date}.json"
        write_atomically(path, (json.dumps(results(record), indent=2) + "\n").encode())
        paths.append(path)
        outcomes, responses = store.outcomes(record), store.responses(record)
        for task in dict.fromkeys(score.task for score in record.scores):
            lines = samples(
                outcomes[outcomes["task"] == task], responses[responses["task"] == task]
            )
            path = place / f"samples_{task}_{date}.jsonl"
            write_atomically(path, "".join(f"{json.dumps(one)}\n" for one in lines).encode())
            paths.append(path)
    return paths


def results(record: Record) -> dict[str, Any]:
    """What lm-eval's ``--output_path`` writes, of what a record knows."""
    parts = record.key_parts
    scoring = dict(parts.get("scoring") or {})
    tasks: dict[str, list[Score]] = {}
    for score in record.scores:
        tasks.setdefault(score.task, []).append(score)
    return {
        "results": {task: _values(scores) for task, scores in tasks.items()},
        "group_subtasks": {task: [] for task in tasks},
        "configs": {task: {"task": task, "task_alias": of[0].label} for task, of in tasks.items()},
        "versions": dict.fromkeys(tasks, 1.0),
        "n-shot": {task: (parts.get("few-shot") or {}).get(task) or 0 for task in tasks},
        "higher_is_better": {
            task: {_metric(score)[0]: score.higher_is_better for score in scores}
            for task, scores in tasks.items()
        },
        "n-samples": {
            task: {"original": of[0].documents, "effective": of[0].documents}
            for task, of in tasks.items()
        },
        "config": {
            "model": "qbench",
            "model_args": {"checkpoint": record.checkpoint, "quantizer": record.quantizer},
            "batch_size": scoring.get("batch_size"),
            "device": record.environment.device,
            "limit": scoring.get("limit"),
            "bootstrap_iters": 0,
            "fewshot_seed": scoring.get("fewshot_seed"),
        },
        "git_hash": record.environment.git_revision,
        "date": record.started.timestamp(),
        "transformers_version": record.environment.versions.get("transformers"),
        "lm_eval_version": record.environment.versions.get("lm-eval"),
        "task_hashes": dict(record.documents),
        "model_source": "qbench",
        "model_name": f"{record.checkpoint}/{record.quantizer}",
        "model_name_sanitized": f"{record.checkpoint}__{record.quantizer}",
        "start_time": record.started.timestamp(),
        "end_time": record.finished.timestamp(),
        "total_evaluation_time_seconds": str((record.finished - record.started).total_seconds()),
        "qbench": {"key": record.key, "key_parts": parts, "precision": record.precision.name},
    }


def samples(outcomes: pd.DataFrame, responses: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """One task's documents as lm-eval logs them: responses, and metrics by name; a line for each
    document and filter."""
    given: dict[int, list[Answer]] = {}
    for answer in _rows(responses, list(Answer._fields)):
        given.setdefault(answer[0], []).append(Answer._make(answer))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for document, metric, value, weight in _rows(outcomes, ("document", *VALUE)):
        of = found.setdefault((_filter(metric), document), {})
        of[metric.partition(" [")[0]] = value if weight == 1 else [value, weight]
    for (filter_, document), metrics in found.items():
        answers = sorted(given.get(document, []), key=lambda one: one.request)
        generated = any(isinstance(one.answer, str) for one in answers)
        yield {
            "doc_id": document,
            "doc": {},
            "target": "",
            "arguments": {},
            **(_texts(answers, filter_) if generated else _scored(answers)),
            "filter": filter_,
            "metrics": list(metrics),
            **metrics,
        }


def _rows(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(frame[name].tolist() for name in columns), strict=True)


def _scored(answers: list[Answer]) -> dict[str, Any]:
    given = [[str(one.log_likelihood), str(bool(one.greedy))] for one in answers]
    return {"resps": [[one] for one in given], "filtered_resps": given}


def _texts(answers: list[Answer], filter_: str) -> dict[str, Any]:
    """Texts are kept up to a length: ``qbench_cut`` counts what was left out of them."""
    written = [one for one in answers if not isinstance(one.filter, str)]
    taken = [one for one in answers if one.filter == filter_] or written[:1]
    found: dict[str, Any] = {
        "resps": [[one.answer for one in written]],
        "filtered_resps": [one.answer for one in taken],
    }
    cut = int(sum(one.cut for one in written))
    return found | ({"qbench_cut": cut} if cut else {})


def _values(scores: list[Score]) -> dict[str, Any]:
    found: dict[str, Any] = {"alias": scores[0].label}
    for score in scores:
        name, chosen = _metric(score)
        found[f"{name},{chosen}"] = score.value
        found[f"{name}_stderr,{chosen}"] = NO_STDERR if score.stderr is None else score.stderr
    return found


def _metric(score: Score) -> tuple[str, str]:
    """lm-eval's name of a metric and of its filter."""
    return score.metric.partition(" [")[0], _filter(score.metric)


def _filter(metric: str) -> str:
    return metric.partition(" [")[2].removesuffix("]") or "none"
