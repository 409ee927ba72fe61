"""How far fast scores lie from exact ones, on a sample of each call's documents."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from qbench.errors import EvaluationError
from qbench.evaluation.tolerance import Tolerance
from qbench.record import DifferenceFromExact


@dataclass(slots=True)
class Check:
    """Differences so far."""

    tolerance: Tolerance
    documents: int = 0
    requests: int = 0
    changed: int = 0
    largest: float = 0.0
    largest_per_token: float = 0.0
    total: float = 0.0
    total_per_token: float = 0.0

    def draw(self, documents: Sequence[Hashable], count: int, seed: int) -> list[int]:
        """Places of all requests of ``count`` documents, drawn with ``seed``, in order."""
        distinct = list(dict.fromkeys(documents))
        chosen = set(random.Random(seed).sample(distinct, min(count, len(distinct))))
        return [i for i, document in enumerate(documents) if document in chosen]

    def add(
        self,
        *,
        documents: Sequence[Hashable],
        tokens: Sequence[int],
        fast: Sequence[tuple[float, bool]],
        exact: Sequence[tuple[float, bool]],
    ) -> None:
        """One entry a request. Raises EvaluationError where they leave the tolerance."""
        differences = [abs(a - b) for (a, _), (b, _) in zip(fast, exact, strict=True)]
        per_token = [d / count for d, count in zip(differences, tokens, strict=True)]
        if not per_token:
            return
        groups: dict[Hashable, list[int]] = {}
        for i, document in enumerate(documents):
            groups.setdefault(document, []).append(i)
        changed = sum(_answer(fast, at) != _answer(exact, at) for at in groups.values())
        mean, count = sum(per_token) / len(per_token), len(groups)
        self._judge("mean", mean, f"the mean of the sample is {mean:.4g} nats a token off")
        for off in per_token:
            self._judge("largest", off, f"one request of the sample is {off:.4g} nats a token off")
        if changed > 1:
            self._judge("changed", changed / count, f"{changed} of {count} answers changed")
        self.largest = max(self.largest, *differences)
        self.largest_per_token = max(self.largest_per_token, *per_token)
        self.total += sum(differences)
        self.total_per_token += sum(per_token)
        self.requests += len(tokens)
        self.documents += count
        self.changed += changed

    def _judge(self, bound: str, value: float, what: str) -> None:
        most = getattr(self.tolerance, bound)
        # A comparison that NaN fails: a score that is not a number is not within tolerance.
        if not value <= most:
            raise EvaluationError(
                f"fast scoring differs from exact: {what}, more than "
                f"evaluation.tolerance.{bound} {most:g}; use scoring: exact or raise it"
            )

    def report(self) -> DifferenceFromExact:
        """For the record; differences in nats, of whole requests and per scored token."""
        count = max(1, self.requests)
        return DifferenceFromExact(
            documents=self.documents,
            requests=self.requests,
            largest=self.largest,
            mean=self.total / count,
            largest_per_token=self.largest_per_token,
            mean_per_token=self.total_per_token / count,
            changed_answers=self.changed,
        )


def _answer(scores: Sequence[tuple[float, bool]], places: Sequence[int]) -> int | bool:
    """The likeliest choice, or for a single request whether it is the greedy continuation."""
    if len(places) == 1:
        return scores[places[0]][1]
    return max(places, key=lambda i: scores[i][0])
