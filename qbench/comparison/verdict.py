"""Say the answer in a few sentences, the same in terminal, tables, report, viewer and Python.

The primary measure is KL divergence from the unquantized model over all tasks, documents weighted
alike; losses in scores are secondary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qbench.comparison.kl import nats
from qbench.comparison.rows import Comparison, Row, redundant
from qbench.comparison.wording import effect_text, interval_text
from qbench.records import Record
from qbench.statistics import adjust, documents_for_margin
from qbench.text import number, ratio

if TYPE_CHECKING:
    from qbench.statistics import Effect, SeedEffect

MARGIN = 0.05  # nats per token: a KL divergence that most uses do not notice


def verdict(
    comparison: Comparison, *, margin: float = MARGIN, most: int | None = None
) -> list[str]:
    """Return the answer, a sentence or two per item; ``margin`` is a KL divergence. ``most`` names
    the nearest precisions alone, as many, and counts the others.

    With one checkpoint: its precisions in order, those to avoid, the smallest within the margin.
    With several: how much farther quantization moves each from itself than the baseline. Then what
    the scores show.
    """
    if not comparison.records:
        return ["No cell has a record yet."]
    if not comparison.tested:
        return []
    if not comparison.quantizers:
        return [*_unquantized(comparison)]
    if comparison.unquantized is None:
        return ["There is no damage: the run has no unquantized column; add one, such as bf16."]
    if comparison.grid.primary is not None:
        return [*_by_primary(comparison, most), *_scores(comparison)]
    if len(comparison.groups) == 1:
        (checkpoints,) = comparison.groups.values()
        found = [_order(comparison, checkpoints[0], margin, most)]
    else:
        found = [_models(comparison, group) for group in list(comparison.groups)[1:]]
    return [*filter(None, found), *_scores(comparison)]


# --- one model


def ordered(comparison: Comparison, checkpoint: str) -> list[str]:
    """Return a checkpoint's quantizers that have a KL divergence, or a loss in the primary score,
    the nearest first."""
    if comparison.grid.primary is not None:
        losses = {row.quantizer: row.damages[checkpoint].estimate
                  for row in _primary_rows(comparison, "damages", checkpoint)}  # fmt: skip
        return sorted(losses, key=lambda name: losses[name])
    means = comparison.kl.means if comparison.kl else {}
    names = [name for name in comparison.quantizers if f"{checkpoint}/{name}" in means]
    return sorted(names, key=lambda name: means[f"{checkpoint}/{name}"])


def nearer(comparison: Comparison, checkpoint: str, one: str, other: str) -> bool:
    """Return whether ``one``'s KL divergence, or loss in the primary score, is significantly below
    ``other``'s."""
    pairs = comparison.kl.pairs if comparison.kl else {}
    pairs = pairs if comparison.grid.primary is None else comparison.primary
    if found := pairs.get((checkpoint, one, other)):
        return found.significant and found.estimate < 0
    found = pairs.get((checkpoint, other, one))
    return bool(found) and found.significant and found.estimate > 0


def ties(comparison: Comparison, checkpoint: str) -> list[list[str]]:
    """Return the quantizers in order, those that no test tells from the first of a group
    together."""
    groups: list[list[str]] = []
    for name in ordered(comparison, checkpoint):
        if groups and not nearer(comparison, checkpoint, groups[-1][0], name):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def kl_text(comparison: Comparison, cell: str) -> str:
    """Return ``0.29 [0.27, 0.31]``; the mean alone if its record holds no KL by document."""
    if comparison.kl is None or cell not in comparison.kl.means:
        return ""
    mean, found = comparison.kl.means[cell], comparison.kl.cells[cell]
    text = nats(math.log(mean)) if mean > 0 else "0"
    if not hasattr(found, "interval"):
        return text
    return f"{text} [{nats(found.interval.low)}, {nats(found.interval.high)}]"


def _order(comparison: Comparison, checkpoint: str, margin: float, most: int | None) -> str:
    names = ordered(comparison, checkpoint)
    if not names:
        return "KL divergence was not measured."
    shown = names[:most]
    texts = {name: f"{name} (KL {kl_text(comparison, f'{checkpoint}/{name}')})" for name in shown}
    more = f", and {len(names) - len(shown)} more (tables.md)" if names[len(shown) :] else ""
    if not comparison.kl.pairs and len(names) > 1:
        said = ", ".join(texts.values())
        cells = (comparison.kl.cells[f"{checkpoint}/{name}"] for name in names)
        why = "; ".join(dict.fromkeys(one.reason for one in cells if hasattr(one, "reason")))
        return (
            f"By KL divergence, the nearest first: {said}{more}. No test tells them apart: {why}."
        )
    groups = [[texts[name] for name in group if name in texts]
              for group in ties(comparison, checkpoint)]  # fmt: skip
    unquantized = comparison.unquantized_of(names[0]) or comparison.unquantized
    order = ", then ".join(" = ".join(group) for group in groups if group)
    said = f"Nearest to {unquantized}: {order}{more}."
    if any(len(group) > 1 for group in groups):
        said += " (=: not told apart, 5 %, Holm’s correction over all pairs.)"
    return " ".join(filter(None, (said, *_avoid(comparison, checkpoint, names),
                                  _smallest(comparison, checkpoint, names, margin))))  # fmt: skip


