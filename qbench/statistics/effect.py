"""Effects with an interval, a test and the size that would be seen; correction for many tests.

An effect is a signed sum of scores on the same documents: Δ and damage have two terms, a
difference-in-differences four. Interval and p come from one method, so that p < 5 % exactly if the
95 % interval leaves 0 out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from qbench.metrics import LOG_SCALE, kind_of
from qbench.statistics.intervals import (
    CONFIDENCE,
    ENOUGH_TO_DRAW,
    MOST_DOCUMENTS,
    POWER,
    BootstrapT,
    Method,
    ScoreTest,
    StudentT,
    bootstrap_log_means,
    bootstrap_ratios,
)
from qbench.statistics.panel import (
    INFLUENCE,
    KL_MEAN,
    LOG_MEAN,
    Column,
    Contrasts,
    Floats,
    Panel,
    Scores,
    Signs,
    as_scored,
    effective_documents,
)

LEVEL = 0.05
# Standard errors from an estimate to its one-sided bound, and that which power adds to it
ONE_SIDE, WITH_POWER = special.ndtri([CONFIDENCE, POWER]).cumsum().tolist()
# A difference within so many standard errors of drawing answers is not called one, so that at most
# 2 % of runs of one model against itself have a mark (tests/comparison/test_sham_answers.py).
DRAWN_ERRORS = 3.0
# If fewer documents changed than this, Student's t is too short for values without known ends.
FEW_CHANGES = 20
FEWEST_KL = 20  # documents: with ten the interval of a mean with heavy tails spans magnitudes
# Log-likelihoods count as different from a thousandth of a nat on, as baseline files keep them.
RESOLUTION = 0.001
# Documents of contrasts that are computed together, in a processor's cache; but at most so many
# contrasts, of each of which the bootstrap keeps 10,000 rounds.
TOGETHER, MOST_CONTRASTS = 600_000, 150

Kind = Literal["difference", "log ratio"]
Test = Literal["score test", "paired t", "bootstrap-t"]
TESTS: dict[type[Method], Test] = {
    ScoreTest: "score test", StudentT: "paired t", BootstrapT: "bootstrap-t",
}  # fmt: skip
TESTABLE = (*INFLUENCE, LOG_MEAN, KL_MEAN)  # aggregations whose scores ``effects`` compares


@dataclass(kw_only=True, slots=True)
class Effect:
    """Hold a contrast of scores with its 95 % interval, ``low`` to ``high``, and its standard error
    by the delta method, on the one scale on which it is tested.

    ``kind`` says what the numbers are: a ``difference`` in the units of the score, or, for
    perplexities and KL divergences, a ``log ratio``: the same contrast of their logarithms.
    ``drawn`` is the standard error that comes from drawing answers, which the interval includes.
    ``bounds`` are the one-sided 95 % bounds. ``method`` has the contrast at ``place``.

    ``adjust`` sets the following. ``family``: the number of tests that are corrected together.
    ``detectable``: the size that is detected with 80 % power at the level of the mark, beside the
    family's other tests. ``significant``: it differs from 0 at 5 % after Holm's correction over the
    family, by ``p_holm``, and by more than drawing other answers explains.

    Over several trainings it is the mean of their contrasts, ``each``, by group where they are not
    pairs; ``of_seeds`` is the share of the mean's variance that comes from the seeds, from 0 to
    1."""

    kind: Kind
    estimate: float
    low: float
    high: float
    stderr: float
    bounds: tuple[float, float]
    p: float
    documents: int
    test: Test | None = None  # None over several trainings
    drawn: float = 0.0
    p_holm: float | None = None
    family: int = 0
    detectable: float | None = None
    significant: bool = False
    each: tuple[float, ...] = ()
    paired: bool = False  # whether ``each`` holds contrasts of the estimate's own kind
    of_seeds: float | None = None
    seeds: int = 0  # trainings of the smallest group; 0: of one training
    method: Method = field(repr=False, compare=False)
    place: int = field(default=0, repr=False, compare=False)

    @property
    def mark(self) -> str:
        """Return ‡ if the effect is significant, else ""."""
        return "‡" if self.significant else ""

    def score_interval(self) -> tuple[float, float, float]:
        """Return the ends of the interval and the standard error of a score in its units. Those of
        a perplexity or KL divergence are converted from its logarithm; the ends may be infinite."""
        if self.kind == "difference":
            return self.low, self.high, self.stderr
        with np.errstate(over="ignore"):  # an end beyond the largest double is infinite
            middle, low, high = np.exp([self.estimate, self.low, self.high]).tolist()
        return low, high, middle * self.stderr


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Say why there is no interval; ``estimate`` is the effect, if that at least is known."""

    reason: str
    estimate: float | None = None
    kind: Kind = "difference"


