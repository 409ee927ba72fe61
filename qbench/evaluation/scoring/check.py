"""How far fast scores lie from exact ones, on a sample of each call's documents."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from qbench.errors import EvaluationError
from qbench.evaluation.scoring.answers import Answer
from qbench.evaluation.tolerance import Tolerance, beyond
from qbench.record import DifferenceFromExact, SampleDifference


@dataclass(slots=True)
class Check:
    """Differences so far. ``by_bias``: judged by their mean with its sign."""

    tolerance: Tolerance
    by_bias: bool = False
    samples: list[SampleDifference] = field(default_factory=list)
    largest: float = 0.0
    total: float = 0.0

    def draw(self, documents: Sequence[Hashable], count: int, seed: int) -> list[int]:
        """Indexes of all requests of ``count`` documents, drawn with ``seed``, in order."""
        distinct = list(dict.fromkeys(documents))
        chosen = set(random.Random(seed).sample(distinct, min(count, len(distinct))))
        return [i for i, document in enumerate(documents) if document in chosen]

    def add(
        self,
        *,
        task: str,
        documents: Sequence[Hashable],
        tokens: Sequence[int],
        fast: Sequence[Answer],
        exact: Sequence[Answer],
    ) -> None:
        """One entry a request. Raises EvaluationError where they leave the tolerance."""
        if not tokens:
            return
        if not all(math.isfinite(score) for score, _ in (*fast, *exact)):
            raise EvaluationError(
                f"{task}: log-likelihoods of the sample are not numbers; the model gives NaN or "
                "infinite logits, which no scoring mode can mend"
            )
        differences = [abs(a - b) for (a, _), (b, _) in zip(fast, exact, strict=True)]
        per_token = [d / count for d, count in zip(differences, tokens, strict=True)]
        groups: dict[Hashable, list[int]] = {}
        for i, document in enumerate(documents):
            groups.setdefault(document, []).append(i)
        signed = [a - b for (a, _), (b, _) in zip(fast, exact, strict=True)]
        bias, stderr = _bias([d / n for d, n in zip(signed, tokens, strict=True)], groups)
        sample = SampleDifference(
            task=task,
            documents=len(groups),
            requests=len(tokens),
            mean_per_token=sum(per_token) / len(per_token),
            largest_per_token=max(per_token),
            changed_answers=sum(_answer(fast, at) != _answer(exact, at) for at in groups.values()),
            bias_per_token=bias,
            bias_stderr=stderr,
            by_bias=self.by_bias,
        )
        if reason := beyond(self.tolerance, sample):
            raise EvaluationError(f"{reason}; use scoring: exact or raise it")
        self.samples.append(sample)
        self.largest = max(self.largest, *differences)
        self.total += sum(differences)

    def report(self) -> DifferenceFromExact:
        """For the record; differences in nats, of whole requests and per scored token."""
        samples = self.samples
        requests = sum(sample.requests for sample in samples)
        count = max(1, requests)
        return DifferenceFromExact(
            documents=sum(sample.documents for sample in samples),
            requests=requests,
            largest=self.largest,
            mean=self.total / count,
            largest_per_token=max((s.largest_per_token for s in samples), default=0.0),
            mean_per_token=sum(s.mean_per_token * s.requests for s in samples) / count,
            changed_answers=sum(sample.changed_answers for sample in samples),
            samples=tuple(samples),
        )


def _bias(
    values: Sequence[float], groups: Mapping[Hashable, Sequence[int]]
) -> tuple[float, float | None]:
    """Mean over documents, whose requests go together, and its standard error."""
    means = [fmean(values[i] for i in at) for at in groups.values()]
    stderr = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return fmean(means), stderr


def _answer(scores: Sequence[Answer], indexes: Sequence[int]) -> int | bool:
    """The likeliest choice, or for a single request whether it is the greedy continuation."""
    if len(indexes) == 1:
        return scores[indexes[0]][1]
    return max(indexes, key=lambda i: scores[i][0])
