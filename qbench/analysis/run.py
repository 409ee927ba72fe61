"""Analysis cell → record: load, quantize, audit, then one pass over the text."""

from __future__ import annotations

import traceback
from datetime import UTC, datetime

from filelock import FileLock

from qbench.analyses import Analyses
from qbench.analysis.plan import AnalysisCell
from qbench.cell import CellResult, cache_folder, free, load, one_line, quantized
from qbench.machine import environment, measured, redirected
from qbench.plan import Plan
from qbench.progress import Progress
from qbench.records import Analysis, AnalyzedText, Measured


def analyze_if_needed(
    cell: AnalysisCell, plan: Plan, analyses: Analyses, progress: Progress, *, force: bool
) -> Analysis:
    """The cell's good analysis, made now if need be; where another process is at work on it,
    that one's."""
    asked = datetime.now(UTC)
    with FileLock(analyses.lock_file(cell.grid_cell)):
        progress.begin(cell.name)
        try:
            known = analyses.whole(cell.grid_cell, progress.log)
            made_meanwhile = known is not None and known.started >= asked
            if known is not None and known.status == "ok" and (made_meanwhile or not force):
                progress.log(f"{cell.name}: already there")
                return known
            found = analyze(cell, plan, analyses, progress)
            progress.log(_said(found), "bold red" if found.status == "failed" else "")
            return found
        finally:
            progress.end(cell.name)


def analyze(cell: AnalysisCell, plan: Plan, analyses: Analyses, progress: Progress) -> Analysis:
    """Analyze one cell and put the record into its place, whether it worked or not."""
    result = CellResult(started=datetime.now(UTC))
    log = analyses.log(cell.grid_cell)
    error, text, found = None, None, None
    with redirected(log):
        try:
            text, found = _analyze(cell, plan, result, progress)
        except Exception as problem:
            traceback.print_exc()
            error = one_line(problem, log)
        finally:
            free(plan.device)
    record = _record(cell, plan, result, error, text, found)
    analyses.put(record)
    return record


def failed(cell: AnalysisCell, plan: Plan, error: str) -> Analysis:
    """The record of a cell that left none itself."""
    return _record(cell, plan, CellResult(started=datetime.now(UTC)), error, None, None)


def _record(
    cell: AnalysisCell,
    plan: Plan,
    result: CellResult,
    error: str | None,
    text: AnalyzedText | None,
    found: Measured | None,
) -> Analysis:
    of = cell.cell
    return Analysis(
        key=cell.key,
        key_parts=cell.key_parts,
        checkpoint=of.checkpoint_name,
        quantizer=of.label,
        method=of.quantization.method,
        title=of.quantization.title,
        precision=of.quantization.precision,
        normalizer=of.checkpoint.normalizer,
        attention=f"{of.checkpoint.normalizer}/{of.attention}",
        status="failed" if error else "ok",
        error=error,
        text=text,
        measured=found,
        stages=tuple(result.stages),
        environment=environment(plan.device, of.quantization.requirements, plan.hardware),
        started=result.started,
        finished=datetime.now(UTC),
    )


def _analyze(
    cell: AnalysisCell, plan: Plan, result: CellResult, progress: Progress
) -> tuple[AnalyzedText, Measured]:
    from qbench.analysis.maps import attention_maps, choose
    from qbench.analysis.measure import measure
    from qbench.analysis.tokens import read_tokens
    from qbench.quantizers.linear import linearize, linears

    of = cell.cell
    progress.stage(cell.name, "load")
    with measured("load", plan.device, result.stages):
        model, tokenizer = load(of, plan)
        tokens = read_tokens(cell.settings, tokenizer)
    linearize(model)  # GPT-2's Conv1D too; other models stay as they are
    names = list(linears(model))
    if of.quantization.precision.quantized:
        del model
        free(plan.device)
        model, tokenizer = load(of, plan)
        model = quantized(of, plan, model, tokenizer, result, progress, cache_folder())
    progress.stage(cell.name, "analyze", total=len(tokens.ids), unit="texts")
    with measured("analyze", plan.device, result.stages):
        found = measure(
            model,
            tokens.ids,
            tokenizer=tokenizer,
            linears=names,
            batch=cell.settings.batch,
            progress=lambda done, total: progress.advance(cell.name, done, total),
        )
        heads = choose(found) if cell.settings.heads is None else cell.settings.heads
        maps = attention_maps(model, tokenizer, tokens.ids[0], heads)
    return tokens.text, found.model_copy(update={"maps": maps})


def _said(found: Analysis) -> str:
    """One line on what an analysis gave and what it cost."""
    if found.measured is None or found.text is None:
        return f"{found.cell}: FAILED: {found.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in found.stages)
    text = f"{found.text.samples} texts of {found.text.length} tokens"
    return f"{found.cell}: analyzed on {text} ({cost})"
