"""Plan of a run → the analyses of its cells, each with its content key → their records: load,
quantize, audit, then one pass over the text, or over it with one linear layer quantized at a time.

Imports no torch before a cell is analyzed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from qbench.analysis.text import AnalysisSettings, read_tokens
from qbench.cell import CellResult, cache_folder, free, load, load_original, one_line, quantized
from qbench.code import digest_of
from qbench.errors import RecipeError, UnavailableError, shown
from qbench.machine import environment, measured, redirected
from qbench.plan import Cell, Plan, content_key
from qbench.progress import Progress, SilentProgress
from qbench.records import (
    Analysis,
    AnalysisGrid,
    AnalyzedText,
    CellKey,
    Measured,
    Sensitivity,
    UnitSensitivity,
)
from qbench.store import Analyses

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAVE_EVERY = 20.0  # seconds between two records of an unfinished sensitivity
TOGETHER = "all"
# Of a cell's key: what decides the model. Tasks, scoring and damage do not.
MODEL_PARTS = (
    *("weights", "normalizer", "normalizer source", "quantizer", "attention", "device", "gpu"),
    *("versions", "code", "calibration"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisCell:
    """One cell of a plan, to be analyzed."""

    cell: Cell
    settings: AnalysisSettings
    key: str
    key_parts: dict[str, Any]

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def grid_cell(self) -> CellKey:
        return CellKey(
            checkpoint=self.cell.checkpoint_name, quantizer=self.cell.label, key=self.key
        )


def plan_analyses(plan: Plan, settings: AnalysisSettings) -> tuple[AnalysisCell, ...]:
    """Of all cells of ``plan``, in its order."""
    stated = {"kind": "analysis", "analysis": settings.key_parts() | settings.map_heads}
    return _cells(plan.cells, settings, stated)


def plan_sensitivities(
    plan: Plan, label: str, settings: AnalysisSettings
) -> tuple[AnalysisCell, ...]:
    """Of all checkpoints under the recipe's quantizer ``label``. Raises RecipeError where it has
    none of that name, or where that quantizes no weights or activations of linear layers, treats
    outliers of the whole model, or is a copy without its original."""
    cells = tuple(cell for cell in plan.cells if cell.label == label)
    if not cells:
        labels = ", ".join(dict.fromkeys(cell.label for cell in plan.cells))
        raise RecipeError(
            f"--sensitivity {shown(label)}: the recipe has no such quantizer; it has {labels}"
        )
    precision = cells[0].quantization.precision
    if any(cell.alone for cell in cells):
        raise RecipeError(
            f"--sensitivity {label}: the original of a published copy is not there; name it under "
            "checkpoints, and the copy as the path of this quantizer"
        )
    if precision.weights is None and precision.activations is None:
        raise RecipeError(
            f"--sensitivity {label}: quantizes neither weights nor activations of linear layers; "
            "name another quantizer of the recipe"
        )
    if cells[0].quantization.transform is not None:
        raise RecipeError(
            f"--sensitivity {label}: treats outliers of the whole model at once, so no layer can "
            "be quantized alone; name one that does not"
        )
    unit = "block" if settings.blocks else "linear"
    stated = {"kind": "sensitivity", "unit": unit, "analysis": settings.key_parts()}
    return _cells(cells, settings, stated)


def _cells(
    wanted: tuple[Cell, ...], settings: AnalysisSettings, stated: dict[str, Any]
) -> tuple[AnalysisCell, ...]:
    code = digest_of([Path(__file__).parent])
    cells = []
    for cell in wanted:
        parts = {name: cell.key_parts[name] for name in MODEL_PARTS if name in cell.key_parts}
        parts |= {"analysis code": code, **stated}
        cells.append(
            AnalysisCell(cell=cell, settings=settings, key=content_key(parts), key_parts=parts)
        )
    return tuple(cells)


def chosen(plan: Plan, only: str | None) -> tuple[Cell, ...]:
    """The cells that a glob names; without one the unquantized ones. RecipeError for none."""
    if only is not None:
        return plan.select(only)
    cells = tuple(cell for cell in plan.cells if not cell.quantization.precision.quantized)
    if not cells:
        names = ", ".join(cell.name for cell in plan.cells)
        raise RecipeError(
            "quantizers: none is unquantized (bf16, fp32), and only these are analyzed without "
            f"--only; the cells are {names}"
        )
    return cells


def analysis_grid(plan: Plan, cells: tuple[AnalysisCell, ...]) -> AnalysisGrid:
    return AnalysisGrid(
        name=plan.recipe.name,
        cells=tuple(cell.grid_cell for cell in cells),
        replicates=plan.recipe.groups,
    )


def put_sensitivity_grid(
    out: Analyses[Sensitivity], cells: Sequence[AnalysisCell], name: str
) -> None:
    """Say which are meant: ``cells``, and those of other cells that were asked for before."""
    fresh = [cell.grid_cell for cell in cells]
    before = out.grid_before()
    known = before.cells if before else ()
    kept = [one for one in known if one.cell not in {new.cell for new in fresh}]
    out.put_grid(AnalysisGrid(name=name, cells=(*kept, *fresh)))


def analyze_if_needed(
    cell: AnalysisCell, plan: Plan, analyses: Analyses, progress: Progress, *, force: bool
) -> Analysis | Sensitivity:
    """The cell's good record, made or finished now if need be; where another process is at work
    on it, that one's."""
    asked = datetime.now(UTC)
    with FileLock(analyses.lock_file(cell.grid_cell)):
        progress.begin(cell.name)
        try:
            known = analyses.whole(cell.grid_cell, progress.log)
            made_meanwhile = known is not None and known.started >= asked
            if known is not None and known.status == "ok" and (made_meanwhile or not force):
                what = "sensitivity already" if isinstance(known, Sensitivity) else "already"
                progress.log(f"{cell.name}: {what} there")
                return known
            found = analyze(cell, plan, analyses, progress, None if force else known)
            progress.log(_summary(found), "bold red" if found.status == "failed" else "")
            return found
        finally:
            progress.end(cell.name)


