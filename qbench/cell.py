"""A cell's work: load, attend, quantize, audit, evaluate → CellResult."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from qbench.attention.implementation import NATIVE
from qbench.attention.transformers import batch_invariant
from qbench.cell_result import CellResult
from qbench.checkpoints.find import elements
from qbench.checkpoints.load import (
    generation_settings,
    load_model,
    load_prequantized,
    without_weights,
)
from qbench.checkpoints.tokenizer import load_tokenizer, puts_bos
from qbench.code import code_digest
from qbench.errors import AuditError, QbenchError, ResultsError, UnavailableError
from qbench.evaluation.baseline import baseline_file, read_baseline
from qbench.evaluation.degradation import Outcomes, correct_requests, damage, divergence_table
from qbench.evaluation.evaluate import evaluate, group_scores
from qbench.evaluation.kl import BaselineHiddenStates, BaselineWriter, KLObserver
from qbench.evaluation.llamacpp import LlamaCpp
from qbench.evaluation.lm_eval_model import external_model
from qbench.evaluation.loaded import LoadedTask, load_task
from qbench.evaluation.scoring import language_model
from qbench.evaluation.scoring.forward import fastest_mode
from qbench.machine import free, hardware
from qbench.plan import Cell, Plan, streams
from qbench.quantizers.audit.cell import audit, probe_of
from qbench.quantizers.calibration import read_calibration
from qbench.quantizers.linear import linearize
from qbench.quantizers.quantize import quantize
from qbench.quantizers.stored_bits import write_gguf_into
from qbench.records import Record, Unavailable
from qbench.store import Store
from qbench.streaming import is_spread, spread, stream, stream_of

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SECOND_MODEL = 12 << 30  # bytes that an original may take beside the same model, unquantized


def compute(result: CellResult, store: Store, cache: Path) -> None:
    """Scores and all else of one cell into its ``result``. ``cache`` keeps quantized weights and
    unquantized distributions."""
    cell, plan = result.cell, result.plan
    result.progress.stage(cell.name, "prepare")
    tasks = _prepare(cell, plan)
    result.documents = {task.name: task.digest for task in tasks}
    with result.stage("load") as detail:
        model, tokenizer = load(cell, plan)
        cell = result.cell = as_measured(cell, plan, model, detail)
        if stream_of(model) is not None:
            detail.append("block by block")
        elif is_spread(model):
            detail.append("over several GPUs")
    model = quantized(result, model, tokenizer, cache)
    with result.measured("evaluate"):
        base, observer = _observer(result, store, cache)
        scorer = language_model(
            model, tokenizer, cell.scoring, progress=result.advance, observer=observer
        )
        _evaluate(result, scorer, tasks)
        if isinstance(observer, BaselineWriter):
            _keep(result, observer, cache)
        elif base is not None:
            assert observer is not None
            _measure_damage(result, base, observer, store, tasks, tokenizer)


def _prepare(cell: Cell, plan: Plan) -> list[LoadedTask]:
    """What can fail without a model, first: is this the device that the cell's key speaks of, and
    are its data here?"""
    if plan.hardware is not None and (here := hardware(plan.device)) != plan.hardware:
        raise UnavailableError(
            f"planned for {plan.hardware}, but this worker has {here}; run on GPUs of one kind"
        )
    if code_digest() != cell.key_parts["code"]:
        raise UnavailableError("qbench's own code changed after this run began; run again")
    folder = cell.checkpoint.folder
    return [load_task(task, folder if task.needs_tokenizer else None) for task in plan.tasks]


def load(cell: Cell, plan: Plan) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The cell's checkpoint on the plan's device, not yet quantized unless it was published so,
    and its tokenizer."""
    weights = cell.quantization.weights
    if cell.runtime == "lm-eval":
        model = external_model(weights.model, weights.args)
    elif cell.runtime == "llama.cpp":
        model = LlamaCpp(
            cell.copy.folder,
            context=cell.scoring.max_length,
            shell=without_weights(cell.checkpoint),
        )
    elif cell.copy is None:
        model = load_original(cell, plan)
    else:
        model = load_prequantized(
            cell.copy,
            dtype=getattr(torch, cell.quantization.compute_dtype),
            device=plan.device,
            attention=cell.attention,
            fallback=plan.recipe.evaluation.attention == "auto",
            dequantize=weights.weights_only,
        )
        linearize(model)  # so that each expert can be held against its original
        model.generation_config = generation_settings(cell.checkpoint)  # as its original answers
    return model, load_tokenizer(cell.checkpoint)


