"""Write results in lm-eval's format, as model cards, or as one archive."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd

from qbench.comparison.compare import compare
from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import about as measured
from qbench.comparison.verdict import effect_text, interval_text, verdict
from qbench.errors import QbenchError
from qbench.evaluation.tasks import definition_file, read_definition
from qbench.files import write_atomically
from qbench.metrics import is_percentage
from qbench.records import GroupScore, Record, Score
from qbench.store import ARCHIVE, Store, pack
from qbench.text import for_markdown, table

NOT_KNOWN = "N/A"  # lm-eval's word for it


def write_lm_eval(store: Store, record: Record, folder: Path) -> list[Path]:
    """Write ``<checkpoint>__<quantizer>/results_<date>.json`` and ``samples_<task>_<date>.jsonl``
    below ``folder``; return their paths. Samples lack the documents' texts. Raises DamagedError for
    damaged tables."""
    place = folder / f"{record.checkpoint}__{record.quantizer}"
    date = record.finished.strftime("%Y-%m-%dT%H-%M-%S.%f")
    files = {f"results_{date}.json": json.dumps(results(record), indent=2) + "\n"}
    outcomes, responses = store.outcomes(record), store.responses(record)
    for task in dict.fromkeys(score.task for score in record.scores):
        lines = samples(outcomes[outcomes["task"] == task], responses[responses["task"] == task])
        files[f"samples_{task}_{date}.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in lines)
    for name, text in files.items():
        write_atomically(place / name, text.encode())
    return [place / name for name in files]


def results(record: Record) -> dict[str, Any]:
    """Return the JSON that lm-eval's ``--output_path`` writes, as far as the record has it, and the
    cell's key and precision under "qbench". Configurations have only the task's names."""
    parts = record.key_parts
    scoring = dict(parts.get("scoring") or {})
    tasks, groups = _by_task(record.scores), _by_task(record.groups)
    values = {name: _values(scores) for name, scores in (tasks | groups).items()}
    return {
        "results": values,
        "groups": {group: values[group] for group in groups},
        "group_subtasks": {task: [] for task in tasks}
        | {group: list(scores[0].tasks) for group, scores in groups.items()},
        "configs": {
            task: {"task": task, "task_alias": scores[0].label} for task, scores in tasks.items()
        },
        "versions": {
            task: (_definition(task).get("metadata") or {}).get("version", NOT_KNOWN)
            for task in tasks
        },
        "n-shot": {task: (parts.get("few-shot") or {}).get(task) or 0 for task in tasks},
        "higher_is_better": {
            name: {_metric(score)[0]: score.higher_is_better for score in scores}
            for name, scores in (tasks | groups).items()
        },
        "n-samples": {
            task: {"original": scores[0].documents, "effective": scores[0].documents}
            for task, scores in tasks.items()
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
        "model_name": record.cell,
        "total_evaluation_time_seconds": str((record.finished - record.started).total_seconds()),
        "qbench": {"key": record.key, "key_parts": parts, "precision": record.precision.name},
    }


def samples(outcomes: pd.DataFrame, responses: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield one task's documents with lm-eval's keys of samples, one per document and filter:
    responses, and metrics by name, as [value, weight] if the weight is not 1. ``doc``, ``target``
    and ``arguments`` are empty: records do not keep texts."""
    given: dict[int, list[Any]] = {}
    for answer in responses.sort_values("request", kind="stable").itertuples(index=False):
        given.setdefault(answer.document, []).append(answer)
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    columns = (outcomes[name].tolist() for name in ("document", "metric", "value", "weight"))
    for document, metric, value, weight in zip(*columns, strict=True):
        metrics = lines.setdefault((_filter(metric), document), {})
        metrics[metric.partition(" [")[0]] = value if weight == 1 else [value, weight]
    for (filter_, document), metrics in lines.items():
        answers = given.get(document, [])
        generated = any(isinstance(answer.answer, str) for answer in answers)
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


def _scored(answers: list[Any]) -> dict[str, Any]:
    """Return a document's log-likelihoods as lm-eval logs them."""
    given = [[str(answer.log_likelihood), str(bool(answer.greedy))] for answer in answers]
    return {"resps": [[answer] for answer in given], "filtered_resps": given}


def _texts(answers: list[Any], filter_: str) -> dict[str, Any]:
    """Return generated answers; ``qbench_cut`` counts characters that records do not keep."""
    written = [answer for answer in answers if not isinstance(answer.filter, str)]
    taken = [answer for answer in answers if answer.filter == filter_] or written[:1]
    cut = int(sum(answer.cut for answer in written))
    return {
        "resps": [[answer.answer for answer in written]],
        "filtered_resps": [answer.answer for answer in taken],
        **({"qbench_cut": cut} if cut else {}),
    }


