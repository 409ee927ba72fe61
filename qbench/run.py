"""Cell → Record: load, attend, quantize, audit, evaluate."""

from __future__ import annotations

import copy
import gc
import os
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from qbench import hub
from qbench.code import code_digest
from qbench.errors import AuditError, QbenchError, UnavailableError
from qbench.evaluation.ahead import Ahead
from qbench.machine.clock import mark
from qbench.machine.environment import hardware, measured, without
from qbench.machine.quiet import redirected
from qbench.outcome import Outcome
from qbench.plan import Cell, Plan
from qbench.record import Record
from qbench.sink import Sink
from qbench.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qbench.evaluation.scoring.asked import Ids


def cache_folder() -> Path:
    """Where quantized weights are kept: $QBENCH_CACHE, else ~/.cache/qbench."""
    return Path(os.environ.get("QBENCH_CACHE") or Path.home() / ".cache" / "qbench")


def distributions_folder(cache: Path) -> Path:
    """Where unquantized cells keep what damage is measured against: bytes = scored tokens ×
    hidden size × bytes of the dtype, and the LM head."""
    return cache / "distributions"


def run(cell: Cell, plan: Plan, store: Store, sink: Sink, cache: Path) -> Record:
    """Run one cell and put its record into the store, whether it worked or not.

    ``cache`` keeps quantized weights and unquantized distributions.
    """
    gathered = Outcome(started=datetime.now(UTC))
    log, handed_over = store.log(cell.grid_cell), store.handed_over(cell.grid_cell)
    handed_over.unlink(missing_ok=True)  # of a process that died
    error = None
    with redirected(log):
        try:
            _run(cell, plan, store, gathered, sink, cache)
        except Exception as problem:
            traceback.print_exc()
            error = one_line(problem, log)
        finally:
            free(plan.device)
    mark(f"{cell.name}: write")
    record = gathered.record(cell, plan, error)
    record = store.put(record, *(gathered.tables() if error is None else (None, None)))
    handed_over.unlink(missing_ok=True)
    return record


def failed(cell: Cell, plan: Plan, error: str) -> Record:
    """The record of a cell that left none itself."""
    return Outcome(started=datetime.now(UTC)).record(cell, plan, error)


def _run(cell: Cell, plan: Plan, store: Store, gathered: Outcome, sink: Sink, cache: Path) -> None:
    _prepare(cell, plan, sink)
    with Ahead(plan.tasks, cell.scoring, cell.checkpoint).at_work() as ahead:
        model, tokenizer = _load(cell, plan, gathered, sink)
        gathered.documents = ahead.documents()
        if cell.quantization.precision.quantized:  # libraries may draw, and tasks' own code, too
            ahead.finish()
        model = quantized(cell, plan, model, tokenizer, gathered, sink, cache)
        known = ahead.finish()
    _evaluate(cell, plan, store, model, tokenizer, gathered, sink, cache, known)


def _step(sink: Sink, cell: str, name: str, total: float | None = None, unit: str = "") -> None:
    mark(f"{cell}: {name}")
    sink.step(cell, name, total, unit)


def _prepare(cell: Cell, plan: Plan, sink: Sink) -> None:
    """What can fail without a model, first: is this the device that the cell's key speaks of, and
    are its data here?"""
    from qbench.evaluation.tasks import load_task

    _step(sink, cell.name, "prepare")
    if plan.hardware is not None and (here := hardware(plan.device)) != plan.hardware:
        raise UnavailableError(
            f"planned for {plan.hardware}, and this worker has {here}; run on GPUs of one kind"
        )
    if code_digest() != cell.key_parts["code"]:
        raise UnavailableError("qbench's own code changed after this run began; run again")
    with hub.announcing(sink.say):
        for task in plan.tasks:
            if task.hub_data is not None:
                load_task(task)


