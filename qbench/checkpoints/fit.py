"""Compare the tensors of a checkpoint's files with those of its class before it is loaded.

Run as a program of its own, so that planning a run imports no torch:
``python -m qbench.checkpoints.fit``, which reads a pickled checkpoint and plug-ins.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from qbench import __version__
from qbench.checkpoints.find import Checkpoint, named
from qbench.errors import CheckpointError, OutputError
from qbench.files import cache_folder, content_key, write_atomically
from qbench.machine import redirected, version_of
from qbench.plugins import load, load_packages, loaded


def require_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming the tensors that are missing, left over or misshapen.

    What was found is kept in the cache for the files' digest: importing torch takes seconds.
    """
    parts = {
        "files": checkpoint.digest,
        "normalizer": checkpoint.normalizer,
        "versions": [__version__, version_of("transformers")],
    }
    kept = cache_folder() / "fits" / f"{content_key(parts)[:16]}.json"
    with named(checkpoint.source):
        try:
            problem = json.loads(kept.read_bytes())["problem"]
        except (OSError, ValueError, KeyError, TypeError):
            problem = _problem(checkpoint) if "torch" in sys.modules else _of_process(checkpoint)
            with suppress(OutputError, OSError):  # a cache that cannot be written keeps nothing
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(kept, json.dumps({"problem": problem}).encode())
        if problem is not None:
            raise CheckpointError(problem)


def _problem(checkpoint: Checkpoint) -> str | None:
    """Return what ``checkpoints.load.tensors_problem`` says; libraries' output is dropped."""
    with redirected(Path(os.devnull)):
        from qbench.checkpoints.load import tensors_problem  # imports torch

        return tensors_problem(checkpoint)


def _of_process(checkpoint: Checkpoint) -> str | None:
    """Return the result of ``_problem``, called in another process. Raises CheckpointError with
    the last line that it wrote if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "qbench.checkpoints.fit"],
        input=pickle.dumps((loaded(), pickle.dumps(checkpoint))),
        capture_output=True,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise CheckpointError(f"its tensors could not be compared with its class: {why}")
    return json.loads(done.stdout)["problem"]


def main() -> None:
    plugins, checkpoint = pickle.load(sys.stdin.buffer)
    load_packages()
    load(plugins)
    print(json.dumps({"problem": _problem(pickle.loads(checkpoint))}))


if __name__ == "__main__":
    main()
