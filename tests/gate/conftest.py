"""A good grid and its baseline, which the tests of the gate share; results that differ from it in
one stated way."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import make_store

from qbench.gate import baseline
from qbench.gate.baseline import CellResults
from qbench.gate.check import changes, judge
from qbench.gate.verdict import GateResult, Verdict, margin_of
from qbench.metrics import LOG_MEAN
from qbench.records import ANSWERS, Precision, Score
from qbench.statistics import Column
from qbench.store import Store

SIZES = {"arc_easy": 700, "lambada_openai": 500, "wikitext": 40}
QUANTIZERS = ("bf16", "hqq-4bit")
CELL = "softmax/hqq-4bit"
GOOD: list[Path] = []  # the good grid's folder, once it is there


def changed(folder: Path, **settings) -> Store:
    """The good grid again, with other ``settings``."""
    if not settings and GOOD:
        return Store(shutil.copytree(GOOD[0], folder / "new"))
    return make_store(folder / "new", sizes=SIZES, quantizers=QUANTIZERS, **settings)


def of(result: Verdict, cell: str, task: str | None = None) -> list[GateResult]:
    return [gate for gate in result.gates if gate.cell == cell and task in (None, gate.task)]


def update(store: Store, cell: str, **fields) -> None:
    """Write the record of ``cell`` again with other ``fields``."""
    record = record_of(store, cell)
    store.put(record.model_copy(update=fields), store.outcomes(record), None)


def without_wikitext(record) -> dict:
    """The fields of ``record`` after a failure of this task."""
    kept = tuple(score for score in record.scores if score.task != "wikitext")
    return {"scores": kept, "failed_tasks": {"wikitext": "it gives NaN"}}


def record_of(store: Store, cell: str):
    return store.get(next(one for one in store.manifest().cells if one.cell == cell))


def answered(metric: str, values, variances=None) -> CellResults:
    """A cell's ``metric`` of answers, a value per prompt, with the variance that drawing adds."""
    documents, name, one = np.arange(len(values)), (ANSWERS, metric), np.ones(len(values))
    score = Score(task=ANSWERS, label=ANSWERS, metric=metric, value=float(np.mean(values)),
                  stderr=None, higher_is_better=metric in ("stops", "exact_match"),
                  documents=len(values),
                  aggregation=LOG_MEAN if metric in ("kl", "length") else "mean")  # fmt: skip
    spread = {} if variances is None else {name: Column.of(documents, variances, one)}
    record = SimpleNamespace(precision=Precision())
    return CellResults(record, {name: Column.of(documents, values, one)}, {name: score}, spread)


def gate_of(metric: str, old: CellResults, new: CellResults, given, lines: int) -> GateResult:
    name = (ANSWERS, metric)
    margin = margin_of(old.scores[name], old.columns[name], given, lines=lines,
                       variance=old.variances.get(name))  # fmt: skip
    return judge(changes({"a/b": (old, new)})["a/b", name], margin, old.columns[name],
                 new.columns[name])  # fmt: skip


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    store = changed(tmp_path_factory.mktemp("good"))
    GOOD.append(store.directory)
    return store


@pytest.fixture(scope="session")
def standard(good, tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "baseline.tar.xz"
    assert baseline.make(good, path) is None
    return path
