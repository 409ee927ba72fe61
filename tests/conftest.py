"""Settings of the whole test run, made before any library is imported."""

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # GPTQ is twenty times slower on contended cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GPTQMODEL_DISABLE_PACK_EXT", "1")  # saves a 23 s compilation
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from qbench.machine.quiet import settle

settle()

# Millions of objects of imported libraries stay until the end. The garbage collector would look at
# them again and again: two fifths of the time of a cell, a fifth of that of imports.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Quantized weights and kept rows of one test alone."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