def analyze(
    cell: AnalysisCell,
    plan: Plan,
    analyses: Analyses,
    progress: Progress,
    before: Analysis | Sensitivity | None = None,
) -> Analysis | Sensitivity:
    """Analyze one cell and put the record into its place, whether it worked or not. A sensitivity
    goes on from the units that the record ``before`` has."""
    work = _Work(cell=cell, plan=plan, analyses=analyses, progress=progress)
    if isinstance(before, Sensitivity):
        done = [*before.units, *([before.together] if before.together else [])]
        work.units = {one.name: one for one in done}
    log, error = analyses.log(cell.grid_cell), None
    with redirected(log):
        try:
            (work.sensitivity if analyses.kind is Sensitivity else work.measure)()
        except Exception as problem:
            traceback.print_exc()
            error = one_line(problem, log)
        finally:
            free(plan.device)
    return work.put("failed" if error else "ok", error)


def failed(
    plan: Plan, analyses: Analyses, cell: AnalysisCell, error: str
) -> Analysis | Sensitivity:
    """The record, put into its place, of a cell that left none itself."""
    work = _Work(cell=cell, plan=plan, analyses=analyses, progress=SilentProgress())
    return work.put("failed", error)


@dataclass(kw_only=True, slots=True)
class _Work:
    """What is known so far of a cell that is analyzed."""

    cell: AnalysisCell
    plan: Plan
    analyses: Analyses
    progress: Progress
    result: CellResult = field(default_factory=lambda: CellResult(started=datetime.now(UTC)))
    text: AnalyzedText | None = None
    measured: Measured | None = None
    perplexity: float | None = None
    units: dict[str, UnitSensitivity] = field(default_factory=dict)

    def measure(self) -> None:
        """One pass over the text."""
        # What they import says much, which belongs into the log.
        from qbench.analysis.attention import attention_maps, choose
        from qbench.analysis.measure import measure
        from qbench.quantizers.linear import linearize, linears

        of, plan, settings, name = self.cell.cell, self.plan, self.cell.settings, self.cell.name
        model, tokenizer, ids = self._load()
        linearize(model)  # GPT-2's Conv1D too; other models stay as they are
        names = list(linears(model))
        if of.quantization.precision.quantized:
            del model
            free(plan.device)
            model, tokenizer = load(of, plan)
            model = quantized(
                of, plan, model, tokenizer, self.result, self.progress, cache_folder()
            )
        self.progress.stage(name, "analyze", total=len(ids))
        with measured("analyze", plan.device, self.result.stages):
            found = measure(
                model,
                ids,
                tokenizer=tokenizer,
                linears=names,
                batch=settings.batch,
                progress=lambda done, total: self.progress.advance(name, done, total),
            )
            heads = choose(found) if settings.heads is None else settings.heads
            maps = attention_maps(model, tokenizer, ids[0], heads)
        self.measured = found.model_copy(update={"maps": maps})

    def sensitivity(self) -> None:
        """One linear layer, or decoder layer, quantized at a time, and then all."""
        from qbench.analysis.sensitivity import Baseline, Unit, units
        from qbench.quantizers.linear import linearize, linears

        of, plan, settings, name = self.cell.cell, self.plan, self.cell.settings, self.cell.name
        changed, tokenizer, ids = self._load()
        changed = quantized(
            of, plan, changed, tokenizer, self.result, self.progress, cache_folder()
        )
        rescaled = self.result.audit is not None and self.result.audit.rescaled > 0
        if rescaled and not settings.blocks:
            raise UnavailableError(
                f"{of.label}: factors of its columns stand in the layer before (as AWQ puts them), "
                "so that no linear layer can be put into the original alone: say --blocks"
            )
        model = load_original(of, plan)
        linearize(model)  # as quantizing did: GPT-2's Conv1D, fused experts
        names = list(linears(model, of.quantization.ignore))
        wanted = units(model, names, blocks=settings.blocks, whole=rescaled)
        together = [unit.name for unit in wanted] if rescaled else names
        wanted.append(Unit(name=TOGETHER, layer=None, modules=tuple(together)))
        self.progress.stage(name, "sensitivity", total=len(wanted))
        with measured("sensitivity", plan.device, self.result.stages):
            base = Baseline(model, ids, batch=settings.batch)
            self.perplexity = base.perplexity
            saved = time.monotonic()
            for index, unit in enumerate(wanted):
                if unit.name not in self.units:
                    self.units[unit.name] = base.against(unit, changed)
                self.progress.advance(name, index + 1, len(wanted))
                if time.monotonic() - saved > SAVE_EVERY:
                    self.put("unfinished", None)
                    saved = time.monotonic()

    def put(
        self, status: Literal["ok", "unfinished", "failed"], error: str | None
    ) -> Analysis | Sensitivity:
        """Write the record of what is known."""
        cell, of = self.cell, self.cell.cell
        stated: dict[str, Any] = {
            "key": cell.key,
            "key_parts": cell.key_parts,
            "checkpoint": of.checkpoint_name,
            "quantizer": of.label,
            "method": of.quantization.method,
            "title": of.quantization.title,
            "precision": of.quantization.precision,
            "normalizer": of.checkpoint.normalizer,
            "status": status,
            "error": error,
            "text": self.text,
            "stages": tuple(self.result.stages),
            "environment": environment(
                self.plan.device, of.quantization.requirements, self.plan.hardware
            ),
            "started": self.result.started,
            "finished": datetime.now(UTC),
        }
        record: Analysis | Sensitivity
        if self.analyses.kind is Sensitivity:
            record = Sensitivity(
                **stated,
                unit="block" if cell.settings.blocks else "linear",
                perplexity=self.perplexity,
                together=self.units.get(TOGETHER),
                units=tuple(one for name, one in self.units.items() if name != TOGETHER),
            )
        else:
            attention = f"{of.checkpoint.normalizer}/{of.attention}"
            record = Analysis(**stated, attention=attention, measured=self.measured)
        self.analyses.put(record)
        return record

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Tensor]:
        """The unquantized model, its tokenizer, and the ids [N, T] of the texts."""
        self.progress.stage(self.cell.name, "load")
        with measured("load", self.plan.device, self.result.stages):
            model, tokenizer = load(self.cell.cell, self.plan)
            if not hasattr(model, "forward"):
                raise UnavailableError(
                    f"{self.cell.cell.label} runs outside transformers, where a model's inside "
                    "cannot be measured; leave it out with --only"
                )
            ids, self.text = read_tokens(self.cell.settings, tokenizer)
        return model, tokenizer, ids


def _summary(found: Analysis | Sensitivity) -> str:
    """One line on what an analysis gave and what it cost."""
    if found.status != "ok" or found.text is None:
        return f"{found.cell}: FAILED: {found.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in found.stages)
    if isinstance(found, Sensitivity):
        what = "decoder layers" if found.unit == "block" else "linear layers"
        return f"{found.cell}: {len(found.units)} {what}, one at a time ({cost})"
    text = f"{found.text.samples} texts of {found.text.length} tokens"
    return f"{found.cell}: analyzed on {text} ({cost})"
