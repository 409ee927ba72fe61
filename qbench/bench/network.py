"""A network of its own on this host, which can be cut. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import ClassVar


class Network:
    """A network namespace with one cable to this host; use it as a context manager."""

    # of this process alone: others may do the same beside it
    HOST: ClassVar[str] = f"10.213.{os.getpid() % 254}.1"  # this host's end, of a private range
    INSIDE: ClassVar[str] = f"10.213.{os.getpid() % 254}.2"
    NAME: ClassVar[str] = f"qbench-{os.getpid()}"
    CABLE: ClassVar[tuple[str, str]] = (f"qb{os.getpid()}a", f"qb{os.getpid()}b")

    @property
    def inside(self) -> list[str]:
        """What stands before a command that runs in it."""
        return ["ip", "netns", "exec", self.NAME]

    @classmethod
    def possible(cls) -> bool:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return False
        try:  # root of a container need not be allowed to
            with cls():
                return True
        except subprocess.CalledProcessError:
            return False

    def __enter__(self) -> Network:
        _clean()
        _ip("netns", "add", self.NAME)
        try:
            self._connect()
        except subprocess.CalledProcessError:
            _ip("netns", "del", self.NAME)
            raise
        return self

    def _connect(self) -> None:
        here, there = self.CABLE
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", there, "netns", self.NAME)
        _ip("addr", "add", f"{self.HOST}/24", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", self.NAME, "addr", "add", f"{self.INSIDE}/24", "dev", there)
        _ip("-n", self.NAME, "link", "set", there, "up")
        _ip("-n", self.NAME, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        _ip("link", "del", self.CABLE[0])
        _ip("netns", "del", self.NAME)

    def cut(self) -> None:
        """From now on nothing gets through, and nobody is told."""
        _ip("link", "set", self.CABLE[0], "down")


def _clean() -> None:
    """Remove what processes that were killed left behind."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    for name in (line.split()[0] for line in listed.stdout.splitlines() if line.strip()):
        pid = name.removeprefix("qbench-")
        if pid != name and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            # its cable goes with it; another process may be removing it too
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
