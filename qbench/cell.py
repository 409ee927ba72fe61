"""Compute one cell: load, quantize, audit and evaluate a model, into a ``CellResult``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qbench.attention import NATIVE
from qbench.cell_result import CellResult
from qbench.checkpoints.find import elements
from qbench.checkpoints.load import (
    generation_settings,
    load_model,
    load_prequantized,
    unlike_files,
    without_weights,
)
from qbench.checkpoints.tokenizer import load_tokenizer, puts_bos
from qbench.errors import AuditError, CheckpointError, UnavailableError
from qbench.files import code_digest
from qbench.machine import free, hardware
from qbench.made_copy import with_made_copy
from qbench.plan import Cell, Plan, streams
from qbench.quantizers.audit.compare import audit, probe_of
from qbench.quantizers.calibration import Calibration, read_calibration
from qbench.quantizers.config import backend
from qbench.quantizers.linear import linearize
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.quantize import quantize
from qbench.quantizers.stored_bits import write_gguf_into
from qbench.store import Store
from qbench.streaming import free_gpu_bytes, is_sharded, shard, stream, stream_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qbench.progress import Advance


def compute(
    result: CellResult, store: Store, cache: Path, *, reuse: bool = True,
    base_at_work: Path | None = None,
) -> None:  # fmt: skip
    """Load, quantize, audit and score one cell into ``result``.

    ``cache`` keeps quantized weights, the unquantized model's hidden states and finished tasks,
    which are not scored again unless ``reuse`` is false. ``store`` is only read: the unquantized
    cell's record. While the file ``base_at_work`` exists, another process computes that cell, and
    each task is scored once its hidden states are there. A task that fails is named in ``result``
    and the others are kept. Raises QbenchError if none is left, or if the cell cannot be loaded,
    quantized or audited.
    """
    cell, plan = result.cell, result.plan
    result.progress.stage(cell.name, "prepare")
    if plan.hardware is not None and (here := hardware(plan.device)) != plan.hardware:
        raise UnavailableError(
            f"planned for {plan.hardware}, but this worker has {here}; run on GPUs of one kind"
        )
    if code_digest() != cell.key_parts["code"]:
        raise UnavailableError("qbench's own code changed after this run began; run again")
    tokenizer = load_tokenizer(cell.checkpoint)
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    if ends == (None, None) and cell.quantization.runtime != "lm-eval":
        raise CheckpointError(
            f"checkpoint {cell.checkpoint.source}: its tokenizer has neither a BOS nor an EOS "
            "token, and lm-eval puts one of them before texts; name one in tokenizer_config.json"
        )
    # lm-eval is imported, tasks loaded and their requests built while weights are read
    with ThreadPoolExecutor(1) as thread:
        code = thread.submit(import_module, "qbench.cell_tasks")
        loading = thread.submit(lambda: code.result().load_tasks(result))
        for settings in cell.quantization.parts.values():
            thread.submit(backend, settings)  # imports it: hqq takes a second and more
        building = thread.submit(lambda: code.result().build(result, loading.result(), tokenizer))
        if isinstance(cell.quantization.weights, LibraryMade):
            loading.result()  # may raise, before a library works for minutes
            with result.stage("make") as detail:
                calibration = calibration_of(cell, tokenizer)
                cell, how = with_made_copy(cell, calibration, cache, plan.device)
                result.cell = cell
                detail.append(how)
        with result.stage("load") as detail:
            model = load(cell, plan)
            cell = result.cell = as_measured(cell, plan, model, detail)
            if stream_of(model) is not None:
                detail.append("block by block")
            elif is_sharded(model):
                detail.append("over several GPUs")
        tasks = loading.result()
        result.documents = {task.name: task.digest for task in tasks}
        model = quantized(result, model, tokenizer, cache)
        evaluation = code.result().Evaluation(result, tokenizer, store, cache, base_at_work)
        if base_at_work is not None and base_at_work.exists():
            with result.stage("wait", shown=False):
                evaluation.read_base(tasks[0].name)
        with result.stage("evaluate", shown=False):  # but each of its tasks is
            building.exception()  # waits; what cannot be built says so when its task is scored
            evaluation.run(model, tasks, reuse)


def load(cell: Cell, plan: Plan) -> Any:
    """Return the cell's model, not yet quantized unless it was published so: of transformers on the
    plan's device, else an object of lm-eval or llama.cpp."""
    weights = cell.quantization.weights
    if cell.quantization.runtime != "transformers":
        from qbench.evaluation.llamacpp import LlamaCpp, external_model  # lm-eval

    if cell.quantization.runtime == "lm-eval":
        return external_model(weights.model, weights.args)
    if cell.quantization.runtime == "llama.cpp":
        shell = without_weights(cell.checkpoint)
        return LlamaCpp(cell.copy.folder, context=cell.scoring.max_length, shell=shell)
    if cell.copy is None:
        return load_original(cell, plan)
    return load_copy(cell, plan.device, fallback=plan.recipe.evaluation.attention == "auto")


