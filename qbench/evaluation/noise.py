"""How far scores move when only the batches change: the floor under every difference.

The same model scores the same documents again in another order and in batches of another size.
Nothing else changes, so what moves is rounding (and, in LLM.int8 models, batch-mates).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qbench.evaluation.degradation import Outcomes, answers
from qbench.evaluation.evaluate import evaluate
from qbench.evaluation.scoring import language_model
from qbench.evaluation.settings import ScoringSettings
from qbench.records import CellNoise, Moved

if TYPE_CHECKING:
    from qbench.evaluation.loaded import LoadedTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """Another way of batching: sizes are multiplied by ``size``, batches ordered by ``shuffle``."""

    name: str
    size: float = 1.0
    shuffle: int | None = None


VARIATIONS = (
    Variation(name="another order", shuffle=1),
    Variation(name="half the batch", size=0.5),
    Variation(name="another order, half the batch", size=0.5, shuffle=2),
)


def measure_noise(
    model: Any,
    tokenizer: Any,
    settings: ScoringSettings,
    tasks: Sequence[LoadedTask],
    *,
    key: str,
    say: Callable[[str], None] | None = None,
) -> CellNoise:
    """Score every task of the cell ``key`` as usual and under each variation, exactly or fast.
    Raises what scoring raises."""
    usual = Variation(name="as usual")
    moved: list[Moved] = []
    by_variation: dict[str, Any] = {}
    base: dict[str, Outcomes] = {}
    for variation in (usual, *VARIATIONS):
        scorer = language_model(model, tokenizer, _varied(settings, variation))
        for task in tasks:
            if say is not None:
                say(f"{variation.name}: {task.name}")
            result = evaluate(scorer, task, scorer.settings)
            if variation is usual:
                base[task.name] = result
            else:
                moved += _moved(variation, base[task.name], result)
        by_variation[variation.name] = dataclasses.asdict(scorer.settings)
    floors: dict[str, dict[str, float]] = {}
    for entry in moved:
        metrics = floors.setdefault(entry.task, {})
        metrics[entry.metric] = max(
            metrics.get(entry.metric, 0.0), abs(entry.score - entry.base_score)
        )
    return CellNoise(key=key, moved=tuple(moved), floors=floors, settings=by_variation)


def _varied(settings: ScoringSettings, variation: Variation) -> ScoringSettings:
    sizes = {
        name: max(1, int(size * variation.size))
        for name in ("batch_size", "window_batch_size", "batch_tokens")
        if (size := getattr(settings, name)) is not None
    }
    return dataclasses.replace(settings, shuffle=variation.shuffle, **sizes)


def _moved(variation: Variation, base: Outcomes, result: Outcomes) -> list[Moved]:
    on = ["document", "request"]
    scored, before = (
        table[table["answer"].isna()] for table in (result.responses, base.responses)
    )  # of texts the score alone
    pairs = scored.merge(before, on=on, suffixes=("", "_base"))
    change = np.abs(pairs["log_likelihood"] - pairs["log_likelihood_base"]).to_numpy()
    found = []
    for score, earlier in zip(result.scores, base.scores, strict=True):
        right = answers(_of(base, score.metric), _of(result, score.metric))
        found.append(
            Moved(
                task=score.task,
                metric=score.metric,
                variation=variation.name,
                base_score=earlier.value,
                score=score.value,
                documents=score.documents,
                changed_documents=int((right[0] != right[1]).sum()) if right else None,
                largest_log_likelihood=float(change.max(initial=0.0)),
                mean_log_likelihood=float(change.mean()) if len(change) else 0.0,
            )
        )
    return found


def _of(result: Outcomes, metric: str) -> pd.DataFrame:
    rows = result.outcomes[result.outcomes["metric"] == metric]
    return rows.set_index("document").sort_index()[["value", "weight"]]
