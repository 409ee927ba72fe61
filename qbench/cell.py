"""Compute one cell: load, quantize, audit and evaluate a model, into a ``CellResult``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from qbench.attention import NATIVE
from qbench.attention.transformers import batch_invariant
from qbench.cell_result import CellResult, TaskResult
from qbench.checkpoints.find import elements
from qbench.checkpoints.load import (
    generation_settings,
    load_model,
    load_prequantized,
    unlike_files,
    without_weights,
)
from qbench.checkpoints.tokenizer import load_tokenizer, puts_bos
from qbench.errors import (
    AuditError,
    CheckpointError,
    DataError,
    EvaluationError,
    OutputError,
    QbenchError,
    ResultsError,
    UnavailableError,
)
from qbench.evaluation.answers import Answered, answer, with_kl
from qbench.evaluation.evaluate import (
    Instances,
    LoadedTask,
    ask,
    build_ahead,
    check_documents,
    group_scores,
    in_turn,
    judge,
    load_task,
)
from qbench.evaluation.kl_observer import (
    BaselineHiddenStates,
    BaselineWriter,
    KLObserver,
    distributions,
    divergence_table,
)
from qbench.evaluation.llamacpp import LlamaCpp, external_model
from qbench.evaluation.scoring import language_model
from qbench.evaluation.scoring.batching import check_tokens, requests_of
from qbench.evaluation.scoring.forward import fit_settings
from qbench.evaluation.scoring.generate import end_tokens
from qbench.evaluation.settings import tolerance_violation
from qbench.files import code_digest
from qbench.machine import free, garbage_seldom, hardware
from qbench.made_copy import with_made_copy
from qbench.plan import Cell, Plan, streams
from qbench.quantizers.audit.compare import audit, probe_of
from qbench.quantizers.calibration import Calibration, read_calibration
from qbench.quantizers.config import backend
from qbench.quantizers.linear import linearize
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.quantize import quantize
from qbench.quantizers.stored_bits import write_gguf_into
from qbench.records import CellKey, ScoringReport, TaskDamage, TaskRecord, Unavailable
from qbench.store import Store, Table, TaskStore, baseline_files, task_key, verify_baseline
from qbench.streaming import free_gpu_bytes, is_sharded, shard, stream, stream_of

if TYPE_CHECKING:
    import numpy as np
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
    # tasks are loaded and their requests built while weights are read
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(_load_tasks, result)
        for settings in cell.quantization.parts.values():
            thread.submit(backend, settings)  # imports it: hqq takes a second and more
        encode = None
        if plan.device == "cuda" and cell.scoring.mode != "lm-eval":  # cores have little to do
            encode = partial(requests_of, tokenizer, add_bos=cell.scoring.add_bos)
        building = thread.submit(lambda: build_ahead(loading.result(), cell.scoring, encode))
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
        evaluation = _Evaluation(result, tokenizer, store, cache, base_at_work)
        if base_at_work is not None and base_at_work.exists():
            with result.stage("wait", shown=False):
                evaluation.read_base(tasks[0].name)
        with result.stage("evaluate", shown=False):  # but each of its tasks is
            building.exception()  # waits; what cannot be built says so when its task is scored
            evaluation.run(model, tasks, reuse)


def _load_tasks(result: CellResult) -> list[LoadedTask]:
    """Load the planned tasks and check their documents; return those that can be scored. The others
    are named in ``result``. Raises DataError if none is left."""
    cell, plan = result.cell, result.plan
    folder = cell.checkpoint.folder
    tasks, failure = [], None
    for spec in plan.tasks:
        try:
            task = load_task(spec, folder if spec.needs_tokenizer else None)
            check_documents(task, cell.scoring.limit)
        except DataError as error:
            failure = failure or error
            _note_failure(result, spec.name, error)
            continue
        tasks.append(task)
    if failure is not None and not tasks:
        raise failure
    return tasks


def _note_failure(result: CellResult, task: str, error: QbenchError) -> None:
    """Note that ``task`` cannot be scored, in the result and in the log."""
    result.failed_tasks[task] = " ".join(str(error).split())
    line = f"{result.cell.name}: {task} could not be scored: {error}"
    result.progress.log(line, "bold red")


def load(cell: Cell, plan: Plan) -> Any:
    """Return the cell's model, not yet quantized unless it was published so: of transformers on the
    plan's device, else an object of lm-eval or llama.cpp."""
    weights = cell.quantization.weights
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
    scoring, slower = fit_settings(model, cell.scoring)
    detail += filter(None, [attention.why, slower])
    if scoring.mode != cell.scoring.mode and not cell.scoring.fallback:
        raise UnavailableError(
            f"evaluation.scoring: {cell.scoring.mode}: {slower}; set scoring: auto or "
            f"{scoring.mode}"
        )
    checkpoint = replace(cell.checkpoint, normalizer=attention.normalizer)
    return replace(cell, checkpoint=checkpoint, attention=attention.implementation, scoring=scoring)


