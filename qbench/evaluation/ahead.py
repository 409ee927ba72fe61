"""What can be done of tasks before there is a model to ask: in a thread, while that is loaded.

Documents are read, requests are built by lm-eval itself and turned into token ids. On a GPU the
main thread waits for files and the device meanwhile, and the tokenizer works outside Python.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qbench.evaluation import passkey
from qbench.evaluation.settings import ScoringSettings
from qbench.evaluation.tasks import TaskSpec

if TYPE_CHECKING:
    from qbench.checkpoints import Checkpoint
    from qbench.evaluation.scoring.asked import Ids

# Each small operation of the main thread hands the interpreter over and asks for it back; at
# Python's usual 5 ms a turn it would stand still until this thread has finished.
SECONDS_A_TURN = 0.0002


class Ahead:
    """Makes ``tasks`` ready for a cell of ``checkpoint`` that is scored as ``settings`` say, within
    its context ``at_work``. What fails in the thread is left: it fails again, and is said, where
    the task is asked for.
    """

    def __init__(
        self, tasks: Sequence[TaskSpec], settings: ScoringSettings, checkpoint: Checkpoint
    ) -> None:
        self._tasks = tasks
        self._settings, self._checkpoint = settings, checkpoint
        self._loaded, self._stopped = threading.Event(), threading.Event()
        self._ids: Ids | None = None
        self._thread = threading.Thread(target=self._work, name="tasks", daemon=True)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Ahead]:
        # transformers puts other modules in place of its packages while they are imported, so that
        # of two threads one may be left with half of it: all imports happen here.
        import lm_eval.models.huggingface  # noqa: F401

        import qbench.evaluation.evaluate
        import qbench.evaluation.scoring
        import qbench.evaluation.tasks  # noqa: F401
        from qbench.checkpoints import load_tokenizer

        self._tokenizer = load_tokenizer(self._checkpoint)
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SECONDS_A_TURN)
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            if not isinstance(sys.exception(), KeyboardInterrupt):
                self._thread.join()
            sys.setswitchinterval(usual)

    def documents(self) -> dict[str, str]:
        """The digest of each task's documents. Raises what ``load_task`` raises."""
        self._loaded.wait()
        from qbench.evaluation.tasks import load_task

        return {task.name: load_task(task).digest for task in self._tasks}

    def finish(self) -> Ids | None:
        """Token ids of the requests that could be built; from now on tasks are the caller's."""
        self._thread.join()
        return self._ids

    def _work(self) -> None:
        try:
            self._load()
        finally:
            self._loaded.set()
        with contextlib.suppress(Exception):
            self._build()

    def _load(self) -> None:
        from qbench.evaluation.tasks import load_task

        for task in self._tasks:
            with contextlib.suppress(Exception):
                load_task(task)

    def _build(self) -> None:
        from qbench.evaluation.evaluate import evaluate
        from qbench.evaluation.scoring.asked import Asked, Ids, Known
        from qbench.evaluation.tasks import load_task

        self._ids = Ids()
        model = Asked(self._tokenizer, self._settings.add_bos, self._ids)
        for task in self._tasks:
            if self._stopped.is_set():
                return
            if task.num_fewshot or task.output_type == passkey.KIND:
                continue  # built for each model anew
            with contextlib.suppress(Known, Exception):
                evaluate(model, load_task(task), self._settings)
