"""Worker processes that import no torch."""

import os
from multiprocessing import forkserver

import pytest

from qbench.runner import workers


@pytest.fixture(scope="module", autouse=True)
def light_processes(tmp_path_factory):
    """Of a fork server of their own, or which are told to preload nothing; there is no PyTorch."""
    forkserver._forkserver._stop()
    folder = tmp_path_factory.mktemp("site")
    (folder / "torch.py").write_text("raise ImportError")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(workers, "PRELOAD", "qbench.runner.grid")
        patch.setattr(workers, "preload", os.getpid)
        yield
    forkserver._forkserver._stop()
