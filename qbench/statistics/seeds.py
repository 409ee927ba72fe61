"""Effects over several trainings: their mean, with the error of documents and of seeds.

Each training was scored on the same documents. So a document's contribution to a training's effect
is μ + seed + document + rest, a two-way layout without repeats. The mean's variance has a part of
the seeds, which more documents do not make smaller, and one of the documents.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from qbench.statistics.effect import (
    CONFIDENCE,
    FEW_CHANGES,
    FEWEST_KL,
    ONE_SIDED,
    TESTABLE,
    Interval,
    Missing,
    Tested,
    detectable_by_t,
    too_few_for_kl,
)
from qbench.statistics.panel import (
    KL_MEAN,
    LOG_MEAN,
    Counts,
    Floats,
    Panel,
    Studentized,
    as_scored,
    effective_documents,
    estimate_contrast,
    is_logarithm,
    score_interval,
    studentize_log_mean,
)

Signs = Mapping[object, float]
Ends = Callable[[float], tuple[float, float]]  # confidence → ends of the interval


def few_changes(panel: Panel, groups: Sequence[Sequence[Signs]], aggregation: str) -> Ends | None:
    """Return the score interval of the mean change per document, for scores of which few changed.

    A document that was not drawn may have changed in every training, so each document counts with
    its mean over the trainings. None if scores are not between 0 and 1, or if ``FEW_CHANGES``
    documents or more differ from the most common change.
    """
    columns = [panel.index[name] for group in groups for signs in group for name in signs]
    values, weights = panel.values[:, columns], panel.weights[:, columns]
    if aggregation != "mean" or np.any(weights != 1) or values.min() < 0 or values.max() > 1:
        return None
    steps = [np.stack([_step(panel, signs) for signs in group], axis=1) for group in groups]
    every = np.concatenate(steps, axis=1)  # [documents, trainings]
    most = np.sort(every, axis=0)[len(every) // 2]
    if min((every != like).any(axis=1).sum() for like in (0, most)) >= FEW_CHANGES:
        return None
    signs = {sign for group in groups for signs_of in group for sign in signs_of.values()}
    means = np.round(sum(step.mean(axis=1) for step in steps), 12)
    reach = max(1.0, float(np.abs(every).max())) * len(groups)
    observed = Counts.of(
        means, lowest=0.0 if signs == {1} else -reach, highest=0.0 if signs == {-1} else reach
    )
    return lambda confidence: score_interval(observed, confidence)


def _step(panel: Panel, signs: Signs) -> Floats:
    """Return what each document contributes to a training's contrast: −2 … 2."""
    columns = [panel.index[name] for name in signs]
    return panel.values[:, columns] @ np.array(list(signs.values()), dtype=float)


LEAST_P = 1e-12
LEAST_CONFIDENCE = 1e-4  # p above one less this is 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedEffect(Tested):
    """Hold the mean of one contrast over trainings, with its 95 % interval over documents and
    seeds.

    ``each``: the contrast of every training, by group where they are not pairs. ``of_seeds``: the
    share of the mean's variance that comes from the seeds, from 0 to 1.
    """

    each: tuple[float, ...]
    paired: bool = True  # whether ``each`` holds contrasts of the estimate's own kind
    of_seeds: float
    seeds: int  # trainings of the smallest group


