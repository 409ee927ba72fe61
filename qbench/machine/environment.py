"""Where a record was made, and what a stage cost."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from qbench import __version__
from qbench.machine.devices import device_name
from qbench.plugins import stated
from qbench.records import Environment, Stage

GIB = 2**30
version = functools.cache(metadata.version)  # of who is missing, nothing is remembered
ALWAYS = ("torch", "transformers", "lm-eval", "tokenizers", "datasets", "numpy")


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Installed versions of distributions; ``absent`` for one that is not installed."""
    return {name: _version(name) for name in sorted({*ALWAYS, *names})}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def environment(device: str, names: tuple[str, ...], gpu: str | None = None) -> Environment:
    """``gpu``: the one that was planned for, which need not be of this host."""
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=device,
        hardware=gpu or hardware(device),
        versions=versions((*names, "triton")),
        git_revision=git_revision(),
        qbench=__version__,
        plugins=stated(),
    )


@functools.cache
def hardware(device: str) -> str:
    """Name of the processor or GPU that computes."""
    if device == "cuda":
        return device_name()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def git_revision() -> str | None:
    """Commit of the qbench that runs, ``+`` where its tree was changed. Outside git, as in a
    container, the environment variable QBENCH_REVISION, or None."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return os.environ.get("QBENCH_REVISION")
    try:
        revision = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "qbench")
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def measured(name: str, device: str, stages: list[Stage]) -> Iterator[list[str]]:
    """Append a Stage with wall seconds and peak memory; what the body appends is its detail."""
    detail: list[str] = []
    _reset_peak_memory(device)
    start = time.perf_counter()
    try:
        yield detail
    finally:
        _synchronize(device)
        stages.append(
            Stage(
                name=name,
                seconds=round(time.perf_counter() - start, 3),
                peak_memory_gib=round(peak_memory_gib(device), 3),
                detail="; ".join(detail),
            )
        )


def without(stage: Stage, waited: float) -> Stage:
    """``stage`` less the seconds in which it ``waited`` for another cell."""
    return stage.model_copy(update={"seconds": round(max(0.0, stage.seconds - waited), 3)})


def peak_memory_gib(device: str) -> float:
    """CUDA: peak of PyTorch's allocator; CPU: peak resident set of this process. In GiB."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GIB
    for line in _lines(Path("/proc/self/status")):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / GIB
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _reset_peak_memory(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux: the peak is then that of the whole process


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
