"""What `qbench analyze` left in a results folder, and the records beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qbench.errors import ResultsError
from qbench.records import Analysis, Record, Sensitivity
from qbench.store import Analyses, Store, long_contexts, sensitivities
from qbench.text import group_by_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisResults:
    """All that a results folder has to say on why its models suffer.

    ``cells``: analyses that measured something, ``long``: of texts beyond the trained context;
    ``records``: good ones of `qbench run`; ``problems``: what is missing, a line each;
    ``replicates``: trainings of one kind, by its name.
    """

    cells: tuple[Analysis, ...]
    long: tuple[Analysis, ...]
    sensitivities: tuple[Sensitivity, ...]
    records: tuple[Record, ...]
    problems: tuple[str, ...]
    replicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        return bool(self.cells or self.long or self.sensitivities)


def load_analyses(store: Store) -> AnalysisResults:
    """Raises ResultsError where a file of an analysis is damaged."""
    analyses: Analyses[Analysis] = Analyses(store.directory)
    parts = [analyses.records(), long_contexts(store.directory).records()]
    units = sensitivities(store.directory).records()
    failed = [one for part in [*parts, units] for one in part if one.status == "failed"]
    problems = group_by_reason((one.cell, f"failed: {one.error}") for one in failed)
    records: list[Record] = []
    replicates = analyses.manifest().replicates if analyses.has_manifest() else {}
    if store.has_manifest():
        replicates = replicates or store.manifest().replicates
        try:
            records = [one for one in store.records() if one.status == "ok"]
        except ResultsError as error:
            problems.append(f"Damage is left out: {error}")
    cells, longer = (tuple(one for one in part if one.measured is not None) for part in parts)
    return AnalysisResults(
        cells=cells,
        long=longer,
        sensitivities=tuple(one for one in units if one.status == "ok"),
        records=tuple(records),
        problems=tuple(problems),
        replicates=replicates,
    )
