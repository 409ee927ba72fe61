"""Faults put into a cluster of real processes, and what came of the run: all that the table of
``qbench bench cluster`` says was watched."""

from __future__ import annotations

import fnmatch
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qbench import text
from qbench.bench import cluster_stub as stub
from qbench.bench.cluster import (
    PACKAGE,
    Bed,
    bed,
    judged,
    records_on_disk,
    run_on,
    stub_plan,
)
from qbench.bench.network import Network
from qbench.errors import RecipeError, UnavailableError
from qbench.plan import Plan

CELLS = 6
VICTIM = "softmax/rtn-1"  # the cell that kills, or eats
MEMORY = "600MB"  # of a worker that its nanny watches
SMALL_DISK_MIB = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of one run with one fault. ``lost``: cells finished before the fault and begun
    again after it; ``again``: cells begun more than once."""

    fault: str
    cells: dict[str, str]
    expected_to_fail: tuple[str, ...]
    records: int
    again: int
    lost: int
    seconds: float

    @property
    def right(self) -> bool:
        """Every cell good but those that are at fault themselves, one record each, none lost."""
        good = all(
            state.startswith("failed") if name in self.expected_to_fail else state == "ok"
            for name, state in self.cells.items()
        )
        return good and self.records == len(self.cells) and not self.lost


@dataclass(frozen=True, slots=True)
class Trial:
    """One bed with its plan; ``after`` are seconds from the first cell's begin to the fault."""

    bed: Bed
    plan: Plan
    out: Path
    after: float

    def strike(self, fault: Callable[[], object]) -> threading.Thread:
        """``fault`` in a thread of its own, when cells are at work."""

        def run() -> None:
            self.bed.wait_until_begun(1)
            time.sleep(self.after)
            fault()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


Fault = Callable[[Trial], Sequence[str]]  # returns the cells that must fail


def killed(trial: Trial) -> Sequence[str]:
    thread = trial.strike(lambda: trial.bed.kill(trial.bed.workers[0]))
    run_on(trial.bed, trial.plan, trial.out)
    thread.join()
    return ()


def frozen(trial: Trial) -> Sequence[str]:
    thread = trial.strike(lambda: trial.bed.kill(trial.bed.workers[0], signal.SIGSTOP))
    run_on(trial.bed, trial.plan, trial.out)
    thread.join()
    return ()


def asked_to_end(trial: Trial) -> Sequence[str]:
    thread = trial.strike(trial.bed.workers[0].terminate)
    run_on(trial.bed, trial.plan, trial.out)
    thread.join()
    return ()


def joined_late(trial: Trial) -> Sequence[str]:
    thread = trial.strike(trial.bed.add_worker)
    run_on(trial.bed, trial.plan, trial.out)
    thread.join()
    return ()


def network_cut(trial: Trial) -> Sequence[str]:
    with Network() as network:
        trial.bed.add_worker(before=network.inside)
        thread = trial.strike(network.cut)
        run_on(trial.bed, trial.plan, trial.out)
        thread.join()
    return ()


def scheduler_killed(trial: Trial) -> Sequence[str]:
    scheduler = trial.bed.scheduler
    assert scheduler is not None
    thread = trial.strike(scheduler.kill)
    with suppress(UnavailableError):  # it died before this run had met it
        run_on(trial.bed, trial.plan, trial.out)
    thread.join()
    _once_more(trial)
    return ()


def client_killed(trial: Trial) -> Sequence[str]:
    code = (
        "import sys; from pathlib import Path; from qbench.bench.cluster import *;"
        f"run_on(Bed(folder=Path({str(trial.bed.folder)!r}), port={trial.bed.port}, "
        f"host={trial.bed.host!r}), stub_plan(Path({str(trial.out.parent)!r}), {CELLS}), "
        f"Path({str(trial.out)!r}))"
    )
    client = subprocess.Popen([sys.executable, "-c", code], cwd=PACKAGE, stderr=subprocess.DEVNULL)
    thread = trial.strike(client.kill)
    thread.join()
    client.wait()
    run_on(trial.bed, trial.plan, trial.out)
    return ()


def cell_kills(trial: Trial) -> Sequence[str]:
    run_on(trial.bed, trial.plan, trial.out)
    return (VICTIM,)


def plain(trial: Trial) -> Sequence[str]:
    run_on(trial.bed, trial.plan, trial.out)
    return ()


