"""Write the answer in a few sentences, the same in terminal, tables, viewer and Python. The primary
measure is that of ``losses``; losses in scores are secondary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qbench.comparison.losses import Losses
from qbench.comparison.rows import Comparison, Row
from qbench.metrics import kind_of
from qbench.records import ANSWERS, Record
from qbench.statistics import Missing, at_level, documents_for_margin
from qbench.text import NO_VALUE, number, ratio

if TYPE_CHECKING:
    from qbench.statistics import Effect

    AnEffect = Effect | Missing | None

MARGIN_KL = 0.05  # nats per token: a KL divergence that most uses do not notice
MARGIN_POINTS = 0.01  # a loss of accuracy that most uses do not notice
MARGIN_RATIO = math.log(1.02)  # of perplexities
MARGIN_KL_RATIO = math.log(1.1)  # of one model's KL to another's
MOST = 5  # precisions that are named in order
HOLM = "5 %, Holm’s correction"
LEVEL = 0.05
TIMES = "×"
MOSTLY_SEEDS = "§"
NO_INTERVAL = "¶"


def verdict(comparison: Comparison) -> tuple[str, ...]:
    """Return the answer, a few sentences per item; () for a comparison without statistics. Of one
    checkpoint: its precisions in order, those to avoid, the smallest that is shown to stay within
    ``margin_of`` the primary measure. Of several: how much more quantization costs each than the
    baseline. Then what the scores show."""
    if not comparison.records:
        return ("No cell has a record yet.",)
    if not comparison.tested:
        return ()
    if not comparison.quantizers:
        return (*_unquantized(comparison),)
    if comparison.unquantized is None:
        return ("There is no damage: the run has no unquantized column; add one, such as bf16.",)
    losses = comparison.primary
    if not losses.means:
        name = "KL divergence" if losses.is_kl else losses.measure
        lines = [f"{name} was not measured, so that nothing orders the precisions."]
    elif len(comparison.groups) == 1:
        (checkpoints,) = comparison.groups.values()
        lines = [" ".join(_one_model(comparison, losses, checkpoints[0]))]
    else:
        lines = [_two_models(comparison, losses, group) for group in list(comparison.groups)[1:]]
    return (*lines, *_scores(comparison))


def margin_of(losses: Losses | Row) -> float:
    """Return the loss that most uses do not notice, on the scale that is compared: ln of a KL
    divergence or of a ratio of perplexities, else a fraction."""
    if isinstance(losses, Losses) and losses.is_kl:
        return math.log(MARGIN_KL)
    return MARGIN_RATIO if kind_of(losses.aggregation) == "log ratio" else MARGIN_POINTS


# --- one model


def ordered(comparison: Comparison, checkpoint: str) -> list[str]:
    """Return a checkpoint's quantizers with a loss in the primary measure, smallest first."""
    means = comparison.primary.means if comparison.primary else {}
    names = [name for name in comparison.quantizers if f"{checkpoint}/{name}" in means]
    return sorted(names, key=lambda name: means[f"{checkpoint}/{name}"])


def nearer(comparison: Comparison, checkpoint: str, name: str, other: str) -> bool:
    """Return whether a test says that ``name`` loses less in the primary measure than ``other``."""
    pairs = comparison.primary.pairs
    if pair := pairs.get((checkpoint, name, other)):
        return pair.significant and pair.estimate < 0
    pair = pairs.get((checkpoint, other, name))
    return bool(pair) and pair.significant and pair.estimate > 0


def ties(comparison: Comparison, checkpoint: str) -> list[list[str]]:
    """Return a checkpoint's quantizers, smallest loss first, in groups: no test tells the members
    of a group from its first, or there was no test. Those without a loss are left out."""
    groups: list[list[str]] = []
    for name in ordered(comparison, checkpoint):
        if groups and not nearer(comparison, checkpoint, groups[-1][0], name):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def loss_text(losses: Losses | None, cell: str) -> str:
    """Return a cell's loss with its interval: ``0.29 [0.27, 0.31]``, ``+1.2 [−0.4, +2.8]``; the
    mean alone if it has no interval, "" if it was not measured."""
    if losses is None or cell not in losses.means:
        return ""
    answer = losses.cells[cell]
    if not losses.is_kl:
        if isinstance(answer, Missing):
            return value_text(losses, losses.means[cell])
        return " ".join(
            text(answer, percent=losses.percent) for text in (effect_text, interval_text)
        )
    size = losses.size(cell)
    text = "0" if size is None else nats(size)
    if isinstance(answer, Missing):
        return text
    return f"{text} [{nats(answer.low)}, {nats(answer.high)}]"


