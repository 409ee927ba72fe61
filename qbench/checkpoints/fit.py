"""Compare the tensors of a checkpoint's files with those of its class before it is loaded."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from qbench import __version__
from qbench.checkpoints.find import Checkpoint, named
from qbench.errors import CheckpointError, OutputError
from qbench.files import cache_folder, content_key, write_atomically
from qbench.machine import redirected, version_of


def require_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming the tensors that are missing, left over or misshapen.

    What was found is kept in the cache for the files' digest: torch, whose import takes seconds,
    is imported if no earlier plan compared the same files.
    """
    parts = {
        "files": checkpoint.digest,
        "normalizer": checkpoint.normalizer,
        "versions": [__version__, version_of("transformers")],
    }
    kept = cache_folder() / "fits" / f"{content_key(parts)[:16]}.json"
    try:
        problem = json.loads(kept.read_bytes())["problem"]
    except (OSError, ValueError, KeyError, TypeError):
        with redirected(Path(os.devnull)):
            from qbench.checkpoints.load import tensors_problem  # imports torch

            problem = tensors_problem(checkpoint)
        with suppress(OutputError, OSError):  # a cache that cannot be written keeps nothing
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps({"problem": problem}).encode())
    if problem is not None:
        with named(checkpoint.source):
            raise CheckpointError(problem)