def _once_more(trial: Trial) -> None:
    """The same command again, on a scheduler and workers that are there."""
    folder = trial.bed.folder / "again"
    folder.mkdir()
    again = Bed(folder=folder, begun=trial.bed.begun)
    try:
        again.start(({}, {}))
        run_on(again, trial.plan, trial.out)
    finally:
        again.stop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A fault by name, and how its bed differs from the usual one."""

    strike: Fault
    workers: tuple[dict, ...] = ({}, {})  # settings of each
    allowed_failures: int = 2
    needs_root: bool = False


KINDS: dict[str, Kind] = {
    "worker killed (SIGKILL)": Kind(strike=killed),
    "worker frozen (SIGSTOP)": Kind(strike=frozen),
    "worker asked to end (SIGTERM)": Kind(strike=asked_to_end),
    "worker joins late": Kind(strike=joined_late, workers=({},)),
    "worker ten times slower": Kind(
        strike=plain, workers=({}, {"environment": {stub.SECONDS: "6"}})
    ),
    "cell out of memory": Kind(
        strike=cell_kills,
        workers=({"environment": {stub.EATS: VICTIM}, "memory_limit": MEMORY},) * 2,
    ),
    "cell kills its worker": Kind(
        strike=cell_kills, workers=({"environment": {stub.KILLS: VICTIM}},) * 2
    ),
    "the same, and Dask's allowed-failures: 0": Kind(
        strike=cell_kills, workers=({"environment": {stub.KILLS: VICTIM}},) * 2,
        allowed_failures=0,
    ),
    "disk full on one worker": Kind(
        strike=plain,
        workers=({"environment": {stub.FILLS: "1"}, "disk_mib": SMALL_DISK_MIB}, {}),
        needs_root=True,
    ),
    "network of one worker cut": Kind(strike=network_cut, workers=({},), needs_root=True),
    "scheduler killed, then run again": Kind(strike=scheduler_killed),
    "client killed, then run again": Kind(strike=client_killed),
}  # fmt: skip


def inject(name: str, folder: Path, seed: int) -> Result:
    """One run of six cells on a bed of its own in ``folder``, with the fault ``name``."""
    kind, draw = KINDS[name], random.Random(f"{name} {seed}")
    folder.mkdir(parents=True)
    planned, out = stub_plan(folder, CELLS), folder / "out"
    host = Network.HOST if kind.strike is network_cut else "127.0.0.1"
    start = time.monotonic()
    with bed(folder, kind.workers, host=host, allowed_failures=kind.allowed_failures) as made:
        trial = Trial(bed=made, plan=planned, out=out, after=draw.uniform(0.0, 1.5))
        expected = tuple(kind.strike(trial))
        begun = Counter(path.name.split(".")[0] for path in made.begun.iterdir())
    return Result(
        fault=name,
        cells=judged(planned, out),
        expected_to_fail=expected,
        records=records_on_disk(out),
        again=sum(count > 1 for count in begun.values()),
        lost=_lost(out, made),
        seconds=time.monotonic() - start,
    )


def _lost(out: Path, made: Bed) -> int:
    """Cells begun after their good record was written."""
    written = {
        "_".join(path.parts[-3:-1]): path.stat().st_mtime_ns
        for path in (out / "records").rglob("*.json")
    }
    lost = 0
    for path in made.begun.iterdir():
        cell, _, when = path.name.rsplit(".", 2)
        lost += int(when) > written.get(cell, int(when))
    return lost


def bench_faults(rounds: int, only: str, say: Callable[[str], None]) -> list[Result]:
    """``rounds`` runs of each fault whose name matches the glob ``only``. Raises RecipeError where
    none does."""
    chosen = [name for name in KINDS if fnmatch.fnmatch(name, only)]
    if not chosen:
        raise RecipeError(f"--only {only!r} matches no fault; there are {'; '.join(KINDS)}")
    results = []
    for seed in range(rounds):
        for name in chosen:
            if KINDS[name].needs_root and not Network.possible():
                say(f"{name}: left out: it needs root and iproute2")
                continue
            with tempfile.TemporaryDirectory(prefix="qbench-") as folder:
                results.append(inject(name, Path(folder) / "bed", seed))
            found = results[-1]
            state = "as it must be" if found.right else f"WRONG: {found}"
            say(f"{name}, run {seed + 1}: {state} ({found.seconds:.1f} s)")
    return results


def table(results: Sequence[Result]) -> str:
    """Markdown: one line a fault."""
    rows = []
    for name in dict.fromkeys(result.fault for result in results):
        of = [result for result in results if result.fault == name]
        states = Counter(state.split(":")[0] for one in of for state in one.cells.values())
        at_fault = sum(len(one.expected_to_fail) for one in of)
        rows.append([
            name, str(len(of)), f"{sum(one.right for one in of)} of {len(of)}",
            f"{states['ok']} of {sum(len(one.cells) for one in of) - at_fault}",
            f"{states['failed']} of {at_fault}" if at_fault else "—",
            str(sum(one.lost for one in of)), str(sum(one.again for one in of)),
            f"{sorted(one.seconds for one in of)[len(of) // 2]:.1f}",
        ])  # fmt: skip
    head = ("fault", "runs", "as it must be", "innocent cells good", "cells at fault failed",
            "finished cells made again", "cells begun twice", "median seconds")  # fmt: skip
    return text.table(head, rows, align="lrrrrrrr")
