"""A network of its own on this host, which can be cut. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import ClassVar


class Network:
    """A network namespace with one cable to this host; use it as a context manager."""

    HOST: ClassVar[str] = "10.213.77.1"  # this host's end, of a private range
    INSIDE: ClassVar[str] = "10.213.77.2"
    NAME: ClassVar[str] = "qbench"
    CABLE: ClassVar[tuple[str, str]] = ("qbench0", "qbench1")

    @property
    def inside(self) -> list[str]:
        """What stands before a command that runs in it."""
        return ["ip", "netns", "exec", self.NAME]

    @classmethod
    def possible(cls) -> bool:
        return os.geteuid() == 0 and shutil.which("ip") is not None

    def __enter__(self) -> Network:
        here, there = self.CABLE
        _ip("netns", "add", self.NAME)
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", there, "netns", self.NAME)
        _ip("addr", "add", f"{self.HOST}/24", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", self.NAME, "addr", "add", f"{self.INSIDE}/24", "dev", there)
        _ip("-n", self.NAME, "link", "set", there, "up")
        _ip("-n", self.NAME, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip("link", "del", self.CABLE[0])
        _ip("netns", "del", self.NAME)

    def cut(self) -> None:
        """From now on nothing gets through, and nobody is told."""
        _ip("link", "set", self.CABLE[0], "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