def _one_model(comparison: Comparison, losses: Losses, checkpoint: str) -> Iterator[str]:
    """Yield the sentences about one checkpoint: precisions in order, smallest detectable
    difference, precisions to avoid, the smallest that stays within the margin."""
    names = ordered(comparison, checkpoint)
    groups, texts = ties(comparison, checkpoint), []
    for group in groups if losses.pairs else [[name] for name in names]:
        shown = [name for name in group if name in names[:MOST]]
        kl = "KL " if losses.is_kl else ""
        texts += [" = ".join(f"{name} ({kl}{loss_text(losses, f'{checkpoint}/{name}')})"
                             for name in shown)] if shown else []  # fmt: skip
    base = comparison.unquantized_of[names[0]] or comparison.unquantized
    more = f"; {len(names) - MOST} more in the table" if len(names) > MOST else ""
    first = f"Nearest to {base}" if losses.is_kl else f"Least loss in {losses.measure} from {base}"
    yield f"{first}: {', then '.join(texts)}{more}."
    tested = [pair for (member, *_), pair in losses.pairs.items() if member == checkpoint]
    answers = [losses.cells[f"{checkpoint}/{name}"] for name in names]
    reasons = dict.fromkeys(each.reason for each in answers if isinstance(each, Missing))
    if reasons:
        yield f"Without an interval: {'; '.join(reasons)}."
    if any(" = " in text for text in texts):
        yield f"=: these documents do not tell them apart ({HOLM})."
    if sizes := [pair.detectable for pair in tested if math.isfinite(pair.detectable)]:
        yield f"{_least(losses, sizes, ' between two precisions')}."
    yield from _avoid(comparison, checkpoint, names)
    yield _smallest(comparison, losses, checkpoint, names)


def _least(losses: Losses, sizes: Sequence[float], of: str = "") -> str:
    """Return ``Smallest ratio of KL that these documents would show: × 1.05 to × 1.3``, or
    ``Smallest difference …: 2.1 points``."""
    ends = (min(sizes), max(sizes))
    if losses.kind == "log ratio":
        texts = [f"× {math.exp(size):.3g}" for size in ends]
        name, unit = ("ratio of KL" if losses.is_kl else "ratio"), ""
    else:
        texts = [value_text(losses, size).lstrip("+") for size in ends]
        name, unit = "difference", " points" if losses.percent else ""
    span = " to ".join(dict.fromkeys(texts))
    return f"Smallest {name} that these documents would show{of}: {span}{unit}"


