"""Results that differ from the good grid in one stated way."""

from pathlib import Path

from synthetic import make_store

from qbench.gate.check import check
from qbench.gate.verdict import GateResult, Verdict
from qbench.store import Store

SIZES = {"arc_easy": 700, "lambada_openai": 500, "wikitext": 40}
QUANTIZERS = ("bf16", "hqq-4bit")
CELL = "softmax/hqq-4bit"


def changed(folder: Path, **settings) -> Store:
    return make_store(folder / "new", sizes=SIZES, quantizers=QUANTIZERS, **settings)


def of(result: Verdict, cell: str, task: str | None = None) -> list[GateResult]:
    return [gate for gate in result.gates if gate.cell == cell and task in (None, gate.task)]


def failed(store: Store, standard: Path, **settings) -> list[GateResult]:
    """The questions that do not pass."""
    return [one for one in check(store, standard, **settings).gates if one.outcome == "fail"]


def update(store: Store, cell: str, **fields) -> None:
    """Write the record of ``cell`` again with other ``fields``."""
    record = record_of(store, cell)
    store.put(record.model_copy(update=fields), store.outcomes(record), None)


def record_of(store: Store, cell: str):
    return store.get(next(one for one in store.manifest().cells if one.cell == cell))


def audit_of(store: Store, cell: str):
    return record_of(store, cell).audit
