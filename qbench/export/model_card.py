"""The evaluation metadata of a model card, as the Hub reads and shows it: ``model-index``."""

from __future__ import annotations

from pathlib import Path

from qbench.comparison.metrics import is_percentage
from qbench.errors import QbenchError
from qbench.evaluation.definitions import definition_file, read_definition
from qbench.files import write_atomically
from qbench.records import Record, Score
from qbench.store import Store


def write(store: Store, folder: Path) -> list[Path]:
    """``<checkpoint>__<quantizer>.md`` below ``folder`` for every good cell: put its head into the
    README.md of the model's repository."""
    paths = []
    for record in store.records():
        if record.status == "ok":
            path = folder / f"{record.checkpoint}__{record.quantizer}.md"
            write_atomically(path, card(record).encode())
            paths.append(path)
    return paths


def card(record: Record) -> str:
    """YAML between lines of dashes, and a table of the same scores for people."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for score in record.scores:
        percent = is_percentage(score.metric)
        results.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=data_set(score.task),
                dataset_name=score.label,
                metric_type=score.metric.partition(" [")[0],
                metric_name=score.metric,
                metric_value=score.value * 100 if percent else score.value,
                metric_args=_about(score, percent),
            )
        )
    name = f"{record.checkpoint}/{record.quantizer}"
    head = ModelCardData(model_name=name, eval_results=results).to_yaml()
    rows = [
        f"| {score.label} | {score.metric} | {result.metric_value:.2f} | {score.documents} |"
        for score, result in zip(record.scores, results, strict=True)
    ]
    made = f"Quantized with {record.title}, {record.precision.name}" if record.quantized else name
    return (
        f"---\n{head.strip()}\n---\n\n{made}; normalizer {record.normalizer}.\n\n"
        "| Task | Metric | Value | Documents |\n| --- | --- | ---: | ---: |\n"
        + "\n".join(rows) + "\n"
    )  # fmt: skip


def data_set(task: str) -> str:
    """The Hub's id of a task's data set, where lm-eval knows the task; else the task's name."""
    try:
        path = read_definition(definition_file(task, None)).config.get("dataset_path")
    except QbenchError:
        return task
    return str(path or task)


def _about(score: Score, percent: bool) -> dict[str, object]:
    about: dict[str, object] = {"documents": score.documents}
    if score.stderr is not None:
        about["stderr"] = score.stderr * 100 if percent else score.stderr
    return about