def _avoid(comparison: Comparison, checkpoint: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the precisions that another of the same activations and KV cache beats: no larger, and
    with a significantly smaller loss."""
    better: dict[str, list[str]] = {}
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
    if better:
        beaten = "; ".join(f"{', '.join(worse)} ({other})" for other, worse in better.items())
        word = "nearer" if comparison.primary.is_kl else "better"
        yield f"Avoid, because another is {word} and no larger: {beaten}."


def _smallest(comparison: Comparison, losses: Losses, checkpoint: str, names: Sequence[str]) -> str:
    """Return the smallest precision that is shown to stay within the margin, for each format of
    activations and KV cache; corrected for the number of precisions by Bonferroni."""
    margin = margin_of(losses)
    answers = {name: losses.cells[f"{checkpoint}/{name}"] for name in names}
    answers = {name: each for name, each in answers.items() if not isinstance(each, Missing)}
    if losses.is_kl:
        limit = f"a KL of {nats(margin)}"
    else:
        limit = value_text(losses, margin).lstrip("+")
        limit = f"{limit} points" if losses.percent else limit
    within: dict[str, dict[str, float]] = {}
    bounds = at_level([*answers.values()], "upper_at", LEVEL / max(1, len(answers)))
    for name, bound in zip(answers, bounds, strict=True):
        record = comparison.records[f"{checkpoint}/{name}"]
        size = _size(record)
        if size is not None and bound <= margin:
            within.setdefault(_beside_weights(record), {})[name] = size
    if not within:
        counts = {name: documents_for_margin(each, margin, each.estimate)
                  for name, each in answers.items()}  # fmt: skip
        needed, name = min(((n, name) for name, n in counts.items() if n), default=(None, ""))
        more = f"; {needed:,} documents would show it of {name}" if needed else ""
        return f"None is shown to stay within {limit}{more}."
    best = "; ".join(
        f"{f'with {parts} ' if parts else ''}{min(sizes, key=lambda name: sizes[name])}"
        for parts, sizes in sorted(within.items())
    )
    return f"Smallest that stays within {limit} (95 % for all together): {best}."


def _beside_weights(record: Record) -> str:
    """Return ``8-bit activations and 4-bit KV cache``; "" if neither is quantized on its own. They
    save other bytes than weights do."""
    activations, kv_cache = record.precision.activations, record.precision.kv_cache
    if activations and activations.simulated is None:  # LLM.int8's belong to its weights
        activations = None
    parts = (("activations", activations), ("KV cache", kv_cache))
    return " and ".join(f"{part.bits:g}-bit {name}" for name, part in parts if part)


def _size(record: Record) -> float | None:
    """Return the GiB of all weights; for records of earlier versions bits per weight."""
    if record.audit and record.audit.size:
        return record.audit.size.gib
    return record.audit.bits_per_weight if record.audit else None


# --- several models


def _two_models(comparison: Comparison, losses: Losses, group: str) -> str:
    """Return the sentence on how much more quantization costs ``group`` than the baseline."""
    base = next(iter(comparison.groups))
    what = "KL" if losses.is_kl else f"loss in {losses.measure}"
    overall = losses.overall.get(group)
    if overall is None or overall.estimate is None:
        reason = "no precision of both has it" if overall is None else overall.reason
        return f"{group} against {base}: nothing is known of {what}: {reason}."
    answers = [each for (member, _), each in losses.contrasts.items() if member == group]
    mean = "geometric mean" if losses.kind == "log ratio" else "mean"
    many = f"{mean} over {len(answers)} precisions" if len(answers) > 1 else "of one precision"
    size = effect_text(overall, percent=losses.percent).rstrip("‡§ ¶")
    if not isinstance(overall, Missing):
        size += f" {interval_text(overall, percent=losses.percent).removeprefix('× ')}"
    if losses.kind == "log ratio":
        size = f"{what} is {size} of {base}’s"
    else:
        size = f"{what} minus {base}’s is {size}"
    if isinstance(overall, Missing):
        return f"{group}: its {size}, {many}, without an interval: {overall.reason}."
    claim = (
        f"Quantization costs {group} {'more' if overall.estimate > 0 else 'less'} than {base}"
        if overall.significant
        else f"Quantization is not shown to cost {group} more or less than {base}"
    )
    text = f"{claim}: its {size}, {many}"
    tested = [each for each in answers if not isinstance(each, Missing)]
    if len(tested) > 1:
        signs = [each.estimate > 0 for each in tested if each.significant]
        counts = f"larger for {sum(signs)} of them, smaller for {len(signs) - sum(signs)}"
        text += f"; {counts if signs else 'none of them alone is significant'} ({HOLM})"
    text += f". {_least(losses, [overall.detectable])}."
    return text if overall.significant else f"{text} {_excluded(losses, overall)}"


def _excluded(losses: Losses, answer: Effect) -> str:
    """Return which size of a non-significant effect is excluded, and how many documents would show
    that it stays within the margin."""
    bound = value_text(losses, answer.bounds[1])
    margin = MARGIN_KL_RATIO if losses.is_kl else margin_of(losses)
    text = f"At most it is {bound.lstrip('+')} (95 %)"
    needed = None if answer.seeds else documents_for_margin(answer, margin)
    if needed and needed > answer.documents:
        limit = value_text(losses, margin).lstrip("+")
        text += f"; {needed:,} documents would show at most {limit}"
    return f"{text}."


# --- scores


def _scores(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences about scores: each other model against the baseline, or the one model."""
    groups = list(comparison.groups)
    contrast = "differences" if len(groups) > 1 else "damages"
    for group in groups[1:] or groups:
        tested = [(row, each) for row, each in _effects(comparison, contrast, group) if each.family]
        if not tested:
            continue
        marked = [each for _, each in tested if each.significant]
        worse, many = sum(each.estimate > 0 for each in marked), len(tested)
        if contrast == "differences":
            text = (
                f"Scores (secondary): {group} loses more than {groups[0]} in {worse} of {many} "
                f"comparisons and less in {len(marked) - worse}"
            )
        else:
            gains = f" and {len(marked) - worse} gains" if len(marked) > worse else ""
            text = f"Scores (secondary): {worse} of {many} losses{gains} are significant"
        yield f"{text} ({HOLM}). {_power(tested)}".rstrip()


def _power(tested: Sequence[tuple[Row, Effect]]) -> str:
    """Return which losses of accuracy would have been seen, which are excluded, and how many
    documents would show that a loss stays within a point."""
    points = [each for row, each in tested if row.percent]
    sizes = [min(each.detectable, 1.0) for each in points]
    if not sizes:
        return ""
    counts = sorted({each.documents for each in points})
    documents = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    ends = dict.fromkeys(f"{100 * size:.1f}" for size in (min(sizes), max(sizes)) if size < 1)
    seen = f"only a loss of {' to '.join(ends)} accuracy points or more would be detected"
    seen += ", depending on task and precision" if len(ends) > 1 else ""
    seen += ", and none in some comparisons" if max(sizes) == 1 else ""
    seen = seen if ends else "no loss of accuracy would be detected"
    text = f"With {documents} documents per task, {seen}."
    rest = [each for each in points if not each.significant]
    bounds = at_level(rest, "upper_at", LEVEL / max(1, len(rest))).tolist()
    if not rest or max(bounds) >= 1:
        return text
    worst = rest[bounds.index(max(bounds))]
    text += (
        f" Losses that are not significant are at most {100 * max(bounds):.1f} points (95 % for "
        "all together)"
    )
    needed = None if worst.seeds else documents_for_margin(worst, MARGIN_POINTS)
    if needed and needed > worst.documents:
        text += f"; {needed:,} documents would show at most 1 point"
    return f"{text}."


def _effects(comparison: Comparison, contrast: str, group: str) -> Iterator[tuple[Row, Effect]]:
    """Yield (row, effect) of each row that has an effect of this contrast and group and is neither
    redundant nor of the model's answers; rows over seeds if there are several."""
    for row in comparison.seeds or comparison.lines:
        answer = row.effect(contrast, group)
        if answer is not None and not row.redundant and row.task != ANSWERS:
            yield row, answer


def _unquantized(comparison: Comparison) -> Iterator[str]:
    """Yield, if nothing is quantized, how each other checkpoint scores against the baseline."""
    base, *others = comparison.groups
    if not others:
        yield "Nothing is quantized, so there is no damage."
    for group in others:
        answers = list(_effects(comparison, "deltas", group))
        marked = [(row.higher_is_better, each) for row, each in answers if each.significant]
        better = sum((each.estimate > 0) == higher for higher, each in marked)
        yield (
            f"{group} is better than {base} in {better} of {len(answers)} scores and worse in "
            f"{len(marked) - better} ({HOLM})."
        )


# --- the lines above the answer


def about(comparison: Comparison) -> list[str]:
    """Return the lines at the top of every output: the models with their sources; documents and
    data; program, date and hardware. ``not recorded``: in records of earlier versions."""
    records, grid = list(comparison.records.values()), comparison.grid
    names = []
    for group, members in comparison.groups.items():
        sources = list(dict.fromkeys(grid.sources[m] for m in members if m in grid.sources))
        many = f"{len(members)} trainings" if len(members) > 1 else ""
        text = ": ".join(filter(None, (many, ", ".join(sources))))
        names.append(f"{group} ({text})" if text else group)
    missing = "" if grid.sources else "; sources not recorded"
    counts: dict[str, int] = {}
    for row in comparison.lines:
        for entry in row.entries.values():
            if entry.documents is not None:
                counts[row.task] = max(entry.documents, counts.get(row.task, 0))
    documents = ", ".join(f"{task} {count:,}" for task, count in counts.items()) or NO_VALUE
    limit = "" if grid.limit is None else f" (limit {grid.limit})"
    # Answers to a file of prompts take no data; those to a task's prompts have its name as well.
    prompts = {row.label for row in comparison.lines} == {ANSWERS}
    data = "" if prompts else f"; data: {grid.data or 'not recorded'}"
    lines = [f"{grid.name}: {', '.join(names)}{missing}", f"Documents: {documents}{limit}{data}"]
    if records:
        last = max(records, key=lambda record: record.finished)
        commit = last.environment.git_revision
        program = f"qbench {last.environment.qbench}{f' at {commit[:8]}' if commit else ''}"
        hardware = ", ".join(dict.fromkeys(record.environment.hardware for record in records))
        lines.append(f"{program}; {last.finished:%Y-%m-%d}; {hardware}")
    return lines


# --- effects as text: points and units as differences, perplexities as ratios (×)


def effect_text(effect: AnEffect, *, percent: bool) -> str:
    """Return a difference as ``+1.04‡``, in points if ``percent``, and a log ratio as ``× 1.032‡``;
    ‡ is the effect's mark. § is added if most of the uncertainty comes from the seeds, ¶ if there
    is no interval. ``—`` for None, ``— ¶`` without an estimate."""
    if effect is None or effect.estimate is None:
        return NO_VALUE if effect is None else f"{NO_VALUE} {NO_INTERVAL}"
    text = _texts(effect, effect.estimate, percent=percent)
    if not hasattr(effect, "mark"):
        return f"{text} {NO_INTERVAL}"
    return text + effect.mark + (MOSTLY_SEEDS if mostly_seeds(effect) else "")


def value_text(losses: Losses, value: float) -> str:
    """Return ``value`` as ``+1.04``, in points if ``losses.percent``, or a log ratio as ``×
    1.032``."""
    if losses.kind == "log ratio":
        return f"{TIMES} {ratio(value)}"
    return number(value, percent=losses.percent, signed=True)


def nats(logarithm: float) -> str:
    """Return exp(``logarithm``), a KL divergence, with two to three digits: ``0.29``, ``0.0041``,
    ``1.9``."""
    value = math.exp(logarithm)
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.2g}"


