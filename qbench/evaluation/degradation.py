"""Compute what quantization changed from the forward passes that scored: KL divergence, answers and
perplexities.

Everything here is the quantized cell against the unquantized cell of the same checkpoint, paired by
document and token. Imports no torch.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qbench.metrics import LOG_SCALE
from qbench.records import (
    DIVERGENCE_COLUMNS,
    TOKENS_KEPT,
    AnswerAgreement,
    ConfidenceBin,
    Distributions,
    Divergence,
    Ratio,
    TaskDamage,
)
from qbench.statistics.panel import estimate_contrast

if TYPE_CHECKING:
    from qbench.records import Score


PERCENTILES = (90, 99, 99.9)
CONFIDENCE_BINS = (0, 0.25, 0.5, 0.75, 0.95, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """The scores of one task, or of a whole cell, and the tables behind them (see
    ``qbench.records``).
    """

    outcomes: pd.DataFrame
    responses: pd.DataFrame
    scores: tuple[Score, ...]


def task_damage(
    base: Outcomes,
    quantized: Outcomes,
    *,
    divergences: pd.DataFrame | None,
    correct: Mapping[int, int],
) -> TaskDamage:
    """Return what quantization changed in one task.

    ``divergences`` are those of a ``KLObserver`` that observed the quantized cell; None if no token
    was scored. ``correct`` maps documents to the request that scores the right answer (see
    ``correct_requests``). Both outcomes are of this task alone.
    """
    return TaskDamage(
        distributions=None if divergences is None else distributions(divergences),
        correct_answer=answer_change(base.responses, quantized.responses, correct)
        if correct
        else None,
        answers=answer_agreement(base.responses, quantized.responses),
        ln_perplexity_ratio={
            score.metric: perplexity_ratio(
                _of(base.outcomes, score.metric), _of(quantized.outcomes, score.metric)
            )
            for score in quantized.scores
            if score.aggregation in LOG_SCALE
        },
    )


def distributions(measured: pd.DataFrame) -> Distributions:
    """Summarize a row per scored token with the columns ``kl``, ``change``, ``agrees``,
    ``confidence`` and ``document``.

    ``kl`` is Σ p ln(p/q) over the vocabulary in nats, p unquantized, q quantized. ``target_change``
    is the mean change of the scored token's log-probability; standard errors are over documents,
    since tokens of one document are not independent.
    """
    kl, document = measured["kl"].to_numpy(), measured["document"].to_numpy()
    p90, p99, p99_9 = (float(p) for p in np.percentile(kl, PERCENTILES))
    return Distributions(
        tokens=len(kl),
        kl=Divergence(
            mean=float(kl.mean()),
            mean_stderr=_mean(document, kl).stderr,
            median=float(np.median(kl)),
            p90=p90,
            p99=p99,
            p99_9=p99_9,
            largest=float(kl.max()),
        ),
        top1_agreement=float(measured["agrees"].to_numpy().mean()),
        by_confidence=_by_confidence(measured),
        target_change=_mean(document, measured["change"].to_numpy()),
    )


def _by_confidence(measured: pd.DataFrame) -> tuple[ConfidenceBin, ...]:
    """Return KL divergence and agreement by the unquantized model's probability of its likeliest
    token; the last bin includes 1. A model that is sure has little to lose.
    """
    bins = []
    names = ("confidence", "kl", "agrees")
    confidence, kl, agrees = (measured[name].to_numpy() for name in names)
    for low, high in itertools.pairwise(CONFIDENCE_BINS):
        within = (confidence >= low) & ((confidence < high) | (high == CONFIDENCE_BINS[-1]))
        count = int(within.sum())
        bins.append(
            ConfidenceBin(
                low=low,
                high=high,
                tokens=count,
                kl=float(kl[within].mean()) if count else None,
                top1_agreement=float(agrees[within].mean()) if count else None,
            )
        )
    return tuple(bins)


def divergence_table(
    measured: Mapping[str, pd.DataFrame],
    whole_texts: Collection[str],
    texts_of: Callable[[np.ndarray], list[str]],
) -> pd.DataFrame:
    """Return a table with the columns ``DIVERGENCE_COLUMNS``: a row per request; of the tasks in
    ``whole_texts`` a row per token, up to ``TOKENS_KEPT``. ``texts_of`` gives the texts of token
    ids [N].
    """
    tables = []
    for task, of in measured.items():
        tokens = of[["document", "request", "kl", "change"]]
        requests = tokens.groupby(["document", "request"], sort=False)
        table = requests.mean().reset_index().assign(tokens=requests.size().to_numpy(), text=None)
        if task in whole_texts:
            by_token = table["document"][table["tokens"].cumsum() <= TOKENS_KEPT]
            kept = tokens["document"].isin(by_token)
            single = tokens[kept].assign(tokens=1, text=texts_of(of["token"][kept].to_numpy()))
            table = pd.concat([single, table[~table["document"].isin(by_token)]], ignore_index=True)
        tables.append(table.assign(task=task)[list(DIVERGENCE_COLUMNS)])
    # float16: half the bytes, without digits that nobody reads
    together = pd.concat(tables, ignore_index=True)
    return together.astype({"kl": "float16", "change": "float16"}).astype(
        {"kl": "float32", "change": "float32"}
    )


def answer_change(base: pd.DataFrame, quantized: pd.DataFrame, correct: Mapping[int, int]) -> Ratio:
    """Return the mean change of the right answer's log-likelihood in nats, with its
    standard error.
    """
    pairs = _paired(base, quantized, ["document", "request"], "log_likelihood")
    right = pairs[pairs["document"].map(correct) == pairs["request"]]
    change = (right["log_likelihood"] - right["log_likelihood_base"]).to_numpy()
    return ratio(change, np.ones(len(change)))


def answer_agreement(base: pd.DataFrame, quantized: pd.DataFrame) -> AnswerAgreement | None:
    """Compare generated answers before any filter, by document and request; None if there
    are none.
    """
    on = ["document", "request"]
    before, after = (
        table[table["answer"].notna() & table["filter"].isna()][[*on, "answer", "cut"]]
        for table in (base, quantized)
    )
    pairs = after.merge(before, on=on, suffixes=("", "_base"), validate="one_to_one")
    # Equal as far as both are kept, and unknown beyond.
    unknown = (pairs["answer"] == pairs["answer_base"]) & (pairs["cut"] + pairs["cut_base"] > 0)
    left_out, pairs = int(unknown.sum()), pairs[~unknown]
    if pairs.empty and not left_out:
        return None
    shares = []
    names = ("answer", "cut", "answer_base", "cut_base")
    for text, cut, base_text, base_cut in zip(*(pairs[name] for name in names), strict=True):
        common = os.path.commonprefix([text, base_text])  # noqa: RUF071  of texts, not of paths
        longest = max(len(text) + cut, len(base_text) + base_cut)
        shares.append(len(common) / longest if text != base_text else 1.0)
    agreed = pd.Series(shares).groupby(pairs["document"].to_numpy()).mean().to_numpy()
    identical = int((pairs["answer"] == pairs["answer_base"]).sum())
    return AnswerAgreement(
        identical=identical, agreed=ratio(agreed, np.ones(len(agreed))), left_out=left_out
    )


def perplexity_ratio(base: pd.DataFrame, quantized: pd.DataFrame) -> Ratio:
    """Return ln(PPL quantized / PPL unquantized) = −Σ (difference of log-likelihoods) / Σ weight.

    Its standard error is a ratio estimator's over paired documents (delta method, with n / (n −
    1)). The documents are the sample, not their words or bytes.
    """
    pairs = _paired(base, quantized, ["document"], "value", keep="weight")
    change = (pairs["value_base"] - pairs["value"]).to_numpy()
    return ratio(change, pairs["weight"].to_numpy())


def _of(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    return table[table["metric"] == metric]


def _paired(
    base: pd.DataFrame, quantized: pd.DataFrame, by: list[str], value: str, keep: str | None = None
) -> pd.DataFrame:
    columns = [*by, value] + ([keep] if keep else [])
    return quantized[columns].merge(
        base[[*by, value]], on=by, suffixes=("", "_base"), validate="one_to_one"
    )


def _mean(document: np.ndarray, values: np.ndarray) -> Ratio:
    """Return the mean over tokens; its standard error is over the documents that they belong to."""
    _, indexes = np.unique(document, return_inverse=True)
    return ratio(np.bincount(indexes, values.astype(np.float64)), np.bincount(indexes))


def ratio(values: np.ndarray, weights: np.ndarray) -> Ratio:
    """Return Σ values / Σ weights over documents with the standard error that tables give it."""
    count, total = len(values), float(weights.sum())
    if count == 0:
        return Ratio(value=None, stderr=None, documents=0)
    value = float(values.sum()) / total
    error = None
    if count > 1 and weights.max() < total:
        columns = values.astype(float)[:, None], weights.astype(float)[:, None]
        _, error = estimate_contrast(*columns, np.ones(1), "mean")
    return Ratio(value=value, stderr=error, documents=count)