Answer = Effect | Missing


def untestable(aggregation: str) -> Missing:
    """Return the answer for scores with an ``aggregation`` that is not in TESTABLE."""
    return Missing(reason=f"no test is known for scores that are aggregated as {aggregation}")


def effects(
    columns: Mapping[object, Column], contrasts: Sequence[Signs], aggregation: str
) -> list[Answer]:
    """Return an effect, or why there is none, per contrast: Σ sign · score over the ``columns``
    that it names, on the documents that all of these have. ``aggregation``: one of TESTABLE; for
    any other each answer is ``Missing``.

    - Values between 0 and 1 (or 0 and 100) with equal weights, such as right-or-wrong answers and
      shares of credit: the score test.
    - Perplexities and KL divergences, on their logarithm: the bootstrap-t; Student's t for more
      than a thousand documents of one weight.
    - All else: Student's t on the documents' contributions.

    The last, and lengths of answers, need ``FEW_CHANGES`` documents that changed. All need two
    documents, KL divergences and lengths ``FEWEST_KL``."""
    arrays: list[NDArray] = []  # of documents, each that differs once
    index: dict[object, int] = {}
    for name in dict.fromkeys(name for signs in contrasts for name in signs):
        mine = columns[name].documents
        same = (i for i, each in enumerate(arrays) if each is mine or np.array_equal(each, mine))
        index[name] = next(same, len(arrays))
        arrays += [mine] * (index[name] == len(arrays))
    together: dict[frozenset[int], list[int]] = defaultdict(list)
    for place, signs in enumerate(contrasts):
        together[frozenset(index[name] for name in signs)].append(place)
    answers: dict[int, Answer] = {}
    for places in together.values():
        names = dict.fromkeys(name for place in places for name in contrasts[place])
        panel = Panel.of({name: columns[name] for name in names})
        some = [contrasts[place] for place in places]
        answers |= zip(places, _effects(panel, some, aggregation), strict=True)
    return [answers[place] for place in range(len(contrasts))]


def effect(panel: Panel, signs: Signs, aggregation: str) -> Answer:
    """Return the effect of the contrast ``signs`` of the panel's columns, or why there is none."""
    return _effects(panel, [signs], aggregation)[0]


