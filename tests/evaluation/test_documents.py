"""Documents out of a table at once are those that iteration gives."""

from __future__ import annotations

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from qbench.evaluation.loaded import listed

ROWS = [
    {"question": "two\nlines", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "gold": 1},
    {"question": "", "choices": {"text": [], "label": []}, "gold": None},
    {"question": "ü", "choices": {"text": ["c"], "label": ["C"]}, "gold": 0},
]
TABLE = Dataset.from_list(ROWS)
NAMED = Features({"gold": ClassLabel(names=["no", "yes"]), "score": Value("float32")})
DOCUMENTS = {
    "a table": TABLE,
    "chosen rows": TABLE.select([2, 0]),
    "shuffled": TABLE.shuffle(seed=3),
    "a filter": TABLE.filter(lambda row: row["gold"] is not None),
    "some columns": TABLE.with_format(None, columns=["gold"]),
    "another format": TABLE.select_columns(["question"]).with_format("numpy"),
    "classes by name": Dataset.from_list([{"gold": 1, "score": 0.1}], features=NAMED),
    "a list": ROWS,
    "a generator's": TABLE.to_iterable_dataset(),
    "nothing": TABLE.select([]),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_list_of_documents_is_what_iteration_gives(case):
    assert listed(DOCUMENTS[case]) == list(DOCUMENTS[case])


def test_each_time_they_are_new():
    first, second = listed(TABLE), listed(TABLE)
    first[0]["choices"]["text"].append("changed by a task's own code")
    assert second == ROWS == listed(TABLE)