@garbage_seldom()  # of the tasks that are loaded meanwhile
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
    result: CellResult,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
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
        measured = audit(
            original, audited, cell.quantization, probe, batch_invariant, result.advance
        )
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
    if rows := config.get("text_config", config).get("vocab_size"):
        check_tokens([[int(calibration.ids.max())]], rows)
    return calibration


def _baseline(result: CellResult, store: Store, at_work: bool) -> set[str] | None:
    """Return the names of the tasks that the unquantized cell has scored, or is to score while it
    is ``at_work``, against which damage is measured. None: the cell is unquantized or damage is
    switched off, or cannot be had; then ``result.no_damage`` says why."""
    cell = result.cell
    if not result.plan.recipe.evaluation.damage or not cell.quantization.precision.quantized:
        return None
    if cell.scoring.mode == "lm-eval" and cell.quantization.runtime != "lm-eval":
        reason = "scoring: lm-eval does not give its log-probabilities"
        result.no_damage = Unavailable(reason=reason)
    elif cell.base is None:
        reason = "the recipe has no unquantized cell to compare with"
        result.no_damage = Unavailable(reason=reason)
    elif at_work:
        return {task.name for task in result.plan.tasks}
    else:
        why = f"{cell.base.cell} has no finished record; run that cell first, then this one again"
        try:
            record = store.get_valid(cell.base)
            if record is not None and record.status == "ok":
                return {score.task for score in record.scores}
        except ResultsError as error:
            why = str(error)
        result.no_damage = Unavailable(reason=why, retry=True)
    return None


