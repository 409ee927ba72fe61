"""Run the command line, ``qbench`` or ``python -m qbench``; Ctrl-C is one line from the start."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress

import psutil

from qbench.errors import INTERRUPTED, STOPPED
from qbench.machine import tidy_memory_seldom

ELSEWHERE = {"--cluster", "--help"}  # words of a command that starts no processes here


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    tidy_memory_seldom()
    for number, name in enumerate(("stdout", "stderr"), start=1):
        if getattr(sys, name) is None:  # closed, as a daemon's
            os.set_inheritable(os.dup2(os.open(os.devnull, os.O_WRONLY), number), True)
            setattr(sys, name, os.fdopen(number, "w"))
    sys.stdout.reconfigure(errors="replace")  # an encoding other than UTF-8 lacks − and …
    try:
        if sys.argv[1:2] == ["run"] and not ELSEWHERE & {*sys.argv}:
            from qbench.runner.workers import start_early

            with suppress(OSError):  # said when the run starts its processes
                start_early(sys.argv)
        from qbench.cli.app import main as command

        command()
    except SystemExit as end:
        _end(end.code if isinstance(end.code, int) else int(bool(end.code)))
    except KeyboardInterrupt:  # before, or after, a command is in charge of it
        print(STOPPED, file=sys.stderr)
        _end(INTERRUPTED)
    _end(0)


def _end(code: int) -> None:
    """Run exit functions, flush output (if that fails, code 0 becomes 1) and end this process with
    exit code ``code``; after Ctrl-C kill its children first. Python's own end would wait a second
    for libraries' threads and garbage, or abort."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C
    if workers := sys.modules.get("qbench.runner.workers"):
        workers.drop_early()  # else this process waits until it has imported all
    if code == INTERRUPTED:
        # Kill all child processes but Python's resource tracker, which ends when it has tidied up
        with suppress(psutil.Error):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if not any("resource_tracker" in word for word in child.cmdline()):
                        child.kill()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone
            code = code or 1
    os._exit(code)


if __name__ == "__main__":
    main()