def _effects(panel: Panel, contrasts: Sequence[Signs], aggregation: str) -> list[Answer]:
    """Return the answers to ``contrasts``, many at a time, as ``effects``."""
    if aggregation not in TESTABLE:
        return [untestable(aggregation)] * len(contrasts)
    if panel.documents < 2:
        return [Missing(reason="fewer than two documents are shared")] * len(contrasts)
    kl, aggregation = aggregation == KL_MEAN, LOG_MEAN if aggregation == KL_MEAN else aggregation
    weight = panel.weights.sum(axis=0)
    ratio = panel.values.sum(axis=0) / weight
    finite = np.isfinite(panel.values).all(axis=0) & np.isfinite(as_scored(ratio, aggregation))
    conditions = [  # of PROBLEMS, per column
        ~np.all(panel.weights < weight, axis=0),
        ~finite,
        (aggregation == LOG_MEAN) & ~(ratio > 0),
    ]
    problems = np.select(conditions, range(len(PROBLEMS)), len(PROBLEMS))
    signs = panel.signs(contrasts)
    problem = np.where(signs != 0, problems, len(PROBLEMS)).min(axis=1)
    answers: dict[int, Answer] = {
        place: Missing(reason=PROBLEMS[each])
        for place, each in enumerate(problem.tolist()) if each < len(PROBLEMS)
    }  # fmt: skip
    kept, places = problems == len(PROBLEMS), np.flatnonzero(problem == len(PROBLEMS))
    if len(places):
        if not kept.all():
            panel = Panel(values=panel.values[:, kept], weights=panel.weights[:, kept])
        block = _Block(panel, aggregation, kl)
        step = min(MOST_CONTRASTS, max(1, TOGETHER // panel.documents))
        for start in range(0, len(places), step):
            part = places[start : start + step]
            made = block.answers(signs[part][:, kept])
            answers |= zip(part.tolist(), made, strict=True)
    return [answers[place] for place in range(len(contrasts))]


# Why a column has no effect. A document with all the weight leaves nothing to compare it with.
PROBLEMS = ("one document has all the weight", "a score is not finite", "a KL divergence is 0")


class _Block:
    """Computes contrasts of columns on the same documents."""

    def __init__(self, panel: Panel, aggregation: str, kl: bool) -> None:
        self.aggregation, self.kl, self.documents = aggregation, kl, panel.documents
        self.kind = kind_of(aggregation)
        self.scores, self.weights = Scores(panel, aggregation), panel.weights.T
        values = self.scores.values
        self.most, self.freedom = values.max(axis=1), effective_documents(self.weights) - 1
        bounded = (values.min(axis=1) >= 0) & (self.most <= 100) & (aggregation == "mean")
        self.bounded = bounded & np.all(self.weights == 1, axis=1)
        self.lengths = np.unique(self.weights, axis=0) if aggregation in LOG_SCALE else ()

    def answers(self, signs: Floats) -> list[Answer]:
        """Return an effect, or why there is none, per row of ``signs`` [contrasts, columns]."""
        made, used, documents = self.scores.contrasts(signs), signs != 0, self.documents
        bounded = np.all(self.bounded | ~used, axis=1)
        changed = np.full(len(signs), documents)
        for place in np.flatnonzero(~bounded & (np.count_nonzero(used, axis=1) != 1)):
            changed[place] = np.count_nonzero(made.steps[place])  # faster than by axis
        missing = np.zeros(len(signs), bool)
        if self.aggregation == LOG_MEAN:  # few lengths of answers may change; KL always does
            missing = ((changed > 0) & (changed < FEW_CHANGES)) | (documents < FEWEST_KL)
        elif self.kind == "difference":
            missing = (changed < min(FEW_CHANGES, documents)) & ~bounded
        answers: dict[int, Answer] = {}
        for place in np.flatnonzero(missing).tolist():
            reason = f"{changed[place]} of {documents} documents changed: too few for an interval"
            if self.aggregation == LOG_MEAN and documents < FEWEST_KL:
                reason = too_few_for_kl(documents)
            estimate = float(made.estimate[place])
            answers[place] = Missing(reason=reason, estimate=estimate, kind=self.kind)
        if len(places := np.flatnonzero(bounded)):
            answers |= self._effects(places, self._score_test(made[places]))
        drawn = ~missing & ~bounded & (made.stderr > 0) & (documents >= ENOUGH_TO_DRAW)
        if self.aggregation == LOG_MEAN and drawn.any():
            places = np.flatnonzero(drawn)
            valid, method = bootstrap_log_means(made[places], self.scores, kl=self.kl)
            answers |= self._effects(places[valid], method)
        for weights in self.lengths:
            alike = np.all(self.weights == weights, axis=1) | ~used
            places = np.flatnonzero(drawn & np.all(alike, axis=1))
            if len(places) and (documents <= MOST_DOCUMENTS or np.ptp(weights)):
                valid, method = bootstrap_ratios(made[places], weights)
                answers |= self._effects(places[valid], method)
        rest = np.flatnonzero(~bounded)
        places = np.array([place for place in rest.tolist() if place not in answers], int)
        if len(places):
            answers |= self._effects(places, self._student_t(made[places], used[places]))
        return [answers[place] for place in range(len(signs))]

    def _score_test(self, made: Contrasts) -> ScoreTest:
        """Return the score test of contrasts of scores in a known range. A difference of
        differences changes by at most one answer per document, unless more was seen."""
        most = np.where(made.signs != 0, self.most, 0).max(axis=1)
        least = np.where(most <= 1, 1.0, 100.0)
        reach = np.maximum.reduce([least, made.steps.max(axis=1), -made.steps.min(axis=1)])
        return ScoreTest.of(
            made.steps, estimate=made.estimate, stderr=made.stderr,
            lowest=-reach * np.any(made.signs < 0, axis=1),
            highest=reach * np.any(made.signs > 0, axis=1),
        )  # fmt: skip

    def _student_t(self, made: Contrasts, used: NDArray) -> StudentT:
        """Return Student's t over the columns ``used`` in each contrast."""
        freedom = np.where(used, self.freedom, np.inf).min(axis=1)
        grain = made.stderr
        if self.aggregation in LOG_SCALE:
            weight = np.where(used, self.scores.weights, np.inf).min(axis=1)
            grain = np.maximum(grain, RESOLUTION * math.sqrt(self.documents) / weight)
        return StudentT(estimate=made.estimate, stderr=made.stderr, freedom=freedom, grain=grain)

    def _effects(self, places: NDArray, method: Method) -> Iterator[tuple[int, Effect]]:
        """Yield (index of the contrast, effect) for ``places``, the contrasts of ``method``."""
        ends, bounds = (method.interval(1 - sides * LEVEL) for sides in (1, method.sides))
        numbers = (places, method.estimate, *ends, method.stderr, *bounds, method.p())
        rows = zip(*(each.tolist() for each in numbers), strict=True)
        for index, (place, estimate, low, high, stderr, least, most, p) in enumerate(rows):
            yield place, Effect(
                kind=self.kind, estimate=estimate, low=low, high=high, stderr=stderr,
                bounds=(least, most), p=p, documents=self.documents, test=TESTS[type(method)],
                method=method, place=index,
            )  # fmt: skip


def too_few_for_kl(documents: int) -> str:
    """Return why there is no interval of a KL divergence over so few documents."""
    return f"{documents} documents: fewer than {FEWEST_KL} say too little of a KL mean"


def at_level(effects: Sequence[Effect], function: str, level: float | Floats) -> Floats:
    """Return ``effect.method.<function>`` (``upper_at`` or ``size_at``) of each effect at a level
    of significance, or one level each; effects of one method are computed together."""
    levels, numbers = np.broadcast_to(level, len(effects)), np.zeros(len(effects))
    together: dict[int, list[int]] = defaultdict(list)
    for index, each in enumerate(effects):
        together[id(each.method)].append(index)
    for members in together.values():
        places = np.array([effects[index].place for index in members])
        method = effects[members[0]].method[places]
        numbers[members] = getattr(method, function)(levels[members])
    return numbers


def adjust(answers: Iterable[Answer]) -> list[Effect]:
    """Set ``p_holm`` of the effects among ``answers``, p adjusted by Holm over all of them, whether
    they are ``significant``, and their ``detectable`` sizes at the level that Holm's method leaves
    to a test beside the significant ones; return the effects."""
    effects = [each for each in answers if isinstance(each, Effect)]
    if not effects:
        return []
    adjusted = holm([each.p for each in effects])
    others = sum(adjusted < LEVEL) - (adjusted < LEVEL)
    sizes = at_level(effects, "size_at", LEVEL / (len(effects) - others))
    for each, p, size in zip(effects, adjusted.tolist(), sizes.tolist(), strict=True):
        each.p_holm, each.family, each.detectable = p, len(effects), size
        each.significant = p < LEVEL and abs(each.estimate) > DRAWN_ERRORS * each.drawn
    return effects


def holm(p: ArrayLike) -> Floats:
    """Return p-values adjusted for the number of tests (Holm 1979), in the given order."""
    p = np.asarray(p, dtype=float)
    order, adjusted = np.argsort(p), np.zeros(len(p))
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def documents_needed(gap: float, stderr: float, documents: int) -> int | None:
    """Return how many documents, at least 2, show that a loss is within a margin that is ``gap``
    away from it, with 80 % power by a one-sided bound at 95 %. With a gap of the full margin: how
    many show it of a quantizer that changes nothing. ``documents`` documents have the standard
    error ``stderr``, which shrinks as 1/√n. None for a gap of 0 or less: no number suffices."""
    if gap <= 0:
        return None
    ratio = WITH_POWER * stderr / gap
    return max(2, math.ceil(documents * ratio**2))


def drawing_error(
    scores: Iterable[Column], variances: Iterable[Column | None], aggregation: str
) -> float:
    """Return the standard error of a contrast of ``scores`` that comes from drawing answers, on the
    scale that is compared by ``aggregation``; 0 if none are drawn. ``variances``, one per score: of
    the mean over each prompt's answers; None if that score's answers are not drawn."""
    total = 0.0
    for column, variance in zip(scores, variances, strict=True):
        if variance is not None:
            scale = column.values.mean() if aggregation in (LOG_MEAN, KL_MEAN) else 1.0
            total += float(variance.values.sum()) / (len(variance.documents) * scale) ** 2
    return math.sqrt(total)


def samples_needed(gap: float, stderr: float, drawn: float) -> float | None:
    """Return by which factor, at least 1, samples per prompt must increase to show that a loss is
    within a margin that is ``gap`` away, as ``documents_needed``. ``drawn`` is the part of
    ``stderr`` that comes from drawing answers. None if no factor suffices, or if ``drawn`` is 0."""
    if gap <= 0 or not drawn:
        return None
    most = (gap / WITH_POWER) ** 2
    left = most - (stderr**2 - drawn**2)
    return max(1.0, drawn**2 / left) if left > 0 else None


def documents_for_margin(loss: Effect, margin: float, expected: float = 0.0) -> int | None:
    """Return how many documents show, with 80 % power by a one-sided bound at 95 %, that a loss
    stays within ``margin`` (on the effect's scale) if it is ``expected``: ``documents_needed`` with
    the standard error that the half-width of the bound of ``loss`` gives. None if ``expected`` is
    not below the margin: no number suffices."""
    spread = (loss.bounds[1] - loss.estimate) / ONE_SIDE
    return documents_needed(margin - expected, spread, loss.documents)
