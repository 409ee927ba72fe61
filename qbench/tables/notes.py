"""Write the footnotes of tables of scores: one line per note."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten

from qbench.comparison.rows import Comparison, Row
from qbench.records import SampleDifference
from qbench.text import MINUS, metric_title


def prompt_notes(comparison: Comparison) -> list[str]:
    """Return a line on how prompts became conversations; none if they did not."""
    chats = [
        chat
        for record in comparison.records.values()
        if (chat := (record.key_parts.get("scoring") or {}).get("chat"))
    ]
    if not chats:
        return []
    said = []
    if chats[0].get("apply_chat_template"):
        turns = "turns of their own" if chats[0].get("fewshot_as_multiturn") else "one turn"
        said.append(f"by the model's chat template, few-shot examples as {turns}")
    if instruction := chats[0].get("system_instruction"):
        said.append(f"with the system instruction “{shorten(instruction, 120)}”")
    return [f"Prompts: {', '.join(said)}."]


def bos_notes(comparison: Comparison) -> list[str]:
    """Return a line on BOS before the texts that were scored; none for earlier records."""
    reports = {
        record.checkpoint: record.scoring
        for record in comparison.records.values()
        if record.scoring is not None and record.scoring.bos is not None
    }
    with_bos = [name for name, report in reports.items() if report.bos]
    if not reports:
        return []
    if not with_bos:
        return ["Texts begin without BOS."]
    names = "" if len(with_bos) == len(reports) else f" of {', '.join(with_bos)}"
    doubled = dict.fromkeys(task for report in reports.values() for task in report.doubled_bos)
    twice = f"; those of {', '.join(doubled)} with two, as in lm-eval" if doubled else ""
    return [f"Texts{names} begin with BOS{twice}."]


def chance_notes(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Return a line on the accuracies of ``rows`` that an unquantized model may have guessed."""
    tasks = {(row.task, row.metric): row for row in rows}
    found = [
        f"{tasks[task, metric].label} {metric_title(metric)} of {checkpoint}"
        for checkpoint, task, metric in sorted(comparison.at_chance)
        if (task, metric) in tasks
    ]
    if not found:
        return []
    return [
        f"At chance unquantized, so nothing can be lost and Holm's correction leaves them out: "
        f"{'; '.join(found)}."
    ]


def single_notes(lines: Sequence[Row]) -> list[str]:
    """Return a line on the tasks of ``lines`` that were scored on one document, if there are
    any."""
    alone = {line.label: None for line in lines for one in line.entries if one.documents == 1}
    if not alone:
        return []
    return [
        f"{', '.join(alone)}: one document has no error bars, so no interval, test or damage; "
        "score more."
    ]


def cache_notes(comparison: Comparison, lines: Sequence[Row]) -> list[str]:
    """Return a line per context length on quantized KV caches of ``lines``: the bytes per token
    of each."""
    found: dict[tuple[int, float], dict[str, dict[str, None]]] = {}
    for line in lines:
        for entry in line.entries:
            record = comparison.records.get(entry.cell)
            if audit := record and record.audit and record.audit.kv_cache:
                alike = found.setdefault((audit.tokens, audit.unquantized_bytes_per_token), {})
                alike.setdefault(line.quantizer, {})[f"{audit.bytes_per_token:,.0f}"] = None
    return [
        f"KV cache of {tokens:,} tokens, bytes a token with scales: unquantized {whole:,.0f}; "
        + "; ".join(f"{name} {' / '.join(sizes)}" for name, sizes in alike.items())
        + "."
        for (tokens, whole), alike in found.items()
    ]


def judged_notes(comparison: Comparison, lines: Sequence[Row]) -> list[str]:
    """Return a line if fast scores of ``lines`` were judged by their mean difference from exact
    ones."""
    entries = {entry.cell: entry for line in lines for entry in line.entries}
    samples = [sample for cell in entries for sample in _by_bias(comparison, cell)]
    if not samples:
        return []
    widest = max(sample.mean_per_token for sample in samples)
    worst = max(samples, key=lambda sample: abs(sample.bias_per_token or 0.0))
    error = f" ± {worst.bias_stderr:.2g}" if worst.bias_stderr is not None else ""
    bias = f"{worst.bias_per_token:+.2g}".replace("-", MINUS)
    return [
        "Fast scores of quantized activations or KV caches differ from exact ones by up to "
        f"{widest:.2g} nats a token; judged by their signed mean, at most {bias}{error}."
    ]


def _by_bias(comparison: Comparison, cell: str) -> list[SampleDifference]:
    record = comparison.records.get(cell)
    difference = record.scoring.difference_from_exact if record and record.scoring else None
    return [sample for sample in difference.samples if sample.by_bias] if difference else []
