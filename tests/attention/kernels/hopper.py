"""A GPU that Triton compiles for, and that is not there."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)


class Hopper:
    """A driver that has a device, and nothing that runs on it."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0
