"""Worker processes that import no torch."""

import os
from multiprocessing import forkserver

import pytest

from qbench.runner import workers


@pytest.fixture(scope="module", autouse=True)
def light_processes():
    """Of a fork server of their own, or which are told to preload nothing."""
    forkserver._forkserver._stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "PRELOAD", "qbench.export")  # pandas and pydantic
        patch.setattr(workers, "preload", os.getpid)
        yield
    forkserver._forkserver._stop()
