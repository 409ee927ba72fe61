"""What all tests on a GPU share: what torch says of itself is no failure of ours."""

from pathlib import Path

import pytest
import torch

PASSED_OVER = (
    # torch 2.11, when its compiler is imported, and GPT-BigCode of transformers 5.17
    "ignore:.torch.jit.script",
    # its compiler at work: of its own classes, of what it could do faster, and of the float32
    # products of the rotary embedding
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",
    r"ignore:\s*Online softmax is disabled:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Handed the tests of all folders, where others are run too."""
    none = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(none)
            for warning in PASSED_OVER:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture
def waiting_fails():
    """A function: from its call to the test's end, an operation that waits for the GPU raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
