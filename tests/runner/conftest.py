"""Worker processes that import no torch."""

import os
from multiprocessing import forkserver

import pytest

from qbench.runner import workers


@pytest.fixture(scope="module", autouse=True)
def light_processes(request, tmp_path_factory):
    """Of a fork server of their own, or which are told to preload nothing; there is no PyTorch."""
    preload = "qbench.runner.grid" if request.path.name == "test_grid.py" else "pytest"
    forkserver._forkserver._stop()
    folder = tmp_path_factory.mktemp("site")
    (folder / "torch.py").write_text("raise ImportError")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(workers, "PRELOAD", preload)
        patch.setattr(workers, "preload", os.getpid)
        yield
    forkserver._forkserver._stop()
