"""The network that the faults of a cluster are tried in."""

from __future__ import annotations

import subprocess

import pytest

from qbench.bench.network import Network


@pytest.mark.skipif(not Network.possible(), reason="needs root, iproute2 and leave to use them")
def test_what_a_killed_process_left_is_removed():
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"qbench-{gone.pid}"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with Network():
        listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert left not in listed
    assert Network.NAME in listed
