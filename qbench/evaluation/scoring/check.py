"""How far fast scores lie from exact ones, on a sample of each call's documents."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from qbench.errors import EvaluationError

OUTLIER = 10  # times the tolerance: the most that a single request may differ


@dataclass(slots=True)
class Check:
    """Differences so far. ``tolerance`` bounds the mean of each call's sample, in nats per scored
    token, and ten times it the largest: bfloat16 logits of ±16 step by 0.125, so that single
    tokens differ by that much for no other reason than rounding."""

    tolerance: float
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
        self._judge("the mean of the sample is", sum(per_token) / len(per_token), 1)
        for difference in per_token:
            self._judge("one request of the sample is", difference, OUTLIER)
        self.largest = max(self.largest, *differences)
        self.largest_per_token = max(self.largest_per_token, *per_token)
        self.total += sum(differences)
        self.total_per_token += sum(per_token)
        self.requests += len(tokens)
        groups: dict[Hashable, list[int]] = {}
        for i, document in enumerate(documents):
            groups.setdefault(document, []).append(i)
        self.documents += len(groups)
        for places in groups.values():
            self.changed += _answer(fast, places) != _answer(exact, places)

    def _judge(self, what: str, difference: float, times: int) -> None:
        # A comparison that NaN fails: a score that is not a number is not within tolerance.
        if not difference <= times * self.tolerance:
            raise EvaluationError(
                f"fast scoring differs from exact: {what} {difference:.4g} nats a token off, "
                f"more than {f'{times} times ' if times > 1 else ''}evaluation.tolerance "
                f"{self.tolerance:g}; use scoring: exact or raise the tolerance"
            )

    def report(self) -> dict[str, Any]:
        """For the record; differences in nats, of whole requests and per scored token."""
        count = max(1, self.requests)
        return {
            "documents": self.documents,
            "requests": self.requests,
            "largest": self.largest,
            "mean": self.total / count,
            "largest_per_token": self.largest_per_token,
            "mean_per_token": self.total_per_token / count,
            "changed_answers": self.changed,
            "tolerance_per_token": self.tolerance,
        }


def _answer(scores: Sequence[tuple[float, bool]], places: Sequence[int]) -> int | bool:
    """The likeliest choice, or for a single request whether it is the greedy continuation."""
    if len(places) == 1:
        return scores[places[0]][1]
    return max(places, key=lambda i: scores[i][0])