def as_measured(cell: Cell, plan: Plan, model: Any, detail: list[str]) -> Cell:
    """Return ``cell`` with the attention and the scoring mode in which ``model``, loaded and not
    yet quantized, computes what its class does; append to ``detail`` why they are not the planned
    ones. Raises UnavailableError if the recipe rules them out."""
    if cell.runtime != "transformers":
        return cell
    attention = model.chosen_attention
    if attention.normalizer == NATIVE and cell.quantization.kv_cache is not None:
        raise UnavailableError(
            f"the KV cache is quantized in qbench's attention, and {cell.checkpoint.class_name} "
            f"runs on its own: {attention.why}"
        )
    mode, slower = fastest_mode(model, cell.scoring)
    detail += filter(None, [attention.why, slower])
    if slower and not cell.scoring.fallback:
        raise UnavailableError(
            f"evaluation.scoring: {cell.scoring.mode}: {slower}; set scoring: auto or {mode}"
        )
    checkpoint = replace(cell.checkpoint, normalizer=attention.normalizer)
    scoring = cell.scoring
    if slower:
        scoring = replace(scoring, mode=mode, batch_tokens=None, sample=0)
    return replace(cell, checkpoint=checkpoint, attention=attention.implementation, scoring=scoring)


def load_original(
    cell: Cell, plan: Plan, *, verify: bool = True, room: float = math.inf
) -> PreTrainedModel:
    """The unquantized model, whole on a GPU where it takes ``room`` bytes or less."""
    dtype = getattr(torch, cell.quantization.compute_dtype)
    return load_model(
        cell.checkpoint,
        dtype=dtype,
        device=plan.device,
        attention=cell.attention,
        fallback=plan.recipe.evaluation.attention == "auto",
        place=offload_policy(cell, plan, dtype.itemsize, room),
        verify=verify,
    )


def offload_policy(
    cell: Cell, plan: Plan, itemsize: int, room: float
) -> Callable[[PreTrainedModel], PreTrainedModel] | None:
    """What puts a model over several GPUs, or lets it come block by block, as the recipe says or
    where it would take more than ``room`` bytes; None where it lies on its device."""
    asked = plan.recipe.evaluation
    if asked.device_map is not None:
        count = torch.cuda.device_count() if plan.device == "cuda" else 1
        return partial(spread, devices=[f"{plan.device}:{index}" for index in range(count)])

    def least() -> float:
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return min(room, torch.cuda.mem_get_info()[0] + cached)

    weights = elements(cell.checkpoint.headers) * itemsize
    return partial(stream, device=plan.device) if streams(cell, plan, weights, least) else None


def quantized(
    result: CellResult,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
) -> PreTrainedModel:
    """``model`` quantized as the cell says; raises AuditError where it is not."""
    cell, plan, settings = result.cell, result.plan, result.cell.quantization
    with result.stage("quantize") as detail:
        calibration = None
        if settings.needs_calibration:
            assert plan.calibration is not None
            text = plan.calibration
            if text.bos is None:
                text = replace(text, bos=puts_bos(tokenizer))
            calibration = read_calibration(text, tokenizer)
        model, how = quantize(
            model,
            settings,
            calibration=calibration,
            digest=cell.checkpoint.digest,
            artifacts=cache / "artifacts",
            normalizer_source=cell.key_parts.get("normalizer source"),
            progress=result.advance,
        )
        detail.append(how)
    _audit(result, model)
    return model


def _audit(result: CellResult, model: PreTrainedModel) -> None:
    cell, plan = result.cell, result.plan
    if cell.alone or cell.runtime == "lm-eval":
        return  # there is nothing to hold against anything: the record is not audited
    with result.stage("audit"):
        # Read from disk again, for unquantized cells too.
        room = math.inf if cell.quantization.precision.quantized else SECOND_MODEL
        original = load_original(cell, plan, verify=cell.copy is not None, room=room)
        probe = probe_of(original.config.vocab_size).to(plan.device)
        wrong: list[str] = []
        if cell.runtime == "llama.cpp":
            runtime, model = model, load_original(cell, plan)
            linearize(model)  # Conv1D as llama.cpp has it
            write_gguf_into(model, str(cell.copy.folder))
            wrong = runtime.disagreement(model, probe[:, : cell.scoring.max_length])
        found = audit(original, model, cell.quantization, probe, batch_invariant)
        problems = (*wrong, *found.problems)
        result.audit = found.model_copy(update={"problems": problems, "passed": not problems})
        del original
        free(plan.device)
    if not result.audit.passed:
        first, rest = result.audit.problems[:3], result.audit.problems[3:]
        more = f"; and {len(rest)} more, all in the record" if rest else ""
        raise AuditError("audit: " + "; ".join(first) + more)


