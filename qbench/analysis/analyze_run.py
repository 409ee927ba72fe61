"""Choose the cells and texts to analyze, give them keys, and analyze those without a record.

Imports no torch before a cell is analyzed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from qbench.cell_result import CellResult
from qbench.errors import RecipeError, shown
from qbench.evaluation.tasks import TaskSpec, read_rows
from qbench.files import content_key, digest_of
from qbench.machine import attempt
from qbench.plan import Cell, Plan
from qbench.progress import Progress
from qbench.records import Analysis, AnalysisManifest, CellKey, Sensitivity
from qbench.store import Analyses

LENGTH = 512  # tokens of a text, unless a checkpoint has a shorter context
FIELD = "text"
BATCH_TOKENS = {"cpu": 8192, "cuda": 16_384}  # read at once; a longer text is read by itself
ROLLING = "loglikelihood_rolling"
# Of a cell's key: what decides the model. Tasks, scoring and damage do not.
MODEL_PARTS = (
    *("weights", "normalizer", "normalizer source", "quantizer", "attention", "device", "gpu"),
    *("versions", "code", "calibration"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """The texts of one ``field`` of a JSON Lines file, or the documents of a task that scores whole
    texts, each as the task scores it; ``digest`` is that of the file or the task."""

    name: str
    digest: str
    field: str | None
    texts: Callable[[], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisSettings:
    """At most ``samples`` texts, each cut to its first ``length`` tokens, BOS counted if ``bos``.
    ``blocks``: a sensitivity quantizes decoder layers one at a time, not linear layers."""

    source: TextSource
    samples: int
    length: int
    bos: bool
    device: str
    blocks: bool = False

    @property
    def batch(self) -> int:
        """Return how many texts are read in one forward pass."""
        return max(1, BATCH_TOKENS[self.device] // self.length)

    def key_parts(self) -> dict[str, Any]:
        """Return, for keys, what determines the analyzed tokens and the batches, by name."""
        return {
            "text": self.source.digest,
            "field": self.source.field,
            "samples": self.samples,
            "length": self.length,
            "bos": self.bos,
            "batch": self.batch,
        }


def text_file(path: Path, field: str) -> TextSource:
    """Return the texts of a JSON Lines file, which is read now. Raises DataError if a line is
    malformed or lacks ``field``."""
    rows, digest = read_rows(path)
    texts = [row.text(field, path) for row in rows]
    name = f"{path.name}, field {field}"
    return TextSource(name=name, digest=digest, field=field, texts=lambda: texts)


def task_text(tasks: tuple[TaskSpec, ...], skipped: tuple[str, ...]) -> TextSource:
    """Return the texts of the first of ``tasks`` that scores whole texts. They are loaded when they
    are asked for. ``skipped``: names of tasks without data, for the message. Raises RecipeError if
    no task scores whole texts."""
    task = next((task for task in tasks if task.output_type == ROLLING), None)
    if task is None:
        without = f" ({', '.join(skipped)}: no data)" if skipped else ""
        raise RecipeError(
            f"tasks: none of the recipe's scores whole texts (as wikitext does){without}, so there "
            "is no text to analyze; name one with --text FILE.jsonl"
        )

    def texts() -> list[str]:
        from qbench.evaluation.evaluate import load_task

        loaded = load_task(task).task
        return [loaded.doc_to_target(document) for document in loaded.eval_docs]

    return TextSource(name=f"task {task.name}", digest=task.digest, field=None, texts=texts)


def default_length(contexts: Iterable[int | None]) -> int:
    """Return LENGTH, or the shortest of ``contexts`` (None: not stated) if that is shorter."""
    return min([LENGTH, *(context for context in contexts if context is not None)])


def plan_analyses(plan: Plan, settings: AnalysisSettings) -> tuple[Cell, ...]:
    """Return all cells of ``plan`` in order, each with the key of its analysis."""
    key_parts = {"kind": "analysis", "analysis": settings.key_parts()}
    return _cells(plan.cells, key_parts)


def plan_sensitivities(plan: Plan, label: str, settings: AnalysisSettings) -> tuple[Cell, ...]:
    """Return the cells of the quantizer ``label``, one per checkpoint, with sensitivities' keys.
    Raises RecipeError if the recipe has no such quantizer, or if it quantizes no weights or
    activations of linear layers, has a transform, or is a copy without its original."""
    cells = tuple(cell for cell in plan.cells if cell.label == label)
    if not cells:
        labels = ", ".join(dict.fromkeys(cell.label for cell in plan.cells))
        raise RecipeError(
            f"--sensitivity {shown(label)}: the recipe has no such quantizer; it has {labels}"
        )
    precision = cells[0].quantization.precision
    if any(cell.without_baseline for cell in cells):
        raise RecipeError(
            f"--sensitivity {label}: a published copy is compared with its original; name the "
            "original under checkpoints, and the copy as the path of this quantizer"
        )
    if precision.weights is None and precision.activations is None:
        raise RecipeError(
            f"--sensitivity {label}: quantizes neither weights nor activations of linear layers; "
            "name another quantizer of the recipe"
        )
    if cells[0].quantization.transform is not None:
        raise RecipeError(
            f"--sensitivity {label}: its transform changes the whole model at once, so no layer "
            "can be quantized alone; name a quantizer without transform"
        )
    unit = "block" if settings.blocks else "linear"
    key_parts = {"kind": "sensitivity", "unit": unit, "analysis": settings.key_parts()}
    return _cells(cells, key_parts)


def _cells(chosen_cells: tuple[Cell, ...], key_parts: dict[str, Any]) -> tuple[Cell, ...]:
    """Return the cells with keys of their model's settings, the analysis code and ``key_parts``."""
    code = digest_of([Path(__file__).parent])
    cells = []
    for cell in chosen_cells:
        parts = {name: cell.key_parts[name] for name in MODEL_PARTS if name in cell.key_parts}
        parts |= {"analysis code": code, **key_parts}
        cells.append(replace(cell, key=content_key(parts), key_parts=parts))
    return tuple(cells)


