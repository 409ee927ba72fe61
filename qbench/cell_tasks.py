"""Load and score the tasks of a cell, with lm-eval and pandas, which take a fifth of the time of a
worker's imports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from qbench.cell_result import CellResult, TaskResult
from qbench.checkpoints.load import generation_settings
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import DataError, EvaluationError, OutputError, QbenchError, ResultsError
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
    shared_samples,
)
from qbench.evaluation.kl_observer import (
    BaselineHiddenStates,
    BaselineWriter,
    KLObserver,
    distributions,
    divergence_table,
)
from qbench.evaluation.scoring import language_model
from qbench.evaluation.scoring.batching import requests_of
from qbench.evaluation.scoring.generate import end_tokens
from qbench.evaluation.settings import tolerance_violation
from qbench.records import CellKey, TaskDamage, TaskRecord, Unavailable
from qbench.store import Store, Table, TaskStore, baseline_files, task_key, verify_baseline

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


def load_tasks(result: CellResult) -> list[LoadedTask]:
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


def build(
    result: CellResult, tasks: Sequence[LoadedTask], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Build and encode the requests of ``tasks`` as far as they can be now."""
    encode, scoring = None, result.cell.scoring
    if result.plan.device == "cuda" and scoring.mode != "lm-eval":  # cores have little to do
        encode = partial(requests_of, tokenizer, add_bos=scoring.add_bos)
    build_ahead(tasks, scoring, encode)


def _note_failure(result: CellResult, task: str, error: QbenchError) -> None:
    """Note that ``task`` cannot be scored, in the result and in the log."""
    result.failed_tasks[task] = " ".join(str(error).split())
    line = f"{result.cell.name}: {task} could not be scored: {error}"
    result.progress.log(line, "bold red")


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


class Evaluation:
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
                model, self.tokenizer, cell.scoring, progress=result.advance,
                observer=self.observer, samples=shared_samples(tasks, cell.scoring.sample),
            )  # fmt: skip
        failures: list[QbenchError] = []

        def attempt(task: LoadedTask, work: Callable[[], Any]) -> Any:
            """Return ``work()``; None if it raises, after noting the error for ``task``."""
            try:
                return work()
            except QbenchError as error:
                failures.append(error)
                _note_failure(result, task.name, error)
                return None

        def score(
            task: LoadedTask, get_requests: Callable[[], Instances]
        ) -> Callable[[], Any] | None:
            self.read_base(task.name)
            result.progress.stage(cell.name, f"evaluate {task.name}")
            work = attempt(task, partial(self._score, scorer, task, get_requests))
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
        self, scorer: Any, task: LoadedTask, get_requests: Callable[[], Instances]
    ) -> Callable[[], TaskResult]:
        """Score one task, which a GPU may go on with; return a function that waits for its scores
        and computes metrics and damage."""
        cell, start, answered = self.cell, time.perf_counter(), None
        wait: Callable[[], None] = lambda: None  # noqa: E731
        if task.answers is None:
            wait = ask(scorer, task, get_requests())
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
        seconds = time.perf_counter() - start
        return partial(self._judge, scorer, task, answered, wait, seconds)

    def _judge(
        self, scorer: Any, task: LoadedTask, answered: Answered | None, wait: Callable[[], None],
        seconds: float,
    ) -> TaskResult:  # fmt: skip
        """Compute a task's metrics and damage after ``wait``, keep the result in the cache unless
        damage could not be measured, with the hidden states that quantized cells need, and return
        it. ``seconds``: what scoring took until now."""
        cell, start = self.cell, time.perf_counter()
        wait()
        divergences, states = None, None
        if self.base is not None:
            divergences = self.observer.divergences.get(task.name)
        elif isinstance(self.observer, BaselineWriter):
            states = self.observer.hidden_states()
            self.observer.tasks.clear()  # they are on disk soon
        rolling = task.task.OUTPUT_TYPE == "loglikelihood_rolling"
        report = scorer.report([task.name] * rolling)
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