def _load(
    cell: Cell, plan: Plan, gathered: Outcome, sink: Sink
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _step(sink, cell.name, "load")
    with measured("load", plan.device, gathered.stages):
        return load(cell, plan)


def load(cell: Cell, plan: Plan) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The cell's checkpoint, not yet quantized, on the plan's device, and its tokenizer."""
    from qbench.checkpoints import load_tokenizer

    return _original(cell, plan), load_tokenizer(cell.checkpoint)


def _original(cell: Cell, plan: Plan) -> PreTrainedModel:
    import torch

    from qbench.checkpoints import load_model

    return load_model(
        cell.checkpoint,
        dtype=getattr(torch, cell.quantization.compute_dtype),
        device=plan.device,
        attention=cell.attention,
    )


def quantized(
    cell: Cell,
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gathered: Outcome,
    sink: Sink,
    cache: Path,
) -> PreTrainedModel:
    """``model`` quantized as the cell says; raises AuditError where it is not."""
    # Where nothing is to change, a copy of now will do; else memory is needed for quantizing.
    original = None if cell.quantization.precision.quantized else copy.deepcopy(model)
    model = _quantize(cell, plan, model, tokenizer, gathered, sink, cache)
    _audit(cell, plan, model, original, gathered, sink)
    return model


def _quantize(
    cell: Cell,
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gathered: Outcome,
    sink: Sink,
    cache: Path,
) -> PreTrainedModel:
    from qbench.quantizers.calibration import read_calibration
    from qbench.quantizers.quantize import quantize

    settings = cell.quantization
    _step(sink, cell.name, "quantize", total=1)
    with measured("quantize", plan.device, gathered.stages) as detail:
        calibration = None
        if settings.needs_calibration:
            source = plan.calibration
            assert source is not None
            calibration = read_calibration(
                source.path,
                tokenizer,
                source.samples,
                source.length,
                source.seed,
                digest=source.digest,
                bos=source.bos,
            )
        quantized = quantize(
            model,
            settings,
            calibration=calibration,
            digest=cell.checkpoint.digest,
            artifacts=cache / "artifacts",
            progress=lambda _, fraction: sink.advance(cell.name, fraction, 1),
        )
        detail.append(quantized.detail)
    return quantized.model


def _audit(
    cell: Cell,
    plan: Plan,
    model: PreTrainedModel,
    original: PreTrainedModel | None,
    gathered: Outcome,
    sink: Sink,
) -> None:
    from qbench.attention.transformers import batch_invariant
    from qbench.quantizers.audit.cell import audit, probe_of

    _step(sink, cell.name, "audit")
    with measured("audit", plan.device, gathered.stages):
        original = original or _original(cell, plan)
        probe = probe_of(original.config.vocab_size).to(plan.device)
        gathered.audit = audit(original, model, cell.quantization, probe, batch_invariant)
        del original
        free(plan.device)
    if not gathered.audit.passed:
        first, rest = gathered.audit.problems[:3], gathered.audit.problems[3:]
        more = f"; and {len(rest)} more, all in the record" if rest else ""
        raise AuditError("audit: " + "; ".join(first) + more)


def _evaluate(
    cell: Cell,
    plan: Plan,
    store: Store,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gathered: Outcome,
    sink: Sink,
    cache: Path,
    known: Ids | None,
) -> None:
    from qbench.evaluation.evaluate import evaluate
    from qbench.evaluation.scoring import language_model
    from qbench.evaluation.tasks import load_task
    from qbench.evaluation.watch import Unwatched, watcher

    scoring = cell.scoring
    watch = Unwatched()
    if plan.recipe.evaluation.damage:
        watch = watcher(
            scoring,
            cell=cell.grid_cell,
            quantized=cell.quantization.precision.quantized,
            base=cell.base,
            store=store,
            folder=distributions_folder(cache),
            waits=lambda other: _step(sink, cell.name, f"waits for {other}"),
        )
    with measured("evaluate", plan.device, gathered.stages):
        scorer = language_model(
            model,
            tokenizer,
            scoring,
            progress=lambda done, total: sink.advance(cell.name, done, total),
            observer=watch.observer,
            known=known,
        )
        tasks = []
        for planned in plan.tasks:
            watch.begin(planned.name)
            _step(sink, cell.name, f"evaluate {planned.name}", unit="requests")
            tasks.append(load_task(planned))
            result = evaluate(scorer, tasks[-1], scoring)
            watch.end(planned.name)
            gathered.scores += result.scores
            gathered.outcomes.append(result.outcomes)
            gathered.responses.append(result.responses)
        gathered.scoring = scorer.report()
        gathered.damage = watch.finish(*gathered.tables(), tuple(gathered.scores), tasks)
    gathered.stages[-1] = without(gathered.stages[-1], watch.waited)


def one_line(problem: Exception, log: Path) -> str:
    """What went wrong with a cell, for its record."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if isinstance(problem, QbenchError):
        return " ".join(lines)
    first = lines[0] if lines else ""
    return f"{type(problem).__name__}: {first} (the traceback is in {log.name})"


def free(device: str) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