def _observer(
    result: CellResult, store: Store, cache: Path
) -> tuple[Record | None, BaselineWriter | KLObserver | None]:
    """The record that a quantized cell is measured against, with what measures it; of an
    unquantized cell, what keeps its hidden states for the others. Neither where damage is not
    measured, and ``result`` says why."""
    cell = result.cell
    if not result.plan.recipe.evaluation.damage:
        return None, None
    if cell.scoring.mode == "lm-eval" and cell.runtime != "lm-eval":
        reason = "scoring: lm-eval does not give its log-probabilities"
        result.damage = Unavailable(reason=reason)
    elif not cell.quantization.precision.quantized:
        return None, BaselineWriter()
    elif cell.base is None:
        reason = "the recipe has no unquantized cell to compare with"
        result.damage = Unavailable(reason=reason)
    else:
        try:
            base = read_baseline(cell.base, store, cache)
            return base, KLObserver(BaselineHiddenStates.load(baseline_file(cache, base.key)))
        except ResultsError as error:
            result.damage = Unavailable(reason=str(error), retry=True)
    return None, None


def _evaluate(result: CellResult, scorer: Any, tasks: Sequence[LoadedTask]) -> None:
    """Scores of every task; a task that cannot be scored is named, and the others are kept."""
    cell, progress = result.cell, result.progress
    failure, tables = None, []
    for task in tasks:
        progress.stage(cell.name, f"evaluate {task.name}")
        try:
            scored = evaluate(scorer, task, cell.scoring)
        except QbenchError as error:
            failure = failure or error
            result.failed_tasks[task.name] = " ".join(str(error).split())
            progress.log(f"{cell.name}: {task.name} could not be scored: {error}", "bold red")
            continue
        result.scores += scored.scores
        tables.append((scored.outcomes, scored.responses))
    if failure is not None and not result.scores:
        raise failure
    for name, each in zip(("outcomes", "responses"), zip(*tables, strict=True), strict=True):
        result.tables[name] = pd.concat(each, ignore_index=True)
    result.groups = group_scores(result.plan.groups, result.scores)
    result.scoring = scorer.report()


def _keep(result: CellResult, observer: BaselineWriter, cache: Path) -> None:
    """What the quantized cells of this one's checkpoint are measured against."""
    cell = result.cell
    try:
        observer.hidden_states().save(baseline_file(cache, cell.key), cell.key)
    except ResultsError as error:
        line = f"{cell.name}: scored, but its damage could not be measured: {error}"
        result.progress.log(line, "bold red")


def _measure_damage(
    result: CellResult,
    base: Record,
    observer: KLObserver,
    store: Store,
    tasks: Sequence[LoadedTask],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    before = Outcomes(
        outcomes=store.outcomes(base), responses=store.responses(base), scores=base.scores
    )
    after = Outcomes(**result.tables, scores=tuple(result.scores))
    limit = result.cell.scoring.limit
    result.damage = damage(
        before,
        after,
        measured=observer.divergences,
        correct={task.name: correct_requests(task, limit) for task in tasks},
    )
    if observer.divergences:
        whole = {task.name for task in tasks if task.kind == "loglikelihood_rolling"}
        result.tables["divergences"] = divergence_table(
            observer.divergences, whole, partial(token_texts, tokenizer)
        )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """The text of each token by itself, with the space that SentencePiece marks at its start."""
    known = {}
    for token in set(ids.tolist()):
        text = tokenizer.decode([token])
        marked = str(tokenizer.convert_ids_to_tokens(token)).startswith("▁")
        known[token] = f" {text}" if marked and not text.startswith(" ") else text
    return [known[token] for token in ids.tolist()]