def _by_task(scores: Sequence[Score | GroupScore]) -> dict[str, list[Score | GroupScore]]:
    """Return the scores by task."""
    by_task: dict[str, list[Score | GroupScore]] = {}
    for score in scores:
        by_task.setdefault(score.task, []).append(score)
    return by_task


def _values(scores: list[Score | GroupScore]) -> dict[str, Any]:
    """Return a task's values by lm-eval's keys: ``metric,filter`` and ``metric_stderr,filter``."""
    row: dict[str, Any] = {"alias": scores[0].label}
    for score in scores:
        name, chosen = _metric(score)
        row[f"{name},{chosen}"] = score.value
        row[f"{name}_stderr,{chosen}"] = NOT_KNOWN if score.stderr is None else score.stderr
    return row


def _metric(score: Score | GroupScore) -> tuple[str, str]:
    """Return (metric, filter) as lm-eval names them."""
    return score.metric.partition(" [")[0], _filter(score.metric)


def _filter(metric: str) -> str:
    """Return lm-eval's filter in a metric's name, else "none"."""
    return metric.partition(" [")[2].removesuffix("]") or "none"


def card(
    record: Record,
    hub_id: str | None = None,
    comparison: Comparison | None = None,
    more: Sequence[str] = (),
) -> str:
    """Return a model card for the README.md of the model's repository: evaluation results and
    ``base_model`` (``hub_id``; None: a local folder) as YAML; with a ``comparison`` the verdict and
    the losses with their intervals; the lines ``more``; a table of the scores."""
    results, scores = [], (*record.scores, *record.groups)
    for score in scores:
        unit = 100 if is_percentage(score.metric) else 1
        details = {"documents": score.documents}
        if score.stderr is not None:
            details["stderr"] = score.stderr * unit
        results.append(
            huggingface_hub.EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                # the Hub's id, where lm-eval knows the task
                dataset_type=str(_definition(score.task).get("dataset_path") or score.task),
                dataset_name=score.label,
                metric_type=score.metric.partition(" [")[0],
                metric_name=score.metric,
                metric_value=score.value * unit,
                metric_args=details,
            )
        )
    name = f"{record.checkpoint}/{record.quantizer}"
    relation = "quantized" if hub_id and record.quantized else None
    yaml = huggingface_hub.ModelCardData(
        model_name=name, eval_results=results, base_model=hub_id, base_model_relation=relation
    ).to_yaml()
    losses = _losses(comparison, record) if comparison else {}
    rows = [
        (
            *(score.label, score.metric, f"{result.metric_value:.2f}"),
            *losses.get((score.task, score.metric), ("", "")),
            score.documents,
        )
        for score, result in zip(scores, results, strict=True)
    ]
    head = ("Task", "Metric", "Value", "Damage", "95 % interval", "Documents")
    shown = table(head, rows, align="llrrrr")
    made = f"Quantized with {record.title}, {record.precision.name}" if record.quantized else name
    about = f"{made}; normalizer {record.normalizer}."
    if hub_id is None:
        about += " base_model: not known, since the checkpoint was a local folder."
    lines = [*measured(comparison), *verdict(comparison)] if comparison else []
    lines += more
    text = "\n\n".join(for_markdown(line) for line in (about, *lines))
    return f"---\n{yaml.strip()}\n---\n\n{text}\n\n{shown}\n"


def _losses(comparison: Comparison, record: Record) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (task, metric) → the cell's loss and its interval, as text."""
    return {
        (row.task, row.metric): (
            effect_text(effect, percent=row.percent),
            interval_text(effect, percent=row.percent),
        )
        for row in comparison.lines
        if row.quantizer == record.quantizer
        and (effect := row.effects.get(("damages", record.checkpoint))) is not None
    }


def _definition(task: str) -> dict[str, Any]:
    """Return lm-eval's definition of the task; empty if it has none."""
    try:
        return read_definition(definition_file(task, None))
    except QbenchError:
        return {}


def export(store: Store, to: str, folder: Path) -> list[Path]:
    """Write every cell that did not fail below ``folder`` in the format ``to``, lm-eval or
    model-card; with "archive" the whole results folder as ``records.tar.xz``. Return the paths.
    Raises DamagedError if a record or table is damaged."""
    if to == "archive":
        for record in store.records():
            for name in record.files:
                store.payload(record, name)
        pack(store.directory, store.directory.rglob("*"), folder / ARCHIVE)
        return [folder / ARCHIVE]
    good = (record for record in store.records() if record.status == "ok")
    if to == "lm-eval":
        return [path for record in good for path in write_lm_eval(store, record, folder)]
    comparison, hub_ids = compare(store), store.manifest().hub_ids
    paths = []
    for record in good:
        paths.append(folder / f"{record.checkpoint}__{record.quantizer}.md")
        text = card(record, hub_ids.get(record.checkpoint), comparison)
        write_atomically(paths[-1], text.encode())
    return paths
