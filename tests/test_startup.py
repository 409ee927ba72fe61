"""What reads results starts at once and never loads torch."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import small_recipe
from synthetic import make_store

ROOT = Path(__file__).parent.parent

READERS = (
    "gate.baseline",
    "comparison.changes",
    "gate.check",
    "comparison.compare",
    "comparison.effects",
    "comparison.explain",
    "published",
    "published.check",
    "report",
    "statistics",
    "tables",
    "gate.verdict",
)
HEAVY = ("torch", "transformers", "lm_eval", "datasets")
# Measured in a process of its own: CPU seconds, which another process's load does not count in.
SECONDS = "import time; start = time.process_time(); {}; print(time.process_time() - start)"


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def test_reading_results_loads_no_torch():
    modules = ", ".join(f"qbench.{name}" for name in READERS)
    loaded = python(f"import sys, {modules}; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_what_runs_before_the_first_worker_process_starts_loads_only_the_options():
    """The worker's imports are what a run waits for: all else is imported beside them."""
    loaded = python(
        "import sys, qbench.cli.app, qbench.running.executors, qbench.running.warm_up\n"
        "import qbench.machine.devices; print(*sys.modules)"
    ).split()
    assert not {"pydantic", "numpy", "pandas", "safetensors", "yaml"} & set(loaded)


def test_what_is_imported_before_worker_processes_start_leaves_tables_of_data_aside():
    """pandas takes as long as all the rest, and a parent of workers needs it at the end alone."""
    loaded = python(
        "import sys, qbench.comparison.lines, qbench.plan, qbench.recipe\n"
        "import qbench.cli.results, qbench.cell, qbench.running.grid, qbench.store\n"
        "print(*sys.modules)"
    ).split()
    assert "qbench.cell" in loaded
    assert not {"numpy", "pandas", "pyarrow", *HEAVY} & set(loaded)


def test_what_tables_need_is_imported_while_cells_are_at_work(tmp_path):
    """And kept from the garbage collector, which statsmodels calls for every correction."""
    store = make_store(tmp_path, sizes={"arc_easy": 30, "wikitext": 5}, quantizers=("bf16",))
    told = python(
        "import gc, sys; import qbench.cli.app, qbench.running.grid; from pathlib import Path\n"
        "from qbench.cli.results import show_tables\n"
        "from qbench.cli.run import _import_statistics\n"
        "from qbench.store import Store\n"
        "_import_statistics(); before, kept = set(sys.modules), gc.get_freeze_count()\n"
        f"show_tables(Store(Path({str(store.directory)!r})))\n"
        "print(); print(kept, gc.isenabled(), *set(sys.modules) - before)"
    ).splitlines()[-1]
    kept, enabled, *late = told.split()
    assert int(kept) > 100_000
    assert enabled == "True"
    libraries = ("numpy", "scipy", "pandas", "pyarrow", "statsmodels", "tabulate", "qbench")
    large = [name for name in late if name.count(".") < 2]
    assert [name for name in large if name.partition(".")[0] in libraries] == []


def test_tables_with_all_statistics_and_the_gate_load_no_torch(tmp_path):
    store = make_store(tmp_path, sizes={"arc_easy": 30, "wikitext": 5}, quantizers=("bf16",))
    loaded = python(
        "import sys; from pathlib import Path\n"
        "from qbench.gate import baseline, check; from qbench import report\n"
        "from qbench.store import Store\n"
        "from qbench.tables import write_tables\n"
        f"store = Store({str(store.directory)!r}); out = store.directory / 'baseline.parquet'\n"
        "write_tables(store, formats=('md', 'tex', 'csv', 'html')); report.write(store)\n"
        "baseline.make(store, out); check.check(store, out); print(*sys.modules)"
    ).split()
    assert "matplotlib" in loaded
    assert not set(HEAVY) & set(loaded)


def test_the_modules_that_show_results_start_in_under_two_seconds():
    best = min(float(python(SECONDS.format("import qbench.tables, qbench.comparison.compare")))
               for _ in range(2))  # fmt: skip
    assert best < 2.0


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [(["--help"], 0.7), (["run", "--help"], 0.8), (["list", "quantizers"], 1.2)],
)
def test_help_starts_at_once(arguments, seconds):
    """CPU seconds of the whole process, the interpreter's own start included: 0.3, 0.4 and 0.4 on
    a machine that does nothing else, up to half as many again beside other work."""
    best = min(cpu_seconds([sys.executable, "-m", "qbench", *arguments]) for _ in range(4))
    assert best < seconds


def test_at_its_end_a_command_does_not_look_for_garbage_in_all_modules():
    """Half a second of a run: it is in the C code that ends Python, so only its effect is seen."""
    told = python(
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "sys.argv = ['qbench', '--version']; from qbench.__main__ import main; main()"
    )
    assert int(told.split()[-1]) > 5_000


