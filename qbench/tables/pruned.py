"""Heads that were cut out, and what that did: section 7.4 of the softpick paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qbench.records import Damage, Record
from qbench.tables.analyses import Section
from qbench.tables.beside_damage import kl
from qbench.tables.written import per_cent_text, value_text
from qbench.text import number


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """A cell of which nothing but heads was cut out: how large a share of them, and its KL
    divergence from the whole model, nats a token, mean over all scored tokens of all tasks."""

    record: Record
    share: float
    kl: float


def pruned_alone(records: Sequence[Record]) -> list[Pruned]:
    """By checkpoint in the order of ``records``, then by share."""
    found = []
    for record in records:
        only = (record.precision.weights, record.precision.activations, record.precision.kv_cache)
        heads = record.audit.heads if record.audit else None
        if heads is None or only != (None, None, None) or not isinstance(record.damage, Damage):
            continue
        divergence = kl(record)
        if divergence is not None:
            found.append(Pruned(record=record, share=heads.share, kl=divergence))
    names = list(dict.fromkeys(one.record.checkpoint for one in found))
    return sorted(found, key=lambda one: (names.index(one.record.checkpoint), one.share))


def pruned(records: Sequence[Record]) -> Iterator[Section]:
    """How much of a model can go."""
    rows = tuple(
        (
            one.record.cell,
            str(len(one.record.audit.heads.pruned)),
            number(one.share, percent=True),
            value_text(one.kl, "{:.4g}"),
            *(per_cent_text(change) for change in [_perplexity_change(one.record)]),
        )
        for one in pruned_alone(records)
        if one.record.audit is not None and one.record.audit.heads is not None
    )
    if rows:
        yield Section(
            name="pruned",
            title="Heads cut out",
            note="Heads whose output is set to zero, chosen by what they give on the calibration "
            "text, and what that does: KL divergence from the whole model, nats a token, and the "
            "change of the first perplexity that the tasks have.",
            head=("Cell", "Heads", "% of all", "KL", "Perplexity"),
            rows=rows,
        )


def pruned_rows(records: Sequence[Record]) -> list[dict[str, object]]:
    """The same in full precision, for a CSV file."""
    return [
        {
            "checkpoint": one.record.checkpoint,
            "quantizer": one.record.quantizer,
            "heads": len(one.record.audit.heads.pruned),
            "share": one.share,
            "kl": one.kl,
            "ln_perplexity_ratio": _perplexity_change(one.record),
            "key": one.record.key,
        }
        for one in pruned_alone(records)
        if one.record.audit is not None and one.record.audit.heads is not None
    ]


def _perplexity_change(record: Record) -> float | None:
    assert isinstance(record.damage, Damage)
    for task in record.damage.tasks.values():
        for ratio in task.ln_perplexity_ratio.values():
            return ratio.value
    return None
