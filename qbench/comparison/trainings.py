"""Whether checkpoints that are compared were trained alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qbench.comparison.lines import Comparison
from qbench.record import Record, Trained


def training_notes(comparison: Comparison) -> list[str]:
    """What the trainings of checkpoints that are compared do not have in common, beside their
    normalizers: a line a pair. Nothing where no training is known."""
    trained = _trained(comparison.records)
    groups = comparison.grid.replicates
    lines = []
    for one, other, seeds in _pairs(comparison, groups):
        pair = trained.get(one), trained.get(other)
        if None in pair:
            continue
        differing = differences(*pair, seeds=seeds)
        if differing:
            lines.append(
                f"{one} and {other} were trained otherwise than in the normalizer alone: "
                f"{'; '.join(differing)}."
            )
        if seeds and pair[0].normalizer != pair[1].normalizer:
            lines.append(
                f"{one} and {other} stand for seeds of one kind, and have two normalizers."
            )
    return lines


def _trained(records: Mapping[str, Record]) -> dict[str, Trained]:
    return {one.checkpoint: one.training for one in records.values() if one.training is not None}


def _pairs(
    comparison: Comparison, groups: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, str, bool]]:
    """Checkpoints that should be alike; and whether in all but the seed."""
    for members in groups.values():
        yield from ((members[0], member, True) for member in members[1:])
    if not groups:
        yield from ((comparison.baseline, other, False) for other in comparison.others)
        return
    base, *others = groups.values()
    for members in others:
        yield from ((one, other, False) for one, other in zip(base, members, strict=False))


def differences(one: Trained, other: Trained, *, seeds: bool) -> list[str]:
    """What two trainings do not have in common beside their normalizers, and their ``seeds`` where
    that is so: a few words a part."""
    found = []
    for part in dict.fromkeys([*one.in_common, *other.in_common]):
        if seeds and part == "seed":
            continue
        first, second = one.in_common.get(part), other.in_common.get(part)
        if first != second:
            found.append(f"{part} {_short(first)} and {_short(second)}")
    return found


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
