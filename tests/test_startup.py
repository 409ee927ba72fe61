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
    "viewer.export",
    "viewer.figures",
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


def test_what_tables_need_is_imported_while_cells_are_at_work(tmp_path):
    store = make_store(tmp_path, sizes={"arc_easy": 30, "wikitext": 5}, quantizers=("bf16",))
    late = python(
        "import sys; import qbench.cli.app, qbench.runner.grid; from pathlib import Path\n"
        "from qbench.cli.tables import show_tables\n"
        "from qbench.cli.run import _import_for_tables\n"
        "from qbench.store import Store\n"
        "_import_for_tables(); before = set(sys.modules)\n"
        f"show_tables(Store(Path({str(store.directory)!r})))\n"
        "print(); print(*set(sys.modules) - before)"
    ).splitlines()[-1]
    libraries = ("numpy", "scipy", "pandas", "pyarrow", "statsmodels", "tabulate", "qbench")
    large = [name for name in late.split() if name.count(".") < 2]
    assert [name for name in large if name.partition(".")[0] in libraries] == []


def test_tables_with_all_statistics_and_the_gate_load_no_torch(tmp_path):
    store = make_store(tmp_path, sizes={"arc_easy": 30, "wikitext": 5}, quantizers=("bf16",))
    loaded = python(
        "import sys; from pathlib import Path\n"
        "from qbench.gate import baseline, check\n"
        "from qbench.store import Store\n"
        "from qbench.tables import write_tables\n"
        f"store = Store({str(store.directory)!r}); out = store.directory / 'baseline.parquet'\n"
        "write_tables(store, formats=('md', 'tex', 'csv', 'html'))\n"
        "baseline.make(store, out); check.check(store, out); print(*sys.modules)"
    ).split()
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


def test_planning_takes_under_three_seconds_and_the_parent_of_workers_loads_no_torch(tmp_path):
    command = ["plan", small_recipe(tmp_path), "--device", "cpu", "--out", tmp_path / "out"]
    best = min(cpu_seconds([sys.executable, "-m", "qbench", *command]) for _ in range(2))
    assert best < 3.0
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    arguments = ["run", *command[1:], "--workers", "2", "--only", "softmax/*"]
    done = subprocess.run([sys.executable, script, *arguments], cwd=ROOT, text=True, check=False,
                          capture_output=True, env=environment(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


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
