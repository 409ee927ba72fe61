"""Whether models that are compared were trained alike in all but the normalizer and the seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from qbench.comparison import explain
from qbench.comparison.rows import Comparison
from qbench.records import Record, Trained


def training_notes(comparison: Comparison) -> list[str]:
    """What the trainings of checkpoints that are compared do not have in common, beside their
    normalizers: a line a pair; that there is nothing, where all are known. Else no line."""
    known, groups = trained(comparison.records.values()), comparison.grid.replicates
    lines = unlike(known, comparison.checkpoints, groups)
    if lines or len(comparison.checkpoints) < 2 or known.keys() < {*comparison.checkpoints}:
        return lines
    names = " and ".join(comparison.groups)
    return [
        f"{names} were trained alike in all but the normalizer"
        f"{', trainings of one kind in all but the seed' if groups else ''}."
    ]


def trained(records: Iterable[Record]) -> dict[str, Trained]:
    """By checkpoint: how it was trained, where that is known."""
    return {one.checkpoint: one.training for one in records if one.training is not None}


def unlike(
    known: Mapping[str, Trained],
    checkpoints: Sequence[str],
    replicates: Mapping[str, tuple[str, ...]],
) -> list[str]:
    """The same of the checkpoints of one grid, the first of which is the baseline."""
    lines = []
    for one, other, seeds in _pairs(checkpoints, replicates):
        pair = known.get(one), known.get(other)
        if None in pair:
            continue
        differing = training_differences(*pair, seeds=seeds)
        if differing:
            lines.append(
                f"{one} and {other} were trained differently, not in the normalizer alone: "
                f"{'; '.join(differing)}."
            )
        if seeds and pair[0].normalizer != pair[1].normalizer:
            lines.append(
                f"{one} and {other} are listed as seeds of one kind, but have two normalizers."
            )
    return lines


def _pairs(
    checkpoints: Sequence[str], replicates: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, str, bool]]:
    """Checkpoints that should be alike; and whether in all but the seed."""
    for members in replicates.values():
        yield from ((members[0], member, True) for member in members[1:])
    if not replicates:
        yield from ((checkpoints[0], other, False) for other in checkpoints[1:])
        return
    base, *others = replicates.values()
    for members in others:
        yield from ((one, other, False) for one, other in zip(base, members, strict=False))


def training_differences(one: Trained, other: Trained, *, seeds: bool) -> list[str]:
    """What two trainings do not have in common beside their normalizers, and their ``seeds`` where
    that is so: a few words a part."""
    return [
        f"{part} {_short(of_one)} and {_short(of_other)}"
        for part, of_one, of_other in explain.key_differences(one.in_common, other.in_common)
        if not (seeds and part == "seed")
    ]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
