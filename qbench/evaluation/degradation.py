"""Summarize the KL divergences of the forward passes that scored.

Everything here is the quantized cell against the unquantized cell of the same checkpoint, paired by
document and token. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qbench.records import (
    DIVERGENCE_COLUMNS,
    TOKENS_KEPT,
    Distributions,
    Divergence,
    Ratio,
)

if TYPE_CHECKING:
    from qbench.records import Score


PERCENTILES = (90, 99, 99.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """The scores of one task, or of a whole cell, and the tables behind them (see
    ``qbench.records``).
    """

    outcomes: pd.DataFrame
    responses: pd.DataFrame
    scores: tuple[Score, ...]


def distributions(measured: pd.DataFrame) -> Distributions:
    """Return mean, quantiles and largest KL and the share of agreeing tokens. ``measured`` has a
    row per scored token with the columns ``kl``, ``agrees`` and ``document``. ``kl`` is Σ p ln(p/q)
    over the vocabulary in nats, p unquantized, q quantized. The mean's standard error is over
    documents."""
    kl, document = measured["kl"].to_numpy(), measured["document"].to_numpy()
    # tokens of one document are not independent
    _, indexes = np.unique(document, return_inverse=True)
    of_documents = ratio(np.bincount(indexes, kl.astype(np.float64)), np.bincount(indexes))
    p90, p99, p99_9 = (float(p) for p in np.percentile(kl, PERCENTILES))
    return Distributions(
        tokens=len(kl),
        kl=Divergence(
            mean=float(kl.mean()),
            mean_stderr=of_documents.stderr,
            median=float(np.median(kl)),
            p90=p90,
            p99=p99,
            p99_9=p99_9,
            largest=float(kl.max()),
        ),
        top1_agreement=float(measured["agrees"].to_numpy().mean()),
    )


def divergence_table(
    task: str,
    measured: pd.DataFrame,
    texts_of: Callable[[np.ndarray], list[str]] | None = None,
) -> pd.DataFrame:
    """Return a table with the columns ``DIVERGENCE_COLUMNS`` from ``measured``, a table of
    ``KLObserver``: a row per request of ``task`` with means over its tokens. With ``texts_of``,
    which gives the texts of token ids [N], the first documents have a row per token instead, up to
    ``TOKENS_KEPT`` tokens. ``kl`` and ``change`` are rounded to float16."""
    tokens = measured[["document", "request", "kl", "change"]]
    requests = tokens.groupby(["document", "request"], sort=False)
    table = requests.mean().reset_index().assign(tokens=requests.size().to_numpy(), text=None)
    if texts_of is not None:
        by_token = table["document"][table["tokens"].cumsum() <= TOKENS_KEPT]
        kept = tokens["document"].isin(by_token)
        single = tokens[kept].assign(tokens=1, text=texts_of(measured["token"][kept].to_numpy()))
        table = pd.concat([single, table[~table["document"].isin(by_token)]], ignore_index=True)
    # float16: half the bytes, without meaningless digits
    table = table.assign(task=task)[list(DIVERGENCE_COLUMNS)]
    return table.astype({"kl": "float16", "change": "float16"}).astype(
        {"kl": "float32", "change": "float32"}
    )


def ratio(values: np.ndarray, weights: np.ndarray) -> Ratio:
    """Return Σ values / Σ weights of two arrays [documents] with the standard error that tables
    give it. ``value`` is None if there are no documents, ``stderr`` is None if one document has all
    the weight."""
    count, total = len(values), float(weights.sum())
    if count == 0:
        return Ratio(value=None, stderr=None, documents=0)
    value = float(values.sum()) / total
    error = None
    if count > 1 and weights.max() < total:
        from qbench.statistics.panel import score_error  # SciPy: slow to import

        error = score_error(values.astype(float), weights.astype(float), "mean")
    return Ratio(value=value, stderr=error, documents=count)
