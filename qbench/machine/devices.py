"""What this host computes on, asked of the CUDA driver itself. Imports no torch.

Importing torch to ask whether there is a GPU takes seconds, and the parent of worker processes
has no other use for it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from pathlib import Path

from qbench.errors import RecipeError, UnavailableError

DRIVER = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
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


def cuda_is_likely() -> bool:
    """Whether PyTorch is built for CUDA and a driver is installed. Does not start the driver."""
    try:
        return torch_cuda() is not None and _driver() is not None
    except OSError:
        return False


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


def driver_has_started() -> bool:
    """Whether this process has started the CUDA driver. No fork of it could use a GPU then."""
    try:
        return _driver().cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
    except OSError:
        return False


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
