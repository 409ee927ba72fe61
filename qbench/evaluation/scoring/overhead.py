"""lm-eval without the work that it does again and again; prompts, metrics and scores stay its own.

It compiles every Jinja template anew for every document (16,632 times for arc_easy, longer than
a small model's forwards), gathers the names that all templates know anew for each, takes documents
out of their table one by one, asks pip and the shell about the environment at the end of each task,
and builds the same requests for each model of a grid. Its hundreds of thousands of small objects
also make the cyclic garbage collector walk the whole heap again and again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

from lm_eval import evaluator, utils
from lm_eval.api.task import Task

from qbench.evaluation.tasks import listed

TEMPLATES = 4096  # compiled ones that are kept; a task has about three, or one a document
BUILT = "_qbench_built_with"  # what a task's requests were built from


_inside = False  # lm-eval is one for the process, and so is what is changed in it
_barred = False


@contextlib.contextmanager
def less_overhead() -> Iterator[None]:
    """Within it, lm-eval compiles a template once, builds a task object's zero-shot requests
    once, has its documents in a list, and leaves the environment to our record. Cyclic garbage
    waits until the end. Does nothing within itself or :func:`usual_overhead`."""
    global _inside
    if _inside or _barred:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    environment = utils.env
    compile_template = type(environment).from_string.__get__(environment)
    environment.from_string = functools.lru_cache(TEMPLATES)(_with_names(compile_template))
    survey, build = evaluator.add_env_info, Task.build_all_requests
    documents = Task.eval_docs
    evaluator.add_env_info = lambda results: None
    Task.build_all_requests = _built_once(build)
    Task.eval_docs = property(lambda task: listed(documents.fget(task)))
    _inside = True
    try:
        yield
    finally:
        _inside = False
        del environment.from_string
        evaluator.add_env_info, Task.build_all_requests = survey, build
        Task.eval_docs = documents
        if collects:
            gc.enable()


@contextlib.contextmanager
def usual_overhead() -> Iterator[None]:
    """Within it, lm-eval stays as it is whoever asks for less: for measuring lm-eval itself."""
    global _barred
    assert not _inside
    barred, _barred = _barred, True
    try:
        yield
    finally:
        _barred = barred


def _with_names(compile_template: Any) -> Any:
    """Jinja gathers a template's globals from a chain of mappings each time that it is rendered,
    for the sake of those that are added later: more than half of a render's time."""

    def compiled(source: str) -> Any:
        template = compile_template(source)
        template.globals = dict(template.globals)
        return template

    return compiled


def _built_once(build: Any) -> Any:
    @functools.wraps(build)
    def build_all_requests(task: Task, **settings: Any) -> None:
        if task.config.num_fewshot:  # examples are drawn by a generator that goes on
            build(task, **settings)
            return
        key = {name: value for name, value in settings.items() if name != "chat_template"}
        if settings.get("apply_chat_template") or getattr(task, BUILT, None) != key:
            build(task, **settings)
            setattr(task, BUILT, key)
            return
        for instance in task.instances:
            instance.resps, instance.filtered_resps = [], {}

    return build_all_requests
