"""What the engine itself costs: a thousand cells that need no model on workers of this host."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from qbench import text
from qbench.bench import cluster_stub as stub
from qbench.bench.cluster import bed, judged, run_on, stub_plan
from qbench.machine.environment import peak_memory_gib
from qbench.store import Store
from qbench.tables import write_tables

TASKS = 5
CELL_SECONDS = "0.05"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Seconds by the clock, ``client`` of this process's processor time a cell, ``scheduler`` MiB
    that its process grew by, ``report_gib`` the peak of this process by then."""

    cells: int
    workers: int
    good: int
    plan: float
    run: float
    client: float
    scheduler: float
    tables: float
    report: float
    report_gib: float


def bench_scale(cells: int, workers: int) -> Scale:
    from qbench.report.write import write as write_report

    with tempfile.TemporaryDirectory(prefix="qbench-") as name:
        folder, out = Path(name), Path(name) / "out"
        start = time.monotonic()
        planned = stub_plan(folder, cells, TASKS)
        plan_seconds = time.monotonic() - start
        with bed(folder, [{"environment": {stub.SECONDS: CELL_SECONDS}}] * workers) as made:
            assert made.scheduler is not None
            made.wait_for_workers(workers)
            before = _mib(made.scheduler.pid)
            start, used = time.monotonic(), time.process_time()
            run_on(made, planned, out)
            run_seconds, client = time.monotonic() - start, time.process_time() - used
            grown = _mib(made.scheduler.pid) - before
        states = judged(planned, out)
        start = time.monotonic()
        write_tables(Store(out), folder)
        tables = time.monotonic() - start
        start = time.monotonic()
        write_report(Store(out), folder / "report", figures=("svg",))
        report = time.monotonic() - start
    return Scale(
        cells=len(planned.cells), workers=workers, good=sum(s == "ok" for s in states.values()),
        plan=plan_seconds, run=run_seconds, client=client / len(planned.cells), scheduler=grown,
        tables=tables, report=report, report_gib=peak_memory_gib("cpu"),
    )  # fmt: skip


def table(found: Scale) -> str:
    rows = [
        ["cells, all good", f"{found.good} of {found.cells}", ""],
        ["planning", f"{found.plan:.1f} s", "5 s"],
        [f"run on {found.workers} workers", f"{found.run:.0f} s", ""],
        ["client, processor time a cell", f"{1e3 * found.client:.1f} ms", "20 ms"],
        ["scheduler's memory grew by", f"{found.scheduler:.0f} MiB", "100 MB"],
        [f"tables of {TASKS} tasks (qbench tables)", f"{found.tables:.1f} s", "60 s, with"],
        ["report (qbench report)", f"{found.report:.1f} s", "the report"],
        ["peak memory of this process", f"{found.report_gib:.2f} GiB", ""],
    ]
    return text.table(("", "measured", "floor"), rows, align="lrr")


def _mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