def choose_cells(plan: Plan, only: str | None) -> tuple[Cell, ...]:
    """Return the cells whose names match one of the globs in ``only``, which commas separate; None:
    the unquantized ones. Raises RecipeError for a glob without a match, or without cells."""
    if only is not None:
        return plan.select(only)
    cells = tuple(cell for cell in plan.cells if not cell.quantization.precision.quantized)
    if not cells:
        names = ", ".join(cell.name for cell in plan.cells)
        raise RecipeError(
            "quantizers: none is unquantized (bf16, fp32); name the cells to analyze with --only: "
            f"{names}"
        )
    return cells


def analysis_manifest(plan: Plan, cells: Sequence[Cell]) -> AnalysisManifest:
    """Return the manifest of an analysis: the recipe's name, checkpoint, label and key of each of
    ``cells``, and all of the recipe's ``replicates``."""
    return AnalysisManifest(
        name=plan.recipe.name, cells=tuple(map(_place, cells)), replicates=plan.recipe.replicates
    )


def put_sensitivity_manifest(out: Analyses[Sensitivity], cells: Sequence[Cell], name: str) -> None:
    """Write the manifest of the recipe ``name``: ``cells``, after others of earlier commands."""
    fresh = [_place(cell) for cell in cells]
    before = out.manifest_before()
    earlier = before.cells if before else ()
    kept = [place for place in earlier if place.cell not in {new.cell for new in fresh}]
    out.put_manifest(AnalysisManifest(name=name, cells=(*kept, *fresh)))


def _place(cell: Cell) -> CellKey:
    return CellKey(checkpoint=cell.checkpoint_name, quantizer=cell.label, key=cell.key)


@dataclass(kw_only=True, slots=True)
class AnalysisResult(CellResult):
    """Collects the measurements of one cell; they are kept if the analysis fails."""

    analyses: Analyses
    settings: AnalysisSettings
    contents: dict[str, Any] = field(default_factory=dict)  # fields of the record, as measured

    def put(
        self, status: Literal["ok", "unfinished", "failed"], error: str | None
    ) -> Analysis | Sensitivity:
        """Return the record with ``status``, after saving it. It is not saved if it is not "ok" and
        the stored one is. ``error``: why the analysis failed."""
        kind = self.analyses.kind
        fields = self.common_fields(error) | self.contents | {"status": status}
        if kind is Sensitivity:
            del fields["attention"]
            fields["unit"] = "block" if self.settings.blocks else "linear"
        record = kind(**fields)
        earlier = self.analyses.get_valid(record)
        if status == "ok" or earlier is None or earlier.status != "ok":
            self.analyses.put(record)
        return record


def analyze_if_needed(
    cell: Cell,
    *,
    plan: Plan,
    analyses: Analyses,
    settings: AnalysisSettings,
    progress: Progress,
    force: bool,
) -> Analysis | Sensitivity:
    """Return the record of ``cell``: a finished one that is stored, unless ``force``, else that of
    a new analysis; if it fails the record's ``status`` says so, and nothing is raised. If another
    process is analyzing the cell, wait for its record. An unfinished sensitivity is
    continued, unless ``force``."""
    requested = datetime.now(UTC)
    with FileLock(analyses.path(cell.grid_cell, ".lock")):
        progress.begin(cell.name)
        try:
            record = analyses.get_valid(cell.grid_cell, progress.log)
            made_meanwhile = record is not None and record.started >= requested
            if record is not None and record.status == "ok" and (made_meanwhile or not force):
                what = "sensitivity" if isinstance(record, Sensitivity) else "analysis"
                progress.log(f"{cell.name}: {what} already finished")
                return record
            result = AnalysisResult(
                cell=cell, plan=plan, progress=progress, analyses=analyses, settings=settings
            )
            if isinstance(record, Sensitivity) and not force:
                result.contents["units"] = record.units

            def work() -> None:
                from qbench.analysis.analyze_cell import compute

                compute(result)

            error = attempt(work, analyses.path(cell.grid_cell, ".log"), plan.device)
            record = result.put("failed" if error else "ok", error)
            progress.log(_summary(record), "bold red" if record.status == "failed" else "")
            return record
        finally:
            progress.end(cell.name)


def _summary(record: Analysis | Sensitivity) -> str:
    """Return one line with what an analysis measured and the seconds of its stages."""
    if record.status != "ok" or record.text is None:
        return f"{record.cell}: FAILED: {record.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in record.stages)
    if isinstance(record, Sensitivity):
        what = "decoder layers" if record.unit == "block" else "linear layers"
        return f"{record.cell}: {len(record.units)} {what}, one at a time ({cost})"
    text = f"{record.text.samples} texts of {record.text.length} tokens"
    return f"{record.cell}: analyzed on {text} ({cost})"
