"""Libraries' banners and log floods go to a log file; the user's terminal is ours.

Some of them print straight to the file descriptors, some set the root logger's level when they
are imported, so the descriptors themselves are redirected while a cell is at work.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",  # its retries are said by qbench.hub
    "DATASETS_VERBOSITY": "error",
    "GPTQMODEL_DISABLE_GIL_WARNING": "1",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
    "BITSANDBYTES_NOWELCOME": "1",
}


def settle() -> None:
    """Set what libraries read when they are imported. What the user set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def terminal() -> TextIO:
    """Standard error as it is now, out of reach of later redirections. The caller closes it."""
    return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8")


@contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Send everything that is printed, logged or warned in the body to ``log``, appending."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    streams = sys.stdout, sys.stderr
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(target), "w", buffering=1, encoding="utf-8")
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("default")
            yield
    finally:
        with suppress(OSError):  # the disk is full: what is said of that goes to the user
            sys.stdout.close()
        sys.stdout, sys.stderr = streams
        for descriptor, number in zip(saved, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)
        root.setLevel(level)
        root.handlers[:] = handlers
