"""Table 4's row beside the damage, of each model and over several trainings of a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qbench.records import Analysis, Damage, Record
from qbench.tables.analyses import Section, Why, paper_values
from qbench.text import NO_VALUE, number

KL = (
    "KL divergence from the unquantized model, nats a token, mean over all scored tokens of all "
    "tasks"
)


def beside(why: Why) -> list[Section]:
    """Each unquantized model's outliers beside what quantization did to the same weights."""
    rows = [{"Cell": one.cell, **_text([one], why)} for one in _whole(why)]
    note = f"Table 4's row beside the damage of the same weights quantized: {KL}."
    return _section("beside", "Beside the damage", note, rows) if _labels(why) else []


def over_seeds(why: Why) -> list[Section]:
    """A row a group of trainings and unquantized quantizer; nothing without groups."""
    rows = []
    for group, members in why.replicates.items():
        own = [one for one in _whole(why) if one.checkpoint in members]
        for quantizer in dict.fromkeys(one.quantizer for one in own):
            same = [one for one in own if one.quantizer == quantizer]
            if len(same) == len(members):
                cell = f"{group}/{quantizer}, {len(same)} trainings"
                rows.append({"Cells": cell, **_text(same, why)})
    note = (
        "Means over trainings that differ in their seed; in brackets the lowest and the highest of "
        f"them. Table 4's columns are those of the next table, and the last ones {KL}."
    )
    return _section("seeds", "Over seeds: table 4 beside the damage", note, rows)


def _section(name: str, title: str, note: str, rows: Sequence[Mapping[str, str]]) -> list[Section]:
    if not rows:
        return []
    told = tuple(tuple(row.values()) for row in rows)
    return [Section(name=name, title=title, note=note, head=tuple(rows[0]), rows=told)]


def _whole(why: Why) -> list[Analysis]:
    return [one for one in why.cells if not one.precision.quantized]


def _labels(why: Why) -> list[str]:
    """Quantizers whose damage is known of one of the models."""
    return list(dict.fromkeys(label for one in _whole(why) for label in _damage(one, why)))


def _text(cells: Sequence[Analysis], why: Why) -> dict[str, str]:
    measured = [paper_values(one.measured) for one in cells if one.measured is not None]
    row = {
        name: _spread([values[name][0] for values in measured], lambda v, s=share: _number(v, s))
        for name, (_, share) in measured[0].items()
        if name != "Perplexity"
    }
    damages = [_damage(one, why) for one in cells]
    for label in _labels(why):
        row[f"KL {label}"] = _spread([found.get(label) for found in damages], "{:.4f}".format)
    return row


def _number(value: float, share: bool) -> str:
    return number(value, percent=share)


def _spread(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """One value, or ``3.84 (3.10 to 4.51)``; none where one is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return NO_VALUE
    if len(known) == 1:
        return text(known[0])
    return f"{text(sum(known) / len(known))} ({text(min(known))} to {text(max(known))})"


def _damage(one: Analysis, why: Why) -> dict[str, float]:
    """Quantizer → KL divergence."""
    found = {r.quantizer: kl(r) for r in why.records if _same_model(one, r)}
    return {label: value for label, value in found.items() if value is not None}


def _same_model(one: Analysis, record: Record) -> bool:
    def model(parts: Mapping[str, object]) -> tuple:
        return tuple(parts.get(name) for name in ("weights", "normalizer", "normalizer source"))

    return (
        record.quantized
        and isinstance(record.damage, Damage)
        and record.checkpoint == one.checkpoint
        and model(record.key_parts) == model(one.key_parts)
    )


def kl(record: Record) -> float | None:
    """Mean KL divergence over all scored tokens of all tasks, nats a token; None without."""
    assert isinstance(record.damage, Damage)
    every = [task.distributions for task in record.damage.tasks.values() if task.distributions]
    tokens = sum(one.tokens for one in every)
    return sum(one.kl.mean * one.tokens for one in every) / tokens if tokens else None
