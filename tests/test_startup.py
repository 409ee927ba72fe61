"""What reads results starts at once and never loads torch."""

from __future__ import annotations

import subprocess
import sys

from synthetic import make_store

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
    "comparison.statistics",
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