def test_planning_takes_under_three_seconds_and_the_parent_of_workers_loads_no_torch(tmp_path):
    command = ["plan", small_recipe(tmp_path), "--device", "cpu", "--out", tmp_path / "out"]
    best = min(cpu_seconds([sys.executable, "-m", "qbench", *command]) for _ in range(2))
    assert best < 3.0
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    arguments = ["run", *command[1:], "--workers", "2", "--only", "softmax/*"]
    clock = tmp_path / "clock.txt"
    settings = environment(tmp_path) | {"QBENCH_CLOCK": str(clock)}
    done = subprocess.run([sys.executable, script, *arguments], cwd=ROOT, text=True, check=False,
                          capture_output=True, env=settings)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    check_clock(clock.read_text().splitlines())


def check_clock(lines):
    """Of each process, in order, every stage: seconds of the command, CPU seconds of the process,
    its id, the stage."""
    stages: dict[str, list[str]] = {}
    seconds = []
    for line in lines:
        of_command, of_process, process, stage = line.split(maxsplit=3)
        assert 0 <= float(of_process) < 100
        seconds.append(float(of_command))
        stages.setdefault(process, []).append(stage)
    assert seconds[0] == 0
    assert all(abs(second) < 300 for second in seconds)
    parent, *others = stages.values()
    (template,) = [own for own in others if own[-1] == "worker processes fork"]
    assert template[0] == "worker process imports"
    workers = [own for own in others if own is not template]
    assert parent == [
        "recipe read", "worker processes start", "planned", "cells ended", "compared",
        "tables written", "worker processes ended",
    ]  # fmt: skip
    assert len(workers) == 2
    for worker in workers:
        own = [stage for stage in worker if ": waits for " not in stage]
        cell = own[1].partition(":")[0]
        assert own == [
            "worker process ready",
            *(f"{cell}: {name}" for name in ("prepare", "load", "quantize", "audit")),
            *(f"{cell}: evaluate demo_{task}" for task in ("choice", "lastword", "pages")),
            f"{cell}: write",
        ]  # fmt: skip


PARENT = """
import sys
from qbench.cli.app import app
if __name__ == "__main__":
    code = app(sys.argv[1:], standalone_mode=False)
    heavy = ("torch", "transformers", "lm_eval", "datasets")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
    sys.exit(code)
"""


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(ROOT), "QBENCH_CACHE": str(folder / "cache")}


def cpu_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_worker_that_warms_up_leaves_torchs_compiler_and_scipys_optimizers_aside():
    """Four tenths of its start. Cells that quantize with hqq import hqq, which brings it."""
    loaded = python(
        "import sys, threading; from qbench.running.warm_up import warm_up; warm_up('cpu')\n"
        "[one.join() for one in threading.enumerate() if one.name == 'imports']\n"
        "print(*sys.modules)"
    ).split()
    assert {"torch", "transformers", "lm_eval.evaluator", "transformers.loss.loss_utils"} <= set(
        loaded
    )
    assert not {
        "hqq", "torchao", "torch._inductor.compile_fx", "scipy.optimize", "sklearn", "torchvision",
        "torchaudio",
    } & set(loaded)  # fmt: skip


def test_what_was_left_aside_is_there_when_it_is_asked_for():
    """Every module that transformers has loaded gets the true answer afterwards."""
    told = python(
        "import sys; from qbench.running.warm_up import LEFT_ASIDE, warm_up; warm_up('cpu')\n"
        "import transformers.utils as utils\n"
        "names = [n for n in LEFT_ASIDE if hasattr(utils, n)]\n"
        "holders = [m for k, m in sys.modules.items() if k.startswith('transformers.')]\n"
        "asked = [vars(m)[n] for m in holders for n in names if n in vars(m)]\n"
        "print(len(names), len(asked), {f.__module__ for f in asked})"
    )
    names, asked, modules = told.split(maxsplit=2)
    assert int(names) == 6
    assert int(asked) > 3
    assert modules.strip() == "{'transformers.utils.import_utils'}"


@pytest.mark.gpu
def test_the_context_made_beside_the_imports_is_the_one_that_torch_takes_up():
    told = python(
        "from qbench.running.warm_up import make_context; make_context()\n"
        "import ctypes; driver = ctypes.CDLL('libcuda.so.1')\n"
        "flags, active = ctypes.c_uint(), ctypes.c_int()\n"
        "driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))\n"
        "import torch; print(active.value, float(torch.ones(3, device='cuda').sum()))"
    )
    assert told.split() == ["1", "3.0"]
