"""Compare how models were trained: alike in all but the normalizer and the seed?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from qbench.comparison import explain
from qbench.comparison.rows import Comparison
from qbench.records import Record, Trained


def training_notes(comparison: Comparison) -> list[str]:
    """Return a note per pair of checkpoints that were trained differently in more than the
    normalizer, or one note that all were trained alike; nothing if that is not known."""
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
    """Return checkpoint → how it was trained, of those that say so."""
    return {one.checkpoint: one.training for one in records if one.training is not None}


def unlike(
    known: Mapping[str, Trained],
    checkpoints: Sequence[str],
    replicates: Mapping[str, tuple[str, ...]],
) -> list[str]:
    """Return a note per pair of checkpoints that were trained differently; the first of
    ``checkpoints`` is the baseline."""
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
    """Yield (checkpoint, another, whether they differ in the seed alone) of those that should be
    alike."""
    for members in replicates.values():
        yield from ((members[0], member, True) for member in members[1:])
    if not replicates:
        yield from ((checkpoints[0], other, False) for other in checkpoints[1:])
        return
    base, *others = replicates.values()
    for members in others:
        yield from ((one, other, False) for one, other in zip(base, members, strict=False))


def training_differences(one: Trained, other: Trained, *, seeds: bool) -> list[str]:
    """Return what two trainings do not have in common beside their normalizers, a few words per
    part; with ``seeds`` the seed may differ too."""
    return [
        f"{part} {_short(of_one)} and {_short(of_other)}"
        for part, of_one, of_other in explain.key_differences(one.in_common, other.in_common)
        if not (seeds and part == "seed")
    ]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