def _avoid(comparison: Comparison, checkpoint: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the precisions that another of the same activations and KV cache beats: no larger, and
    significantly nearer."""
    better, word = {}, "nearer" if comparison.grid.primary is None else "better"
    records = {name: comparison.records[f"{checkpoint}/{name}"] for name in names}
    sizes = {name: _size(record) for name, record in records.items()}
    for name in names:
        for other in names:
            if None in (sizes[name], sizes[other]) or sizes[other] > sizes[name]:
                continue
            same = _beside_weights(records[other]) == _beside_weights(records[name])
            if same and nearer(comparison, checkpoint, other, name):
                better.setdefault(other, []).append(name)
                break
    for other, beaten in better.items():
        yield f"Avoid {', '.join(beaten)}: {other} is no larger and {word}."


def _smallest(comparison: Comparison, checkpoint: str, names: Sequence[str], margin: float) -> str:
    """Return the smallest precision within the margin, for each format of activations and KV
    cache."""
    within: dict[str, dict[str, float]] = {}
    for name in names:
        found = comparison.kl.cells[f"{checkpoint}/{name}"]
        record = comparison.records[f"{checkpoint}/{name}"]
        size = _size(record)
        below = hasattr(found, "interval") and found.interval.high <= math.log(margin)
        if below and size is not None:
            within.setdefault(_beside_weights(record), {})[name] = size
    if not within:
        return f"None is shown to stay within KL {margin:g}."
    best = ", ".join(
        f"{min(sizes, key=lambda name: sizes[name])}{f' (among {bits})' if bits else ''}"
        for bits, sizes in sorted(within.items())
    )
    return f"Smallest within KL {margin:g}: {best}."


def _beside_weights(record: Record) -> str:
    """Return the bits of activations and KV cache, such as ``A8KV4``; "" if neither is quantized
    on its own. They save other bytes than weights do."""
    activations, kv_cache = record.precision.activations, record.precision.kv_cache
    if activations and activations.simulated is None:  # LLM.int8's belong to its weights
        activations = None
    parts = (("A", activations), ("KV", kv_cache))
    return "".join(f"{name}{part.bits:g}" for name, part in parts if part)


def _size(record: Record) -> float | None:
    """Return the GiB of all weights; bits per weight in records of earlier versions."""
    if record.audit and record.audit.size:
        return record.audit.size.gib
    return record.audit.bits_per_weight if record.audit else None


# --- by another primary measure than KL


def _by_primary(comparison: Comparison, most: int | None) -> Iterator[str]:
    """Yield the precisions of one model in the order of their losses in the primary score, or how
    much more each other model loses in it than the baseline."""
    name, (base, *others) = comparison.grid.primary, comparison.groups
    for group in others or [base]:
        contrast = "differences" if others else "damages"
        rows = _primary_rows(comparison, contrast, group)
        found = adjust([getattr(row, contrast)[group] for row in rows])
        texts = {
            row.quantizer: f"{row.quantizer} ({effect_text(one, percent=row.percent)} "
            f"{interval_text(one, percent=row.percent)})"
            for row, one in zip(rows, found, strict=True)
        }
        if not texts:
            yield f"{name} of {group}: no loss has an interval."
        elif others:
            said = f"What {group} loses in {name} more than {base}: {', '.join(texts.values())}."
            yield f"{said} (‡: 5 %, Holm’s correction over these.)"
        else:
            (checkpoint,) = comparison.groups[group]
            names = ordered(comparison, checkpoint)
            shown = names[:most]
            groups = [[texts[name] for name in tied if name in shown]
                      for tied in ties(comparison, checkpoint)]  # fmt: skip
            order = ", then ".join(" = ".join(tied) for tied in groups if tied)
            more = (
                f", and {len(names) - len(shown)} more (tables.md)" if names[len(shown) :] else ""
            )
            said = f"By loss in {name}, the smallest first: {order}{more}."
            if any(len(tied) > 1 for tied in groups):
                said += " (=: not told apart, 5 %, Holm’s correction over all pairs.)"
            yield " ".join((said, *_avoid(comparison, checkpoint, names)))


def _primary_rows(comparison: Comparison, contrast: str, group: str) -> list[Row]:
    """Return the rows of the primary score whose contrast has an interval for ``group``."""
    rows = comparison.seeds or comparison.lines
    return [row for row in rows if f"{row.task}/{row.metric}" == comparison.grid.primary
            and group in getattr(row, contrast)]  # fmt: skip


# --- several models


def _models(comparison: Comparison, group: str) -> str:
    base = next(iter(comparison.groups))
    overall = comparison.kl.overall.get(group) if comparison.kl else None
    if overall is None:
        if comparison.kl is None or not comparison.kl.means:
            return f"{group} against {base}: KL divergence was not measured."
        return _by_means(comparison, base, group)
    contrasts = [one for (of, _), one in comparison.kl.contrasts.items() if of == group]
    ends = f"[{ratio(overall.interval.low)}, {ratio(overall.interval.high)}]"
    sure = overall.p < 0.05
    more = "farther" if overall.estimate > 0 else "less far"
    said = (
        f"Quantization moves {group} {more} from itself than {base}"
        if sure
        else f"Quantization is not shown to move {group} farther or less far than {base}"
    )
    apart = [one.estimate > 0 for one in contrasts if one.significant]
    seen = overall.detectable
    return (
        f"{said}: KL × {ratio(overall.estimate)} {ends}, geometric mean over {len(contrasts)} "
        f"precisions; larger for {sum(apart)} of them and smaller for {len(apart) - sum(apart)} "
        f"(5 %, Holm’s correction). A ratio of × {ratio(seen)} would have been seen."
    )


def _by_means(comparison: Comparison, base: str, group: str) -> str:
    """Compare two groups by their records' mean KL alone, which has no interval."""
    means, logs = comparison.kl.means, []
    for name in comparison.quantizers:
        sides = []
        for members in (comparison.groups[group], comparison.groups[base]):
            values = [means.get(f"{member}/{name}") for member in members]
            if None in values or not all(value > 0 for value in values):
                break
            sides.append(sum(map(math.log, values)) / len(values))
        if len(sides) == 2:
            logs.append(sides[0] - sides[1])
    if not logs:
        return ""
    return (
        f"KL of {group} against {base}: × {ratio(sum(logs) / len(logs))}, geometric mean over "
        f"{len(logs)} precisions, without an interval: the records hold no KL by document."
    )


# --- scores


def _scores(comparison: Comparison) -> Iterator[str]:
    """Yield what the scores show: of each other model against the baseline, or of one model."""
    groups = list(comparison.groups)
    contrast = "differences" if len(groups) > 1 else "damages"
    for group in groups[1:] or groups:
        found = list(_effects(comparison, contrast, group))
        if not found:
            continue
        marked = [one for _, one in found if one.significant]
        worse, many = sum(one.estimate > 0 for one in marked), len(found)
        if contrast == "differences":
            said = (
                f"In scores {group} loses more than {groups[0]} in {worse} of {many} comparisons "
                f"and less in {len(marked) - worse}"
            )
        else:
            said = (
                f"In scores {worse} of {many} losses are significant"
                f"{f' and {len(marked) - worse} gains' if len(marked) > worse else ''}"
            )
        yield f"{said} (5 %, Holm’s correction). {_power(found)}".rstrip()


MARGIN_POINTS = 0.01  # a loss of accuracy that most uses do not notice


def _power(found: Sequence[tuple[Row, Effect | SeedEffect]]) -> str:
    """Say which losses of accuracy would have been seen, which are excluded, and how many
    documents would show that a loss stays within a point."""
    tested = [one for row, one in found if row.percent and one.detectable not in (None, math.inf)]
    if not tested:
        return ""
    sizes = sorted({number(one.detectable, percent=True) for one in tested}, key=float)
    span = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else sizes[0]
    said = f"Differences of {span} points, by task and precision, would have been seen."
    rest = [one for one in tested if not one.significant and hasattr(one, "bounds")]
    if not rest:
        return said
    worst = max(rest, key=lambda one: one.bounds[1])
    said += (
        f" Of those that are not significant none is worse by more than "
        f"{number(worst.bounds[1], percent=True)} points (95 % each)"
    )
    needed = documents_for_margin(worst, MARGIN_POINTS)
    if needed and needed > worst.documents:
        said += f"; {needed:,} documents would show that it stays within 1 point"
    return f"{said}."


def _effects(
    comparison: Comparison, contrast: str, group: str
) -> Iterator[tuple[Row, Effect | SeedEffect]]:
    for row in comparison.seeds or comparison.lines:
        found = getattr(row, contrast).get(group)
        if found is not None and not redundant(row, comparison.lines):
            yield row, found


def _unquantized(comparison: Comparison) -> Iterator[str]:
    """Yield how each other checkpoint scores against the baseline, if nothing is quantized."""
    base, *others = comparison.groups
    if not others:
        yield "Nothing is quantized, so there is no damage."
    for group in others:
        found = list(_effects(comparison, "deltas", group))
        marked = [(row.higher_is_better, one) for row, one in found if one.significant]
        better = sum((one.estimate > 0) == higher for higher, one in marked)
        yield (
            f"{group} is better than {base} in {better} of {len(found)} scores and worse in "
            f"{len(marked) - better} (5 %, Holm’s correction)."
        )
