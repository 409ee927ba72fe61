"""Cell → Record: load, attend, quantize, audit, evaluate; and the loop over a grid."""

from __future__ import annotations

import gc
import os
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock, Timeout

from qbench.environment import environment, measured
from qbench.errors import AuditError, QbenchError
from qbench.plan import Cell, Plan
from qbench.progress import Display
from qbench.quantizers import requirements
from qbench.quiet import redirected
from qbench.record import Audit, Record, Score, Stage
from qbench.store import Store

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE_SHAPE = (2, 128)  # sequences, tokens: what the audit compares logits on


def cache_folder() -> Path:
    """Where quantized weights are kept: $QBENCH_CACHE, else ~/.cache/qbench."""
    return Path(os.environ.get("QBENCH_CACHE") or Path.home() / ".cache" / "qbench")


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What is known of a cell so far; a failure leaves the rest as it is."""

    started: datetime
    stages: list[Stage] = field(default_factory=list)
    audit: Audit | None = None
    scores: list[Score] = field(default_factory=list)
    outcomes: list[pd.DataFrame] = field(default_factory=list)
    responses: list[pd.DataFrame] = field(default_factory=list)
    scoring: dict[str, Any] = field(default_factory=dict)
    attention: str = ""


def run(cell: Cell, plan: Plan, store: Store, display: Display) -> Record:
    """Run one cell and put its record into the store, whether it worked or not."""
    gathered = Outcome(started=datetime.now(UTC))
    log = store.log(cell.place)
    error = None
    with redirected(log):
        try:
            _run(cell, plan, gathered, display)
        except Exception as problem:
            traceback.print_exc()
            error = _one_line(problem, log)
        finally:
            _free(plan.device)
    record = Record(
        key=cell.key,
        key_parts=cell.key_parts,
        checkpoint=cell.checkpoint_name,
        quantizer=cell.quantizer.label,
        method=cell.quantizer.settings.method,
        bits=cell.quantizer.settings.bits,
        normalizer=cell.checkpoint.normalizer,
        attention=gathered.attention or f"{cell.checkpoint.normalizer}/{cell.attention}",
        status="failed" if error else "ok",
        error=error,
        scores=() if error else tuple(gathered.scores),
        audit=gathered.audit,
        scoring=gathered.scoring,
        stages=tuple(gathered.stages),
        environment=environment(plan.device, requirements(cell.quantizer.settings)),
        started=gathered.started,
        finished=datetime.now(UTC),
    )
    whole = error is None
    store.put(
        record,
        pd.concat(gathered.outcomes, ignore_index=True) if whole else None,
        pd.concat(gathered.responses, ignore_index=True) if whole else None,
    )
    return record


def run_grid(
    plan: Plan, store: Store, display: Display, *, cells: Sequence[Cell], force: bool = False
) -> list[Record]:
    """Run every cell that has no good record yet. Cells that another run is at work on come
    last, when that run has finished them. Returns the records of ``cells``, in order."""
    store.put_grid(plan.grid)
    waiting = deque((cell, False) for cell in cells)
    done: dict[str, Record] = {}
    while waiting:
        cell, wait = waiting.popleft()
        try:
            with FileLock(store.lock_file(cell.place), timeout=-1 if wait else 0):
                known = store.get(cell.place)
                if known is not None and known.status == "ok" and (wait or not force):
                    record = known
                    with display.cell(cell.name):
                        display.say(f"{cell.name}: already there")
                else:
                    with display.cell(cell.name):
                        record = run(cell, plan, store, display)
                    _report(record, display)
        except Timeout:
            display.say(f"{cell.name}: another run is at work on it; later")
            waiting.append((cell, True))
            continue
        done[cell.name] = record
    return [done[cell.name] for cell in cells]


def _run(cell: Cell, plan: Plan, gathered: Outcome, display: Display) -> None:
    model, tokenizer = _load(cell, plan, gathered, display)
    model = _quantize(cell, plan, model, tokenizer, gathered, display)
    _audit(cell, plan, model, gathered, display)
    _evaluate(cell, plan, model, tokenizer, gathered, display)


def _load(
    cell: Cell, plan: Plan, gathered: Outcome, display: Display
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from qbench.checkpoints import load_tokenizer

    display.step("load")
    with measured("load", plan.device, gathered.stages):
        tokenizer = load_tokenizer(cell.checkpoint)
        model = _original(cell, plan)
    return model, tokenizer


def _original(cell: Cell, plan: Plan) -> PreTrainedModel:
    import torch

    from qbench.checkpoints import load_model

    return load_model(
        cell.checkpoint,
        dtype=getattr(torch, cell.quantizer.settings.compute_dtype),
        device=plan.device,
        attention=cell.attention,
    )


def _quantize(
    cell: Cell,
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gathered: Outcome,
    display: Display,
) -> PreTrainedModel:
    from qbench.quantizers.calibration import read_calibration
    from qbench.quantizers.quantization import quantize

    settings = cell.quantizer.settings
    display.step("quantize", total=1)
    with measured("quantize", plan.device, gathered.stages) as detail:
        calibration = None
        if settings.needs_calibration:
            source = plan.calibration
            assert source is not None
            calibration = read_calibration(
                Path(source.path), tokenizer, source.samples, source.length, source.seed
            )
        quantized = quantize(
            model,
            tokenizer,
            settings,
            calibration=calibration,
            digest=cell.checkpoint.digest,
            artifacts=cache_folder() / "artifacts",
            progress=lambda _, fraction: display.advance(fraction, 1),
        )
        detail.append(quantized.detail)
    return quantized.model


def _audit(
    cell: Cell, plan: Plan, model: PreTrainedModel, gathered: Outcome, display: Display
) -> None:
    from qbench.quantizers.audit import audit

    display.step("audit")
    with measured("audit", plan.device, gathered.stages):
        original = _original(cell, plan)
        probe = _probe(original.config.vocab_size).to(plan.device)
        gathered.audit = audit(original, model, cell.quantizer.settings, probe)
        del original
        _free(plan.device)
    if not gathered.audit.passed:
        raise AuditError("; ".join(gathered.audit.problems))


def _evaluate(
    cell: Cell,
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    gathered: Outcome,
    display: Display,
) -> None:
    from qbench.evaluation.evaluate import evaluate
    from qbench.evaluation.scoring import language_model

    scoring = cell.scoring
    with measured("evaluate", plan.device, gathered.stages):
        scorer = language_model(
            model,
            tokenizer,
            mode=scoring.mode,
            batch_size=scoring.batch_size,
            max_length=scoring.max_length,
            add_bos=scoring.add_bos,
            softmax_dtype=scoring.softmax_dtype,
            tolerance=scoring.tolerance,
            progress=lambda done, total: display.advance(done, total),
        )
        for task in plan.tasks:
            display.step(f"evaluate {task.name}", unit="requests")
            result = evaluate(scorer, task, limit=scoring.limit, seed=scoring.seed)
            gathered.scores += result.scores
            gathered.outcomes.append(result.outcomes)
            gathered.responses.append(result.responses)
        gathered.scoring = scorer.report()


def _probe(vocabulary: int) -> torch.Tensor:
    """Seeded token ids [B, T] on which the audit compares logits."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, PROBE_SHAPE, generator=generator)


def _report(record: Record, display: Display) -> None:
    if record.status == "failed":
        display.say(f"{record.cell}: FAILED: {record.error}", style="bold red")
        return
    seconds = {stage.name: stage.seconds for stage in record.stages}
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    proof = ""
    if record.audit is not None and record.bits is not None:
        proof = (
            f"; {record.audit.bits_per_weight:.2f} bits a weight, "
            f"error {record.audit.weight_error:.3f}"
        )
    display.say(f"{record.cell}: done ({parts}{proof})")


def _one_line(problem: Exception, log: Path) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if isinstance(problem, QbenchError):
        return " ".join(lines)
    first = lines[0] if lines else ""
    return f"{type(problem).__name__}: {first} (the traceback is in {log.name})"


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
