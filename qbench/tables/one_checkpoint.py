"""The table of one checkpoint alone: what each quantizer costs it, in one row."""

from __future__ import annotations

from qbench.comparison.lines import Comparison, Line
from qbench.comparison.wording import effect_text, interval_text
from qbench.records import Damage, Record, TaskDamage
from qbench.text import NO_VALUE, significant

KL_NOTE = (
    "KL: mean divergence of the quantized from the unquantized model's next-token distributions, "
    "in nats a token of the task. Flips: answers from right to wrong / from wrong to right."
)


def head(unquantized: str) -> tuple[str, ...]:
    """Names of the columns after task, metric and quantization."""
    return (unquantized, "quantized", "damage", "95 % interval", "KL", "flips", "Documents")


def cells(comparison: Comparison, line: Line, whole: str, own: str) -> tuple[str, ...]:
    """One quantized row; ``whole`` and ``own`` are the scores as text, unquantized and not."""
    (checkpoint,) = comparison.checkpoints
    effect = line.damages.get(checkpoint)
    record = comparison.records.get(f"{checkpoint}/{line.quantizer}")
    return (
        whole,
        own,
        effect_text(effect, percent=line.percent),
        interval_text(effect, percent=line.percent),
        _divergence(record, line),
        _flips(record, line),
        str(effect.documents) if effect else NO_VALUE,
    )


def _of_task(record: Record | None, line: Line) -> TaskDamage | None:
    if record is None or not isinstance(record.damage, Damage):
        return None
    return record.damage.tasks.get(line.task)


def _divergence(record: Record | None, line: Line) -> str:
    found = _of_task(record, line)
    if found is None or found.distributions is None:
        return NO_VALUE
    return significant(found.distributions.kl.mean)


def _flips(record: Record | None, line: Line) -> str:
    found = _of_task(record, line)
    flips = found.flips.get(line.metric) if found else None
    return f"{flips.right_to_wrong} / {flips.wrong_to_right}" if flips else NO_VALUE