def over_seeds(
    panel: Panel, groups: Sequence[Sequence[Signs]], aggregation: str
) -> SeedEffect | Missing:
    """Return the effect Σ over ``groups`` of the mean of a group's contrasts.

    Contrasts of trainings that are pairs (same seed, data and order) stand in one group; of two
    normalizers with unequal numbers of trainings each is a group of its own.

    The interval is Banerjee's (1960, Sankhyā 22, 359–364): the mean's distance from the truth is at
    most √(Σ t²ₖ sₖ²). Each part of the variance sₖ² has Student's t of its own degrees of freedom:
    the trainings of a group less one, and the documents less one. It covers 95 % or more whatever
    the sizes of the parts are, as Satterthwaite's does not with two or three seeds (87 and 92 %).
    What document and seed share counts to the seeds, so that the interval is wide with two.

    That holds if documents' and seeds' effects are roughly normal. If some trainings are much worse
    than others, it covers 87 to 90 % with three seeds; no interval from three values can
    correct that. Unlike that of ``effect`` it is not corrected for perplexities whose damage
    depends on a document's length.

    Of KL divergences, which have heavy tails, the documents' part is the bootstrap-t of the mean
    over trainings: in simulations from real documents (20 to 1,000, 2 to 5 trainings) the interval
    covers 94 to 100 %; with Student's t it covered as little as 86 %.

    It is never narrower than that of the documents alone, which two or three trainings that happen
    to agree would make it; of right-or-wrong answers of which few changed, the score interval.

    The detectable size uses the number of trainings of the smaller group. With three trainings and
    72 comparisons a mean must be almost 38 standard errors from 0 to be marked.
    """
    if aggregation not in TESTABLE:
        return Missing(reason=f"no test over seeds is known for {aggregation}")
    if panel.documents < 2:
        return Missing(reason="fewer than two documents are shared")
    if aggregation in (LOG_MEAN, KL_MEAN) and panel.documents < FEWEST_KL:
        return Missing(reason=too_few_for_kl(panel.documents))
    if any(len(group) < 2 for group in groups):
        return Missing(reason="a group has one training")
    kl, aggregation = aggregation == KL_MEAN, LOG_MEAN if aggregation == KL_MEAN else aggregation
    contrasts = [_contrasts(panel, group, aggregation) for group in groups]
    if any(each is None for each in contrasts):
        return Missing(reason="a score is not finite")
    estimates = [each[0] for each in contrasts]  # [seeds] of each group
    terms = [each[1] for each in contrasts]  # [seeds, documents] of each group
    columns = [panel.index[name] for group in groups for signs in group for name in signs]
    documents, many = effective_documents(panel.weights[:, columns]), panel.documents
    together = sum(each.mean(axis=0) for each in terms)  # [documents]
    # Variance that all trainings share on the same documents: the documents' less the residual.
    rest = sum(_rest(each) for each in terms)
    of_documents = (many - 1) / many * float(np.sum(together**2))
    by_seeds = [float(np.var(each, ddof=1)) / len(each) for each in estimates]
    parts = [(max(0.0, of_documents - rest), documents - 1)]
    parts += [(v, len(e) - 1) for v, e in zip(by_seeds, estimates, strict=True)]
    estimate = float(sum(each.mean() for each in estimates))
    variance = max(of_documents, sum(part for part, _ in parts))
    few = few_changes(panel, groups, aggregation)
    heavy = _of_log_means(panel, groups, kl) if aggregation == LOG_MEAN else None

    def ends(confidence: float) -> tuple[float, float]:
        if heavy is not None:
            of_seeds = _reach(parts[1:], confidence)
            below, above = (abs(end - estimate) for end in heavy.interval(confidence))
            return estimate - math.hypot(below, of_seeds), estimate + math.hypot(above, of_seeds)
        alone = _reach([(of_documents, documents - 1)], confidence)
        reach = max(_reach(parts, confidence), 0.0 if few else alone)
        low, high = few(confidence) if few else (estimate, estimate)
        return min(low, estimate - reach), max(high, estimate + reach)

    low, high = ends(CONFIDENCE)
    seeds_alone = max(0.0, sum(by_seeds) - rest)
    return SeedEffect(
        kind="log ratio" if is_logarithm(aggregation) else "difference",
        interval=Interval(estimate=estimate, low=low, high=high, stderr=math.sqrt(variance)),
        bounds=ends(ONE_SIDED),
        upper_at=lambda level: ends(1 - 2 * level)[1],
        p=_p(estimate, ends),
        size_at=lambda level: math.sqrt(
            sum(detectable_by_t(math.sqrt(part), free, level) ** 2 for part, free in parts)
        ),
        paired=len(groups) == 1,
        each=tuple(float(value) for each in estimates for value in each),
        of_seeds=seeds_alone / variance if variance > 0 else 0.0,
        seeds=min(len(each) for each in estimates),
        documents=many,
    )


def _of_log_means(panel: Panel, groups: Sequence[Sequence[Signs]], kl: bool) -> Studentized | None:
    """Return the bootstrap-t over documents of the mean over trainings, of KL divergences."""
    signs: dict[object, float] = defaultdict(float)
    for group in groups:
        for training in group:
            for name, sign in training.items():
                signs[name] += sign / len(group)
    columns = [panel.index[name] for name in signs]
    return studentize_log_mean(panel.values[:, columns], np.array(list(signs.values())), kl=kl)


def mean_score(panel: Panel, names: Sequence[object], aggregation: str) -> float:
    """Return the mean over trainings of what lm-eval makes of each one's outcomes."""
    columns = [panel.index[name] for name in names]
    ratios = panel.values[:, columns].sum(axis=0) / panel.weights[:, columns].sum(axis=0)
    return float(np.mean(as_scored(ratios, aggregation)))


def _contrasts(
    panel: Panel, group: Sequence[Signs], aggregation: str
) -> tuple[Floats, Floats] | None:
    """Return the estimates [seeds] and the shares of their errors [seeds, documents]; None if a
    score is not finite."""
    estimates, terms = [], []
    for signs in group:
        columns = [panel.index[name] for name in signs]
        values, weights = panel.values[:, columns], panel.weights[:, columns]
        sign = np.array(list(signs.values()), dtype=float)
        if not (np.isfinite(values).all() and np.all(weights < weights.sum(axis=0))):
            return None
        estimate, _, shares = estimate_contrast(values, weights, sign, aggregation)
        estimates.append(estimate)
        terms.append(shares)
    if not np.isfinite(estimates).all():
        return None
    return np.array(estimates), np.array(terms)


def _rest(terms: Floats) -> float:
    """Return the part of the mean's variance that is neither the seed's nor the document's."""
    seeds, documents = terms.shape
    residual = terms - terms.mean(axis=0)
    residual = residual - residual.mean(axis=1, keepdims=True)
    return float(np.sum(residual**2)) * documents / ((documents - 1) * (seeds - 1) * seeds)


def _reach(parts: Sequence[tuple[float, float]], confidence: float) -> float:
    """Return half the interval's width; ``parts``: variance and degrees of freedom."""
    return math.sqrt(
        sum(part * float(special.stdtrit(free, (1 + confidence) / 2)) ** 2 for part, free in parts)
    )


def _p(estimate: float, ends: Ends) -> float:
    """Return one minus the confidence of the interval that just reaches 0."""
    if estimate == 0:
        return 1.0

    def reaches(logarithm: float) -> float:
        low, high = ends(1 - math.exp(logarithm))
        return -low if estimate > 0 else high

    least, most = math.log(LEAST_P), math.log1p(-LEAST_CONFIDENCE)
    if reaches(least) <= 0:
        return 0.0 if ends(1 - LEAST_P) == (estimate, estimate) else LEAST_P
    if reaches(most) >= 0:
        return 1.0
    return math.exp(optimize.brentq(reaches, least, most, xtol=1e-9))
