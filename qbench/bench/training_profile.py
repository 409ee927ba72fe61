"""One training step by kernel: how many milliseconds each takes, and how often it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qbench import text

SHOWN = 25  # kernels
NAME = 90  # characters of a kernel's


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    name: str
    calls: int
    ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """``kernels`` by the time that all calls of one took, the longest first. ``wall_ms`` is the
    step from its start to its end; what of it no kernel took, the GPU waited."""

    title: str
    wall_ms: float
    kernels: tuple[Kernel, ...]


def profile_step(title: str, step: Callable[[], object], *, cuda: bool) -> Profile:
    """Profile one call of ``step``. On a CPU the operators stand for kernels."""
    import time

    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    # Nothing is accumulated in one cycle; without it torch 2.11 warns of events that it clears.
    with profile(activities=[activity], acc_events=True) as seen:
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    found = []
    for event in seen.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            found.append(Kernel(name=event.key[:NAME], calls=event.count, ms=spent / 1000))
    found.sort(key=lambda kernel: -kernel.ms)
    return Profile(title=title, wall_ms=1000 * wall, kernels=tuple(found))


def profile_table(one: Profile) -> str:
    """In Markdown; kernels beyond the longest are summed up."""
    busy = sum(kernel.ms for kernel in one.kernels)
    rest = one.kernels[SHOWN:]
    lines = [
        [kernel.name, str(kernel.calls), f"{kernel.ms:.2f}", f"{kernel.ms / busy:.1%}"]
        for kernel in one.kernels[:SHOWN]
    ]
    if rest:
        spent = sum(kernel.ms for kernel in rest)
        calls = sum(kernel.calls for kernel in rest)
        lines.append([f"{len(rest)} others", str(calls), f"{spent:.2f}", f"{spent / busy:.1%}"])
    head = ("kernel", "calls", "ms", "share")
    return (
        f"## {one.title}: {one.wall_ms:.1f} ms a step, {busy:.1f} ms in kernels\n\n"
        f"{text.table(head, lines, align='lrrr')}\n"
    )