def interval_text(effect: AnEffect, *, percent: bool) -> str:
    """Return ``[−1.98, +1.09]``, in points if ``percent``, or ``× [0.996, 1.069]``; ``—`` without
    an interval."""
    if not hasattr(effect, "low"):
        return NO_VALUE
    return _texts(effect, effect.low, effect.high, percent=percent, form="[{}]")


def bound_text(effect: AnEffect, *, percent: bool) -> str:
    """Return the largest loss that is not excluded at 95 % (one-sided), in points if ``percent``:
    ``+1.09``, ``× 1.069``; ``—`` if there is none."""
    if not hasattr(effect, "bounds"):
        return NO_VALUE
    return _texts(effect, effect.bounds[1], percent=percent)


def each_text(effect: AnEffect, *, percent: bool) -> str:
    """Return the effect of every training, or pair of trainings: ``+0.8, +1.4, −0.2``, in points if
    ``percent``; ``× 1.032, 0.987`` for a log ratio; ``—`` if the trainings are no pairs."""
    if not getattr(effect, "paired", False):
        return NO_VALUE
    return _texts(effect, *effect.each, percent=percent)


def _texts(effect: Effect | Missing, *values: float, percent: bool, form: str = "{}") -> str:
    """Return values of an effect as text; ratios with three decimals, or with as many as show two
    digits of their logarithm's standard error, up to six."""
    if effect.kind != "log ratio":
        return form.format(", ".join(number(v, percent=percent, signed=True) for v in values))
    stderr = getattr(effect, "stderr", 0)
    decimals = 3 if stderr == 0 else min(6, max(3, 1 - math.floor(math.log10(stderr))))
    return f"{TIMES} " + form.format(", ".join(ratio(v, decimals=decimals) for v in values))


def mostly_seeds(effect: Effect) -> bool:
    """Return whether most of the effect's variance comes from the seeds."""
    return (effect.of_seeds or 0) > 0.5
