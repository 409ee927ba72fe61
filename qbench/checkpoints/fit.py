"""Compare the tensors of checkpoints' files with those of their classes before they are loaded.

Run as a program of its own, so that planning a run imports no torch:
``python -m qbench.checkpoints.fit``, which reads pickled plug-ins and checkpoints.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from qbench import __version__
from qbench.checkpoints.find import Checkpoint
from qbench.errors import CheckpointError, OutputError
from qbench.files import cache_folder, content_key, write_atomically
from qbench.machine import import_transformers, redirected, version_of
from qbench.plugins import load, load_packages, loaded

Problems = list[str | None]
# Begins a call of a function with one argument; returns a function that waits for its result
Begin = Callable[[Callable[[Any], Any], Any], Callable[[], Any]]


def compare_tensors(
    checkpoints: Iterable[Checkpoint], begin: Begin | None = None
) -> Callable[[], list[str]]:
    """Begin to compare the tensors of checkpoints with their classes, which imports torch; return a
    function that waits for it and returns a line per checkpoint that does not fit.

    ``begin`` runs it in a process that imports torch anyway (``functools.partial``: this one, while
    it waits); None means this one if torch is imported, else one of its own. Results are cached.
    """
    problems: dict[Path, str | None] = {}
    files = {_kept(checkpoint): checkpoint for checkpoint in checkpoints}
    for path in files:
        with suppress(OSError, ValueError, KeyError, TypeError):
            problems[path] = json.loads(path.read_bytes())["problem"]
    new = [path for path in files if path not in problems]
    unknown = [files[path] for path in new]
    wait: Callable[[], Problems] = list
    if new:
        here = partial if "torch" in sys.modules else _in_process
        wait = (begin or here)(_problems, unknown)

    def lines() -> list[str]:
        try:
            answers = wait()
        except BrokenExecutor:  # a worker was killed
            answers = _in_process(_problems, unknown)()
        for path, problem in zip(new, answers, strict=True):
            problems[path] = problem
            with suppress(OutputError, OSError):  # a cache that cannot be written keeps nothing
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps({"problem": problem}).encode())
        return [
            f"checkpoint {files[path].source}: {problems[path]}"
            for path in files
            if problems[path] is not None
        ]

    return lines


def _kept(checkpoint: Checkpoint) -> Path:
    """Return the path of the kept result for a checkpoint's files."""
    parts = {
        "files": checkpoint.digest,
        "normalizer": checkpoint.normalizer,
        "versions": [__version__, version_of("transformers")],
    }
    return cache_folder() / "fits" / f"{content_key(parts)[:16]}.json"


def _in_process(function: Callable[[Any], Any], argument: object) -> Callable[[], Any]:
    """Begin a call in another process. Waiting raises CheckpointError with the last line that the
    process wrote if it fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qbench.checkpoints.fit"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip

    def wait() -> Problems:
        call = pickle.dumps(partial(function, argument))
        out, err = process.communicate(pickle.dumps((loaded(), call)))
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"exit code {process.returncode}"
            raise CheckpointError(f"tensors could not be compared with their classes: {why}")
        return json.loads(out)

    def end() -> None:
        with process:
            process.kill()

    weakref.finalize(wait, end)  # of a plan that fails before it waits
    return wait


def _problems(checkpoints: list[Checkpoint]) -> Problems:
    """Return what ``checkpoints.load.tensors_problem`` says of each; libraries' output is
    dropped."""
    with redirected(Path(os.devnull)):
        import_transformers()
        from qbench.checkpoints.load import tensors_problem

        return [tensors_problem(checkpoint) for checkpoint in checkpoints]


def main() -> None:
    gc.disable()  # looking for garbage takes a fifth of the time of imports
    with redirected(Path(os.devnull)):
        import_transformers()  # while the parent still plans
    plugins, call = pickle.load(sys.stdin.buffer)
    load_packages()
    load(plugins)
    print(json.dumps(pickle.loads(call)()))


if __name__ == "__main__":
    main()