def load_copy(cell: Cell, device: str, *, fallback: bool) -> PreTrainedModel:
    """Return the model of the cell's published copy on ``device``, its fused experts split into
    linear layers, with the original's generation settings. If qbench's attention gives other logits
    than the class's own, the model runs on its class's with ``fallback``, and is refused
    without."""
    model = load_prequantized(
        cell.copy,
        dtype=getattr(torch, cell.quantization.compute_dtype),
        device=device,
        attention=cell.attention,
        fallback=fallback,
        dequantize=cell.quantization.weights.weights_only,
        rounds_activations=cell.quantization.amplifies_rounding,
    )
    linearize(model)  # so that each expert can be held against its original
    model.generation_config = generation_settings(cell.checkpoint)  # as its original answers
    return model


def as_measured(cell: Cell, plan: Plan, model: Any, detail: list[str]) -> Cell:
    """Return ``cell`` with the attention and the scoring mode that suit ``model``, by measurement
    (it is loaded, not yet quantized); a cell of another runtime as it is. Append to ``detail`` why
    they differ from the planned ones. Raises UnavailableError if the recipe rules them out."""
    if cell.quantization.runtime != "transformers":
        return cell
    attention = model.chosen_attention
    if attention.normalizer == NATIVE and cell.quantization.kv_cache is not None:
        raise UnavailableError(
            "the KV cache is quantized inside qbench's attention, but "
            f"{cell.checkpoint.class_name} runs with its own attention: {attention.why}; leave kv "
            "out"
        )
    from qbench.evaluation.scoring.forward import fit_settings  # lm-eval, imported meanwhile

    scoring, slower = fit_settings(model, cell.scoring)
    detail += filter(None, [attention.why, slower])
    if scoring.mode != cell.scoring.mode and not cell.scoring.fallback:
        raise UnavailableError(
            f"evaluation.scoring: {cell.scoring.mode}: {slower}; set scoring: auto or "
            f"{scoring.mode}"
        )
    checkpoint = replace(cell.checkpoint, normalizer=attention.normalizer)
    return replace(cell, checkpoint=checkpoint, attention=attention.implementation, scoring=scoring)


def load_original(cell: Cell, plan: Plan, *, verify: bool = True) -> PreTrainedModel:
    """Return the cell's checkpoint as an unquantized model, on the plan's device or placed by
    ``offload_policy``. Without ``verify``, what an earlier load has measured is not measured
    again."""
    dtype = getattr(torch, cell.quantization.compute_dtype)
    return load_model(
        cell.checkpoint,
        dtype=dtype,
        device=plan.device,
        attention=cell.attention,
        fallback=plan.recipe.evaluation.attention == "auto",
        place=offload_policy(cell, plan, dtype.itemsize),
        verify=verify,
    )


def offload_policy(
    cell: Cell, plan: Plan, itemsize: int
) -> Callable[[PreTrainedModel], PreTrainedModel] | None:
    """Return a function that shards a model over the GPUs (``device_map``), or streams its blocks
    (if the recipe says so or the GPU's memory is too small); None if the model stays on its device.
    ``itemsize``: bytes per weight."""
    evaluation = plan.recipe.evaluation
    if evaluation.device_map is not None:
        count = torch.cuda.device_count() if plan.device == "cuda" else 1
        return partial(shard, devices=[f"{plan.device}:{index}" for index in range(count)])
    weights = elements(cell.checkpoint.headers) * itemsize
    if streams(cell, plan, weights, free_gpu_bytes):
        return partial(stream, device=plan.device)
    return None


