"""Faults in a cluster of real processes; ``qbench bench faults`` has more of them, more often."""

from __future__ import annotations

import subprocess

import pytest

pytest.importorskip("distributed")

from qbench.bench.cluster_faults import KINDS, inject, network_cut, table
from qbench.bench.network import Network

# Two worker processes each. The rest of KINDS are variants of these.
IN_CI = (
    "worker killed (SIGKILL)", "worker frozen (SIGSTOP)", "worker ten times slower",
    "cell out of memory", "cell kills its worker", "disk full on one worker",
    "network of one worker cut", "scheduler killed, then run again",
    "client killed, then run again",
)  # fmt: skip
SLOW = (
    "worker ten times slower",
    "scheduler killed, then run again",
    "client killed, then run again",
)


def namespaces() -> bool:
    done = subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in IN_CI],
)
def test_no_finished_cell_is_lost_and_only_cells_at_fault_fail(tmp_path, monkeypatch, name):
    if KINDS[name].strike is network_cut and not Network.possible():
        pytest.skip("needs network namespaces: root and iproute2")
    if KINDS[name].needs_root and not namespaces():
        pytest.skip("needs mount namespaces")
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qbench.cluster.connect.SECONDS_TO_CONNECT", 8.0)  # and to reconnect
    result = inject(name, tmp_path / "bed", 0)
    assert result.right, result
    assert name in table([result])
    for cell in result.expected_to_fail:  # what it printed came back from a worker that died
        (log,) = (tmp_path / "bed" / "out" / "records" / cell).glob("*.log")
        assert f"{cell} begins" in log.read_text()


def test_what_is_wrong_is_called_so(tmp_path):
    from qbench.bench.cluster_faults import Result

    usual = {"fault": "one", "cells": {"a": "ok"}, "expected_to_fail": (), "records": 1,
             "again": 0, "lost": 0, "seconds": 1.0}  # fmt: skip
    assert Result(**usual).right
    for change in ({"cells": {"a": "missing"}}, {"records": 2}, {"lost": 1},
                   {"expected_to_fail": ("a",)}, {"cells": {"a": "failed: x"}}):  # fmt: skip
        assert not Result(**usual | change).right, change
