"""What ``qbench noise`` prints: units as in all other tables."""

import pytest

from qbench.records import Moved
from qbench.tables.changes import noise_table


def moved(metric: str, base: float, score: float, changed: int | None) -> Moved:
    return Moved(
        task="lambada_openai",
        metric=metric,
        variation="half the batch",
        base_score=base,
        score=score,
        documents=200,
        changed_documents=changed,
        largest_log_likelihood=5.7e-06,
        mean_log_likelihood=0.0,
    )


@pytest.mark.parametrize(
    ("metric", "base", "score", "changed", "wanted"),
    [
        ("acc_norm", 0.835, 0.83, 1, "Acc Norm | half the batch | 83.00 | −0.5 | 1 of 200"),
        ("acc", 0.9, 0.9, 0, "Acc | half the batch | 90.00 | 0 | 0 of 200"),
        ("perplexity", 1.25, 1.25 - 3.2e-8, None,
         "Perplexity | half the batch | 1.25 | −3.2e−08 | —"),
        ("exact_match [strict-match]", 0.5, 0.505, 1,
         r"Exact Match [strict-match] | half the batch | 50.50 | +0.5 | 1 of 200"),
    ],
)  # fmt: skip
def test_accuracies_are_per_cent_and_what_is_not_0_is_not_called_0(
    metric, base, score, changed, wanted
):
    text = noise_table("cell", [moved(metric, base, score, changed)])
    told = " ".join(text.split()).replace("\\", "")
    assert wanted in told
    assert "| 5.7e−06 | 0 |" in told