class _Evaluation:
    """Scores the tasks of a cell, each from the cache if it is there, and measures their damage
    against the unquantized cell. ``observer`` sees the hidden states of what is scored."""

    def __init__(
        self, result: CellResult, tokenizer: PreTrainedTokenizerBase, store: Store, cache: Path,
        base_at_work: Path | None,
    ) -> None:  # fmt: skip
        self.result, self.cell, self.tokenizer = result, result.cell, tokenizer
        self.store, self.cache, self.kept = store, cache, TaskStore(cache)
        self.base_at_work = base_at_work
        self.base, self.base_parts = _baseline(result, store, self._base_works()), None
        if self.base is not None:
            self.base_parts = result.plan.cell(self.cell.base.cell).key_parts
        self.observer: BaselineWriter | KLObserver | None = None
        if self.base is not None:
            self.observer = KLObserver(BaselineHiddenStates({}, torch.empty(0), None))
        damage, quantized = result.plan.recipe.evaluation.damage, self.cell.quantization.precision
        gives_probabilities = (
            self.cell.scoring.mode != "lm-eval" or self.cell.quantization.runtime == "lm-eval"
        )
        # whether quantized cells may be measured against this one
        self.is_baseline = damage and not quantized.quantized and gives_probabilities

    def run(self, model: Any, tasks: Sequence[LoadedTask], reuse: bool) -> None:
        """Score ``tasks`` (finished ones come from the cache if ``reuse``) into ``result``. A task
        that fails is named there and the others are kept; raises its error if none is left."""
        cell, result = self.cell, self.result
        done = {task.name: self._finished(task) if reuse else None for task in tasks}
        left = [task for task in tasks if done[task.name] is None]
        if self.is_baseline:
            self.observer = BaselineWriter()
        if left:
            scorer = language_model(
                model, self.tokenizer, cell.scoring, progress=result.advance, observer=self.observer
            )
        failures: list[QbenchError] = []

        def attempt(task: LoadedTask, work: Callable[[], Any]) -> Any:
            """Return ``work()``; None if it raises, after noting the error for ``task``."""
            try:
                return work()
            except QbenchError as error:
                failures.append(error)
                _note_failure(result, task.name, error)
                return None

        def score(task: LoadedTask, asked: Callable[[], Instances]) -> Callable[[], Any] | None:
            self.read_base(task.name)
            result.progress.stage(cell.name, f"evaluate {task.name}")
            work = attempt(task, partial(self._score, scorer, task, asked))
            return work and partial(attempt, task, work)

        judged = dict[str, Future[TaskResult | None]]()
        if left:
            for task, future in in_turn(scorer, left, cell.scoring, score):
                judged[task.name] = future
        done |= {name: future.result() for name, future in judged.items()}
        result.tasks += filter(None, done.values())
        if failures and not result.tasks:
            raise failures[0]
        if groups := result.plan.groups:
            scores = [score for task in result.tasks for score in task.record.scores]
            result.groups = group_scores(groups, scores)

    def _base_works(self) -> bool:
        """Return whether another process still computes the unquantized cell."""
        return self.base_at_work is not None and self.base_at_work.exists()

    def read_base(self, task: str) -> None:
        """Read the hidden states of ``task`` for the observer; wait for them while another process
        computes the unquantized cell."""
        result, waiting = self.result, False
        while self.base is not None:
            working = self._base_works()
            if not working and self.base_at_work is not None:  # it has ended
                self.base_at_work, self.base = None, _baseline(result, self.store, at_work=False)
            try:
                names, before = {task} & (self.base or set()), self.observer.base
                load = BaselineHiddenStates.load
                self.observer.base = load(self.cache, self.base_parts, names, before)
                return
            except ResultsError as error:
                if not working:
                    result.no_damage, self.base = Unavailable(reason=str(error), retry=True), None
                    return
            if not waiting:
                result.progress.stage(self.cell.name, f"wait for {self.cell.base.cell}")
                waiting = True
            time.sleep(0.1)

    def _key(self, task: LoadedTask) -> CellKey:
        """Return the key of one task of the cell in the cache."""
        key = task_key(self.cell.key_parts, task.name, self.base_parts)
        return CellKey(checkpoint=self.cell.checkpoint_name, quantizer=self.cell.label, key=key)

    def _finished(self, task: LoadedTask) -> TaskResult | None:
        """Return the result of ``task`` from the cache; None if it must be scored."""
        try:
            record = self.kept.get_valid(self._key(task))
            if record is None or record.digest != task.digest:
                return None
            if tolerance_violation(self.cell.scoring.tolerance, record.scoring):
                return None
            if self.is_baseline:
                files = baseline_files(self.cache, self.cell.key_parts, [task.name])
                for path, key in files.items():
                    verify_baseline(path, key)
            tables = {name: getattr(self.kept, name)(record) for name in record.files}
        except (ResultsError, OSError):
            return None
        self.result.progress.log(f"{self.cell.name}: {task.name} is taken from the cache")
        return TaskResult(record, tables)

    def _score(
        self, scorer: Any, task: LoadedTask, asked: Callable[[], Instances]
    ) -> Callable[[], TaskResult]:
        """Score one task now; return a function that computes metrics and damage later."""
        cell, start, answered = self.cell, time.perf_counter(), None
        if task.answers is None:
            ask(scorer, task, asked())
        elif not hasattr(scorer, "answer"):
            raise EvaluationError(
                f"{task.name}: only exact and fast scoring give the tokens of answers; set "
                "evaluation.scoring to one of these"
            )
        else:
            kept, read = None, self.observer is not None
            if self.base is not None:
                kept = self.observer.base.tasks.get(task.name)
                read = kept is not None
            copy, tokenizer = cell.copy, self.tokenizer
            if copy is not None and (copy.folder / "tokenizer_config.json").is_file():
                tokenizer, settings = load_tokenizer(copy), generation_settings(copy)
            else:
                settings = scorer.hflm.model.generation_config
            ends = end_tokens(settings, tokenizer)
            answered = answer(scorer, task, cell.scoring, tokenizer, ends, base=kept, read=read)
        divergences, states = None, None
        if self.base is not None:
            divergences = self.observer.divergences.get(task.name)
        elif isinstance(self.observer, BaselineWriter):
            states = self.observer.hidden_states()
            self.observer.tasks.clear()  # they are on disk soon
        report, seconds = scorer.report(), time.perf_counter() - start
        return partial(self._judge, task, answered, divergences, states, report, seconds)

    def _judge(
        self, task: LoadedTask, answered: Answered | None, divergences: Any,
        states: BaselineHiddenStates | None, report: ScoringReport, seconds: float,
    ) -> TaskResult:  # fmt: skip
        """Compute a task's metrics and damage, keep the result in the cache unless damage could not
        be measured, with the hidden ``states`` that quantized cells need, and return it.
        ``divergences``: KL per scored token, None if not measured; ``seconds``: what scoring
        took."""
        cell, start = self.cell, time.perf_counter()
        texts = partial(token_texts, self.tokenizer)
        scored = judge(task, cell.scoring) if answered is None else answered.scored
        tables: dict[Table, pd.DataFrame] = {
            "outcomes": scored.outcomes, "responses": scored.responses,
        }  # fmt: skip
        damage = None
        if self.base is not None:
            measured = None if divergences is None else distributions(divergences)
            damage = TaskDamage(distributions=measured)
            if divergences is not None and answered is None:
                rolling = task.task.OUTPUT_TYPE == "loglikelihood_rolling"
                of_tokens = texts if rolling else None
                tables["divergences"] = divergence_table(task.name, divergences, of_tokens)
        if answered is not None:
            tables["answers"] = answered.table(divergences, texts)
            if divergences is not None:
                scored = with_kl(scored, divergences, task.label)
                tables["outcomes"] = scored.outcomes
        record = TaskRecord(
            **dict(self._key(task)),
            task=task.name,
            digest=task.digest,
            scores=scored.scores,
            scoring=report,
            damage=damage,
            seconds=round(seconds + time.perf_counter() - start, 3),
        )
        missing = self.result.no_damage
        try:
            if states is not None:
                states.save(self.cache, cell.key_parts, task.name)
            if missing is None or not missing.retry:
                self.kept.put(record, **tables)
        except (ResultsError, OutputError) as error:
            line = f"{cell.name}: {task.name} is scored, but not kept in the cache: {error}"
            self.result.progress.log(line, "bold red")
        return TaskResult(record, tables)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """Return the text of each token of ``ids`` [N], with the space that SentencePiece marks at its
    start."""
    texts = {}
    for token in set(ids.tolist()):
        text = tokenizer.decode([token])
        marked = str(tokenizer.convert_ids_to_tokens(token)).startswith("▁")
        texts[token] = f" {text}" if marked and not text.startswith(" ") else text
    return [texts[token] for token in ids.tolist()]
