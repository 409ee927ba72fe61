"""Progress from other processes, and what becomes of it when they die."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from qbench.progress import SilentProgress
from qbench.running.relay import Relay

CHILD = """
import os, pickle, signal, sys
sender = pickle.loads(bytes.fromhex(sys.argv[1])).open()
sender.begin("a/b")
sender.stage("a/b", "evaluate", 10, "requests")
if sys.argv[2] == "ends":
    sender.end("a/b")
if sys.argv[2] == "half":  # a message of 4 KiB of which three bytes come
    os.write(sender._connection.fileno(), (4096).to_bytes(4, "big") + b"abc")
if sys.argv[2] != "ends":
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Heard(SilentProgress):
    def __init__(self):
        self.lines = []

    def begin(self, cell):
        self.lines.append(f"begin {cell}")

    def stage(self, cell, name, total=None, unit=""):
        self.lines.append(f"{name} {total} {unit}")

    def end(self, cell):
        self.lines.append(f"end {cell}")


@pytest.mark.parametrize("host", [None, "localhost"])
@pytest.mark.parametrize("how", ["ends", "dies", "half"])
def test_a_process_that_dies_ends_its_line_and_nobody_waits_for_it(how, host):
    heard = Heard()
    with Relay(heard, host) as relay:
        sent = pickle.dumps(relay.address).hex()
        done = subprocess.run([sys.executable, "-c", CHILD, sent, how], check=False, timeout=60)
        assert (done.returncode == -signal.SIGKILL) == (how != "ends")
        if how != "ends":
            assert relay.beside("a/b") == frozenset()
        after = relay.address.open()
        after.begin("c/d")
        after.end("c/d")
        after.close()
    begun = ["begin a/b", "evaluate 10 requests", "end a/b"]
    assert heard.lines == [*begun, "begin c/d", "end c/d"]


def test_a_stranger_is_not_listened_to():
    heard = Heard()
    with Relay(heard) as relay:
        stranger = type(relay.address)(relay.address.socket, b"wrong").open()
        stranger.begin("x/y")
        friend = relay.address.open()
        friend.begin("c/d")
        friend.end("c/d")
        friend.close()
    assert heard.lines == ["begin c/d", "end c/d"]


def test_where_nobody_listens_any_more_nothing_is_said():
    with Relay(Heard()) as relay:
        sender = relay.address.open()
    sender.begin("a/b")
    sender.end("a/b")


class Closed(SilentProgress):
    """As a terminal that is closed once the run has broken off."""

    def __init__(self):
        self.heard, self.closed, self.late = threading.Event(), False, []

    def stage(self, *message):
        if self.closed:
            self.late.append(message)
        self.heard.set()

    def end(self, cell):
        if self.closed:
            self.late.append(cell)


def test_where_a_run_breaks_off_nothing_is_passed_on_afterwards():
    """Cells that are still at work talk on, for as long as their processes are there."""
    progress, talks = Closed(), True

    def talk(address):
        sender = address.open()
        sender.begin("a/b")
        while talks:
            sender.stage("a/b", "step")
        sender.close()

    with suppress(KeyboardInterrupt), Relay(progress) as relay:
        talking = threading.Thread(target=talk, args=(relay.address,))
        talking.start()
        assert progress.heard.wait(60)
        raise KeyboardInterrupt
    progress.closed = True
    time.sleep(0.2)
    talks = False
    talking.join()
    for reader in relay._readers:
        reader.join(60)
    assert progress.late == []