def quantized(
    result: CellResult, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Path
) -> PreTrainedModel:
    """Return ``model`` quantized by the cell's settings, after an audit against its original, whose
    result goes into ``result``. Without an original, and for a model of lm-eval, nothing is
    audited. Raises AuditError if the audit fails."""
    cell, plan = result.cell, result.plan
    original = _copy_of_original(cell, model)
    with result.stage("quantize") as detail:
        model, how = quantized_model(cell, model, tokenizer, cache, result.advance)
        detail.append(how)
    if cell.without_baseline or cell.quantization.runtime == "lm-eval":
        return model  # there is nothing to compare it with: the record is not audited
    with result.stage("audit"):
        audited, wrong = model, list[str]()
        if cell.copy is None and not cell.quantization.parts:
            original, wrong = model, unlike_files(model, cell.checkpoint)
        elif original is None:  # read again: quantizing has changed the first
            original = load_original(cell, plan, verify=cell.copy is not None)
        probe = probe_of(original.config.vocab_size).to(plan.device)
        if cell.quantization.runtime == "llama.cpp":
            audited = load_original(cell, plan)
            linearize(audited)  # Conv1D as llama.cpp has it
            write_gguf_into(audited, str(cell.copy.folder))
            wrong = model.disagreement(audited, probe[:, : cell.scoring.max_length])
        measured = audit(original, audited, cell.quantization, probe, result.advance)
        problems = (*wrong, *measured.problems)
        result.audit = measured.model_copy(update={"problems": problems, "passed": not problems})
        del original, audited
        free(plan.device)
    if not result.audit.passed:
        first, rest = result.audit.problems[:3], result.audit.problems[3:]
        more = f"; and {len(rest)} more, all in the record" if rest else ""
        raise AuditError("audit: " + "; ".join(first) + more)
    return model


def _copy_of_original(cell: Cell, model: Any) -> PreTrainedModel | None:
    """Return a copy of the unquantized ``model``, which quantizing will change, for the audit. None
    if the audit is to read the files: nothing is quantized here, or the one GPU that holds all of
    the model has less than three times its size free, eight with calibration, which quantizing may
    need."""
    made_here = cell.copy is None and cell.quantization.parts and not cell.without_baseline
    if not made_here or cell.quantization.runtime != "transformers" or stream_of(model) is not None:
        return None
    if model.device.type != "cuda" or is_sharded(model):
        return None
    times = 8 if cell.quantization.needs_calibration else 3
    small = times * model.get_memory_footprint() < free_gpu_bytes(model.device)
    return deepcopy(model) if small else None


def quantized_model(
    cell: Cell, model: Any, tokenizer: PreTrainedTokenizerBase, cache: Path, progress: Advance
) -> tuple[PreTrainedModel, str]:
    """Return ``model`` quantized, and a line for the log that says how. The quantized weights are
    read from ``cache``, or made and kept there. ``model`` must not be used afterwards; it is
    returned as it is if the cell is unquantized or was loaded quantized."""
    return quantize(
        model,
        cell.quantization,
        calibration=calibration_of(cell, tokenizer),
        digest=cell.checkpoint.digest,
        artifacts=cache / "artifacts",
        normalizer_source=cell.key_parts.get("normalizer source"),
        progress=progress,
    )


_calibration: dict[Any, Calibration] = {}  # the last text that this process has read


def calibration_of(cell: Cell, tokenizer: PreTrainedTokenizerBase) -> Calibration | None:
    """Return the cell's calibration text as token ids of ``tokenizer``; None if it has none. Raises
    EvaluationError for ids that the model does not embed."""
    text = cell.calibration
    if text is None:
        return None
    if text.bos is None:
        text = replace(text, bos=puts_bos(tokenizer))
    key = text, cell.key_parts["checkpoint"]["tokenizer"]
    if key not in _calibration:
        _calibration.clear()
        _calibration[key] = read_calibration(text, tokenizer)
    calibration = _calibration[key]
    config = cell.checkpoint.config
    from qbench.evaluation.scoring.batching import check_tokens  # lm-eval

    if rows := config.get("text_config", config).get("vocab_size"):
        check_tokens([[int(calibration.ids.max())]], rows)
    return calibration
