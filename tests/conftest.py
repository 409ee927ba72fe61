"""Settings of the whole test run, made before any library is imported."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # GPTQ is twenty times slower on contended cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GPTQMODEL_DISABLE_PACK_EXT", "1")  # saves a 23 s compilation
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it stops on fewer
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from qbench import machine
from qbench.machine import import_transformers, set_library_env, visible_gpus

set_library_env()
# Triton reads when it is imported whether kernels are for a GPU, or run on a CPU by its interpreter
os.environ.setdefault("TRITON_INTERPRET", "0" if visible_gpus() else "1")
CACHE = Path(tempfile.mkdtemp(prefix="qbench-cache-"))  # of this process's tests
os.environ["QBENCH_CACHE"] = str(CACHE)
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# Millions of objects of imported libraries stay until the end. The garbage collector would look at
# them again and again: two fifths of the time of a cell, a fifth of that of imports.
gc.disable()


machine.UNUSED = tuple({*machine.UNUSED} - {"torchao"})  # which saves copies here
if WHOLE_RUN := "PYTEST_XDIST_WORKER" in os.environ:
    import_transformers()


def pytest_collection_finish() -> None:
    gc.enable()


# What takes longest begins first, so that no process is left alone with it at the end.
LONGEST = (
    "test_prequantized.py", "test_browser.py", "test_grid.py", "test_startup.py", "test_budget.py",
    "test_kernels.py", "test_interrupted.py", "test_kept_tasks.py", "test_workers.py",
    "test_analyze.py", "test_dask.py", "test_docs.py", "test_check.py", "test_scoring_exact.py",
    "test_audit.py", "test_resume.py", "test_bench_evaluation.py", "test_evaluate.py",
    "test_quantize.py", "test_generation.py", "test_llamacpp.py", "test_scoring_variants.py",
    "test_plan.py", "test_data.py", "test_run.py", "test_made_copy.py", "test_export_model.py",
    "test_compiled.py", "test_scoring_fast.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    gc.collect()
    gc.freeze()


def measure_shapes_once(patch: pytest.MonkeyPatch) -> None:
    """Have scorers measure how a plain matrix rounds once per shape."""
    from qbench.evaluation.scoring import forward, scorer

    known = {}

    def once(name, measure):
        def measured(head, *how):
            if type(head).__name__ != "Linear":
                return measure(head, *how)
            key = (name, *head.weight.shape, *how)
            if key not in known:
                known[key] = measure(head, *how)
            return known[key]

        return measured

    for name in ("probe_matmul", "least_rows"):
        patch.setattr(forward, name, once(name, getattr(forward, name)))
    patch.setattr(scorer, "probe_matmul", forward.probe_matmul)


@pytest.fixture(scope="session", autouse=True)
def short_probes_and_no_waiting_for_disks():
    """Audits of 48 tokens, not 128: a tenth of the time of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        if WHOLE_RUN:
            measure_shapes_once(patch)
        if not visible_gpus():
            patch.setattr("qbench.quantizers.audit.compare.PROBE_SHAPE", (2, 48))
        patch.setattr("os.fsync", lambda file: None)
        yield


@pytest.fixture
def command(monkeypatch):
    """Run the command line in this process as a user does; return its exit code."""

    def run(*arguments):
        from qbench.cli import app

        monkeypatch.setattr("sys.argv", ["qbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code

    return run


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Quantized weights and kept rows of one test alone."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def few_rounds():
    """Of 10,000 rounds of each bootstrap, where their number does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qbench.statistics.intervals.ROUNDS", 500)
        yield


@pytest.fixture
def dynamo(monkeypatch):
    """With torch's compiler, which other tests do without."""
    import torch

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
