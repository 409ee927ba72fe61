"""A cell's sensitivity → its record, which grows unit by unit: what was stopped goes on there."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from filelock import FileLock

from qbench.analyses import Analyses
from qbench.analysis.plan import AnalysisCell
from qbench.cell import CellResult, cache_folder, free, load, one_line, quantized
from qbench.errors import NewerSchemaError, ResultsError
from qbench.machine import environment, measured, redirected
from qbench.plan import Plan
from qbench.progress import Progress
from qbench.records import AnalysisGrid, AnalyzedText, Sensitivity, UnitSensitivity

SAVE_EVERY = 20.0  # seconds
TOGETHER = "all"
Status = Literal["ok", "unfinished", "failed"]


@dataclass(kw_only=True, slots=True)
class Measuring:
    """What is known so far."""

    result: CellResult
    known: dict[str, UnitSensitivity]
    text: AnalyzedText | None = None
    perplexity: float | None = None


def measure_if_needed(
    cell: AnalysisCell, plan: Plan, out: Analyses[Sensitivity], progress: Progress, *, force: bool
) -> Sensitivity:
    """The cell's whole record, made or finished now if need be."""
    with FileLock(out.lock_file(cell.grid_cell)):
        progress.begin(cell.name)
        try:
            known = None if force else out.whole(cell.grid_cell, progress.log)
            if known is not None and known.status == "ok":
                progress.log(f"{cell.name}: sensitivity already there")
                return known
            found = _make(cell, plan, out, progress, known)
            progress.log(_said(found), "bold red" if found.status == "failed" else "")
            return found
        finally:
            progress.end(cell.name)


def _make(
    cell: AnalysisCell,
    plan: Plan,
    out: Analyses[Sensitivity],
    progress: Progress,
    before: Sensitivity | None,
) -> Sensitivity:
    result = CellResult(started=datetime.now(UTC))
    done = [*before.units, *([before.together] if before.together else [])] if before else []
    state = Measuring(result=result, known={one.name: one for one in done})
    log, error = out.log(cell.grid_cell), None
    with redirected(log):
        try:
            _measure(cell, plan, out, progress, state)
        except Exception as problem:
            traceback.print_exc()
            error = one_line(problem, log)
        finally:
            free(plan.device)
    record = _record(cell, plan, state, "failed" if error else "ok", error)
    out.put(record)
    return record


def _measure(
    cell: AnalysisCell, plan: Plan, out: Analyses[Sensitivity], progress: Progress, state: Measuring
) -> None:
    # What they import says much, which belongs into the log.
    from qbench.analysis.sensitivity import Baseline, Unit, units
    from qbench.analysis.tokens import read_tokens
    from qbench.quantizers.linear import linearize, linears

    of, stages = cell.cell, state.result.stages
    progress.stage(cell.name, "load")
    with measured("load", plan.device, stages):
        model, tokenizer = load(of, plan)
        tokens = read_tokens(cell.settings, tokenizer)
    state.text = tokens.text
    changed, _ = load(of, plan)
    changed = quantized(of, plan, changed, tokenizer, state.result, progress, cache_folder())
    linearize(model)  # as quantizing did: GPT-2's Conv1D, fused experts
    names = list(linears(model, of.quantization.ignore))
    wanted = units(model, names, blocks=cell.settings.blocks)
    wanted.append(Unit(name=TOGETHER, layer=None, modules=tuple(names)))
    progress.stage(cell.name, "sensitivity", total=len(wanted), unit="layers")
    with measured("sensitivity", plan.device, stages):
        base = Baseline(model, tokens.ids, batch=cell.settings.batch)
        state.perplexity = base.perplexity
        saved = time.monotonic()
        for index, unit in enumerate(wanted):
            if unit.name not in state.known:
                state.known[unit.name] = base.against(unit, changed)
            progress.advance(cell.name, index + 1, len(wanted))
            if time.monotonic() - saved > SAVE_EVERY:
                out.put(_record(cell, plan, state, "unfinished", None))
                saved = time.monotonic()


def _record(
    cell: AnalysisCell, plan: Plan, state: Measuring, status: Status, error: str | None
) -> Sensitivity:
    of = cell.cell
    return Sensitivity(
        key=cell.key,
        key_parts=cell.key_parts,
        checkpoint=of.checkpoint_name,
        quantizer=of.label,
        method=of.quantization.method,
        title=of.quantization.title,
        precision=of.quantization.precision,
        normalizer=of.checkpoint.normalizer,
        unit="block" if cell.settings.blocks else "linear",
        status=status,
        error=error,
        text=state.text,
        perplexity=state.perplexity,
        together=state.known.get(TOGETHER),
        units=tuple(one for name, one in state.known.items() if name != TOGETHER),
        stages=tuple(state.result.stages),
        environment=environment(plan.device, of.quantization.requirements, plan.hardware),
        started=state.result.started,
        finished=datetime.now(UTC),
    )


def failed(cell: AnalysisCell, plan: Plan, error: str) -> Sensitivity:
    """The record of a cell that left none itself."""
    state = Measuring(result=CellResult(started=datetime.now(UTC)), known={})
    return _record(cell, plan, state, "failed", error)


def _said(found: Sensitivity) -> str:
    if found.status != "ok" or found.text is None:
        return f"{found.cell}: FAILED: {found.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in found.stages)
    what = "decoder layers" if found.unit == "block" else "linear layers"
    return f"{found.cell}: {len(found.units)} {what}, one at a time ({cost})"


def put_grid(out: Analyses[Sensitivity], cells: Sequence[AnalysisCell], name: str) -> None:
    """Say which are meant: ``cells``, and those of other cells that were asked for before."""
    fresh = [cell.grid_cell for cell in cells]
    try:
        before = [one for one in out.grid().cells if one.cell not in {new.cell for new in fresh}]
    except NewerSchemaError:
        raise
    except ResultsError:
        before = []
    out.put_grid(AnalysisGrid(name=name, cells=(*before, *fresh)))
