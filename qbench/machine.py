"""The machine that runs: its devices, what stages cost on it, and its quiet terminal.

Devices are asked of the CUDA driver itself, and records' classes are imported where they are made:
importing torch to ask whether there is a GPU takes seconds, and the command line starts with this.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from qbench import __version__
from qbench.errors import RecipeError, UnavailableError

if TYPE_CHECKING:
    from qbench.records import Environment, Stage

DRIVER = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NAME_BYTES = 256
CAPABILITY = (75, 76)  # attributes of a device: major and minor


def choose_device(wanted: str) -> str:
    """``cpu`` or ``cuda`` for ``auto``, ``cpu`` or ``cuda``; raises UnavailableError."""
    if wanted == "cpu":
        return "cpu"
    problem = cuda_problem()
    if wanted == "auto":
        return "cpu" if problem else "cuda"
    if problem:
        raise UnavailableError(f"--device cuda: {problem}; say --device cpu")
    return wanted


@functools.cache
def cuda_problem() -> str | None:
    """Why the installed PyTorch can use no GPU here, in words; None where it can."""
    build = torch_cuda()
    if build is None:
        return "the installed PyTorch is built without CUDA"
    try:
        driver = _driver()
    except OSError:
        return f"no NVIDIA driver is here ({DRIVER})"
    if (code := driver.cuInit(0)) not in (0, NO_DEVICE):
        return f"the CUDA driver does not start (error {code})"
    if code == NO_DEVICE or not device_count():
        return "no GPU is visible here (does CUDA_VISIBLE_DEVICES hide it?)"
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    major, minor = version.value // 1000, version.value % 1000 // 10
    if major < int(build.partition(".")[0]):
        return f"the driver knows CUDA {major}.{minor}, PyTorch is built for {build}; update it"
    return None


def device_count() -> int:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES says."""
    count = ctypes.c_int()
    code = _driver().cuDeviceGetCount(ctypes.byref(count))
    return count.value if code == 0 else 0


def device_name(index: int = 0) -> str:
    """A GPU's name, such as ``NVIDIA H200``."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
    driver = _driver()
    if (code := driver.cuInit(0)) or (code := driver.cuDeviceGet(ctypes.byref(device), index)):
        raise UnavailableError(f"GPU {index}: the CUDA driver does not give it (error {code})")
    driver.cuDeviceGetName(name, NAME_BYTES, device)
    return name.value.decode()


@functools.cache
def capability(index: int = 0) -> tuple[int, int]:
    """A GPU's compute capability, such as (9, 0)."""
    device, value, parts = ctypes.c_int(), ctypes.c_int(), []
    driver = _driver()
    if (code := driver.cuInit(0)) or (code := driver.cuDeviceGet(ctypes.byref(device), index)):
        raise UnavailableError(f"GPU {index}: the CUDA driver does not give it (error {code})")
    for attribute in CAPABILITY:
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return parts[0], parts[1]


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What this host's processor can do, in Linux's words (avx512_vnni); none where it does not
    say, as on ARM."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def fast_bf16() -> bool:
    """Whether this host's processor has instructions for bfloat16, or nobody knows."""
    flags = cpu_flags()
    return not flags or bool(flags & {"avx512_bf16", "amx_bf16"})


def memory_gib(device: str) -> float | None:
    """Of the first GPU, all of it; on a CPU, what is free now. None where nobody says."""
    if device == "cuda":
        size, handle, driver = ctypes.c_size_t(), ctypes.c_int(), _driver()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), 0):
            return None
        found = driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
        return size.value / GIB if found == 0 else None
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024 / GIB
    return None


@functools.cache
def torch_cuda() -> str | None:
    """The CUDA version that the installed PyTorch is built for; None for a build without."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text()
    stated = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return stated[1] if stated else None


def gpu_slots(
    gpus: str | None,
    workers: int | None,
    device: str,
    cells_a_gpu: int,
    *,
    at_most: int | None = None,
) -> list[int]:
    """The GPU of each worker process, of ``at_most`` so many; an empty list means one cell at a
    time in this process.

    ``gpus`` is None (one GPU), ``all`` or a number. Raises RecipeError for what is not there. What
    takes longest begins first, on the first GPUs; so those that are left over, fewer than there
    are GPUs, go to the last ones.
    """
    if device == "cpu":
        if gpus is not None:
            raise RecipeError(f"--gpus {gpus}: this run computes on the CPU; leave --gpus out")
        return [0] * min(workers, at_most or workers) if workers and workers > 1 else []
    present = device_count()
    if gpus not in (None, "all") and not (gpus.isdecimal() and 1 <= int(gpus) <= present):
        raise RecipeError(f"--gpus {gpus}: all, or a number from 1 to {present}")
    wanted = present if gpus == "all" else int(gpus or 1)
    slots = [gpu for _ in range(workers or cells_a_gpu) for gpu in range(wanted)]
    if at_most is None or at_most >= len(slots):
        return slots
    left = at_most % wanted if at_most > wanted else 0
    return slots[: at_most - left] + [wanted - 1 - i for i in range(left)]


def gpu_of_environment(index: int) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` must say for a process that is to see this process's GPU
    ``index`` alone."""
    visible = os.environ.get(VISIBLE)
    return visible.split(",")[index] if visible else str(index)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(DRIVER)


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
    from qbench.plugins import stated
    from qbench.records import Environment

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
    root = Path(__file__).parents[1]
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
    from qbench.records import Stage

    detail: list[str] = []
    reset_peak_memory(device)
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


def reset_peak_memory(device: str) -> None:
    """The peak that ``peak_memory_gib`` gives is counted from here on."""
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


ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",  # its retries are said by qbench.hub
    "DATASETS_VERBOSITY": "error",
    "GPTQMODEL_DISABLE_GIL_WARNING": "1",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
    "BITSANDBYTES_NOWELCOME": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # no driver starts in a process that is forked later
}


def settle() -> None:
    """Set what libraries read when they are imported. What the user set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def terminal() -> TextIO:
    """Standard error as it is now, out of reach of later redirections. The caller closes it."""
    return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8")


@contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Send everything that is printed, logged or warned in the body to ``log``, appending.

    Some libraries print straight to the file descriptors, some set the root logger's level when
    they are imported, so the descriptors themselves are redirected."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    streams = sys.stdout, sys.stderr
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(target), "w", buffering=1, encoding="utf-8")
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("default")
            yield
    finally:
        with suppress(OSError):  # the disk is full: what is said of that goes to the user
            sys.stdout.close()
        sys.stdout, sys.stderr = streams
        for descriptor, number in zip(saved, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process that is started in the body never sees Ctrl-C: its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
