"""Effects over several trainings: their mean, with the error of documents and of seeds.

Each training was scored on the same documents. So a document's contribution to a training's effect
is μ + seed + document + rest, a two-way layout without repeats. The mean's variance has a part of
the seeds, which more documents do not make smaller, and one of the documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import special

from qbench.metrics import kind_of
from qbench.statistics.effect import (
    FEW_CHANGES,
    FEWEST_KL,
    TESTABLE,
    Effect,
    Missing,
    too_few_for_kl,
)
from qbench.statistics.intervals import (
    CONFIDENCE,
    ONE_SIDED,
    BootstrapT,
    Method,
    ScoreTest,
    bootstrap_log_means,
    detectable_by_t,
)
from qbench.statistics.panel import (
    KL_MEAN,
    LOG_MEAN,
    Column,
    Floats,
    Panel,
    Scores,
    Signs,
    effective_documents,
)

Trainings = Sequence[Sequence[Signs]]  # groups of trainings: the signed scores of each
Ends = Callable[[float], tuple[float, float]]  # confidence → ends of the interval
LEAST_P = 1e-12
LEAST_CONFIDENCE = 1e-4  # p above one less this is 1


def over_trainings(
    columns: Mapping[object, Column], trainings: Trainings, aggregation: str
) -> Effect | Missing:
    """Return the effect, or why there is none, as ``over_seeds``, on the documents that all columns
    of the ``trainings`` have. ``columns`` may hold others."""
    names = dict.fromkeys(name for group in trainings for signs in group for name in signs)
    return over_seeds(Panel.of({name: columns[name] for name in names}), trainings, aggregation)


def over_seeds(panel: Panel, groups: Trainings, aggregation: str) -> Effect | Missing:
    """Return the effect Σ over ``groups`` of the mean of a group's contrasts, of all columns of the
    panel. ``Missing`` with one training, too few documents, or a score that is not finite.
    Contrasts of trainings that are pairs (same seed, data and order) are in one group; of two
    normalizers with unequal numbers of trainings each is a group of its own.

    The interval is Banerjee's (1960, Sankhyā 22, 359–364), never narrower than that of the
    documents alone; docs/methods.md says how often it covers the truth. What document and seed
    share counts to the seeds. It is not corrected for perplexities whose damage depends on a
    document's length; of KL divergences, which have heavy tails, the documents' part is the
    bootstrap-t of the mean over trainings; of right-or-wrong answers of which few changed, the
    score interval.

    The detectable size uses the number of trainings of the smaller group. With three trainings and
    72 comparisons a mean must be almost 38 standard errors from 0 to be marked."""
    if aggregation not in TESTABLE:
        return Missing(reason=f"no test over seeds is known for {aggregation}")
    if panel.documents < 2:
        return Missing(reason="fewer than two documents are shared")
    if aggregation in (LOG_MEAN, KL_MEAN) and panel.documents < FEWEST_KL:
        return Missing(reason=too_few_for_kl(panel.documents))
    if any(len(group) < 2 for group in groups):
        return Missing(reason="a group has one training")
    kl, aggregation = aggregation == KL_MEAN, LOG_MEAN if aggregation == KL_MEAN else aggregation
    finite = np.isfinite(panel.values).all()
    if not finite or not np.all(panel.weights < panel.weights.sum(axis=0)):
        return Missing(reason="a score is not finite")
    signs = [panel.signs(group) for group in groups]  # [seeds, columns] of each group
    scores = Scores(panel, aggregation)
    made = [scores.contrasts(each) for each in signs]
    estimates, terms = ([getattr(each, part) for each in made] for part in ("estimate", "terms"))
    if not all(np.isfinite(each).all() for each in estimates):
        return Missing(reason="a score is not finite")
    documents, many = float(effective_documents(panel.weights.T).min()), panel.documents
    together = sum(each.mean(axis=0) for each in terms)  # [documents]
    # Variance that all trainings share on the same documents: the documents' less the residual.
    rest = sum(_rest(each) for each in terms)
    of_documents = (many - 1) / many * float(np.sum(together**2))
    by_seeds = [float(np.var(each, ddof=1)) / len(each) for each in estimates]
    parts = [(max(0.0, of_documents - rest), documents - 1)]
    parts += [(v, len(e) - 1) for v, e in zip(by_seeds, estimates, strict=True)]
    estimate = float(sum(each.mean() for each in estimates))
    variance = max(of_documents, sum(part for part, _ in parts))
    few = few_changes(panel, signs) if aggregation == "mean" else None
    heavy = _of_log_means(panel, signs, kl) if aggregation == LOG_MEAN else None

    def ends(confidence: float) -> tuple[float, float]:
        if heavy is not None:
            of_seeds = _reach(parts[1:], confidence)
            below, above = (abs(float(end[0]) - estimate) for end in heavy.interval(confidence))
            return estimate - math.hypot(below, of_seeds), estimate + math.hypot(above, of_seeds)
        of_documents_only = _reach([(of_documents, documents - 1)], confidence)
        reach = max(_reach(parts, confidence), 0.0 if few else of_documents_only)
        low, high = (float(end[0]) for end in few.interval(confidence)) if few else [estimate] * 2
        return min(low, estimate - reach), max(high, estimate + reach)

    low, high = ends(CONFIDENCE)
    seeds_alone = max(0.0, sum(by_seeds) - rest)
    return Effect(
        kind=kind_of(aggregation),
        estimate=estimate,
        low=low,
        high=high,
        stderr=math.sqrt(variance),
        bounds=ends(ONE_SIDED),
        method=_SeedMethod(estimate=estimate, stderr=math.sqrt(variance), ends=ends, parts=parts),
        p=_p(estimate, ends),
        paired=len(groups) == 1,
        each=tuple(float(value) for each in estimates for value in each),
        of_seeds=seeds_alone / variance if variance > 0 else 0.0,
        seeds=min(len(each) for each in estimates),
        documents=many,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SeedMethod(Method):
    """Computes bounds and detectable sizes of one effect over seeds, for ``at_level``."""

    ends: Ends
    parts: Sequence[tuple[float, float]]  # variances with their degrees of freedom

    def __getitem__(self, places: NDArray) -> Self:
        return self

    def upper_at(self, level: Floats) -> Floats:
        return np.array([self.ends(1 - 2 * each)[1] for each in level])

    def size_at(self, level: Floats) -> Floats:
        sizes = [detectable_by_t(math.sqrt(part), free, level) ** 2 for part, free in self.parts]
        return np.sqrt(sum(sizes))


def few_changes(panel: Panel, signs: Sequence[Floats]) -> ScoreTest | None:
    """Return the score test of the mean change per document, for scores of which few changed;
    ``signs`` of each group, [trainings, columns], say which columns of ``panel`` a training adds
    (1) or subtracts (−1). None if a weight is not 1, if scores are not between 0 and 1, or if
    ``FEW_CHANGES`` documents or more differ from the most common change. A document that was not
    drawn may have changed in every training, so each document counts with its mean over the
    trainings. ``estimate`` and ``stderr`` of the test are placeholders, 0."""
    values = panel.values
    if np.any(panel.weights != 1) or values.min() < 0 or values.max() > 1:
        return None
    steps = [values @ group.T for group in signs]  # −2 … 2, [documents, trainings]
    every = np.concatenate(steps, axis=1)
    most = np.sort(every, axis=0)[len(every) // 2]
    if min((every != like).any(axis=1).sum() for like in (0, most)) >= FEW_CHANGES:
        return None
    means = np.round(sum(step.mean(axis=1) for step in steps), 12)
    reach = max(1.0, float(np.abs(every).max())) * len(signs)
    lowest, highest = (side * reach * any(np.any(side * each > 0) for each in signs)
                       for side in (-1.0, 1.0))  # fmt: skip
    return ScoreTest.of(
        means[None], estimate=np.zeros(1), stderr=np.zeros(1),
        lowest=np.array([lowest]), highest=np.array([highest]),
    )  # fmt: skip


def _of_log_means(panel: Panel, signs: Sequence[Floats], kl: bool) -> BootstrapT | None:
    """Return the bootstrap-t over documents of the mean over trainings of contrasts of ln(mean);
    None if nothing varies. ``kl``: see ``bootstrap_log_means``."""
    scores = Scores(panel, LOG_MEAN)
    made = scores.contrasts(sum(each.mean(axis=0) for each in signs)[None])
    if made.stderr[0] == 0:
        return None
    valid, method = bootstrap_log_means(made, scores, kl=kl)
    return method if len(valid) else None


def _rest(terms: Floats) -> float:
    """Return the part of the mean's variance that neither seeds nor documents explain."""
    seeds, documents = terms.shape
    residual = terms - terms.mean(axis=0)
    residual = residual - residual.mean(axis=1, keepdims=True)
    return float(np.sum(residual**2)) * documents / ((documents - 1) * (seeds - 1) * seeds)


def _reach(parts: Sequence[tuple[float, float]], confidence: float) -> float:
    """Return half the interval's width; ``parts``: (variance, degrees of freedom)."""
    return math.sqrt(
        sum(part * float(special.stdtrit(free, (1 + confidence) / 2)) ** 2 for part, free in parts)
    )


def _p(estimate: float, ends: Ends) -> float:
    """Return the p-value of 0: one minus the confidence of the interval that just reaches 0.
    ``ends(confidence)`` gives the interval."""
    if estimate == 0:
        return 1.0

    def reaches(logarithm: float) -> float:
        low, high = ends(1 - math.exp(logarithm))
        return -low if estimate > 0 else high

    from scipy import optimize  # slow to import

    least, most = math.log(LEAST_P), math.log1p(-LEAST_CONFIDENCE)
    if reaches(least) <= 0:
        return 0.0 if ends(1 - LEAST_P) == (estimate, estimate) else LEAST_P
    if reaches(most) >= 0:
        return 1.0
    return math.exp(optimize.brentq(reaches, least, most, xtol=1e-9))
