"""Describe this machine: devices, library versions, memory; send libraries' output to a log.

GPUs are listed through NVML: importing torch takes seconds, and every command starts here.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import logging
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import psutil
import pynvml

from qbench import __version__
from qbench.errors import RecipeError, UnavailableError, failure_line
from qbench.files import GIB, file_digest
from qbench.plugins import loaded

if TYPE_CHECKING:
    from qbench.records import Environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
CELLS_PER_GPU = 3  # quantization of one cell overlaps with the scoring of others
MOST_PER_GPU = 4  # of small models; with six, which take turns, the longest cells end last
CORES_PER_CELL = 2
SELDOM = 50_000  # new objects between two looks for garbage
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Gpu(NamedTuple):
    """Describes a GPU that this process may use."""

    name: str  # such as NVIDIA H200
    memory_gib: float  # all of it


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, from NVML, in CUDA's order; () without a
    driver or if it names one that is not there."""
    by_index, by_id = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    gpus = []
    try:
        pynvml.nvmlInit()
        visible = os.environ.get(VISIBLE)
        names = range(pynvml.nvmlDeviceGetCount()) if visible is None else visible.split(",")
        for name in (str(name).strip() for name in names):
            handle = by_index(int(name)) if name.isdecimal() else by_id(name)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            gpus.append(Gpu(pynvml.nvmlDeviceGetName(handle), memory / GIB))
    except pynvml.NVMLError:
        return ()
    return tuple(gpus)


def _cuda() -> Any:
    import torch

    return torch.cuda


def choose_device(device: str) -> str:
    """Return "cpu" or "cuda" for "auto", "cpu" or "cuda"; "auto" is "cuda" if there is a GPU.
    Raises UnavailableError for "cuda" without a GPU, and for any other name."""
    if device not in ("auto", "cpu", "cuda"):
        raise UnavailableError(f"device {device!r}: must be auto, cpu or cuda")
    problem = None if device == "cpu" else cuda_problem()
    if device == "cuda" and problem:
        raise UnavailableError(f"--device cuda: {problem}; use --device cpu")
    return "cpu" if device == "cpu" or problem else "cuda"


@functools.cache
def cuda_problem() -> str | None:
    """Return in one line why the installed PyTorch can use no GPU; None if it can."""
    build = torch_cuda()
    if build is None:
        return "the installed PyTorch is built without CUDA"
    if not visible_gpus():
        return "no NVIDIA GPU is visible here; check the driver and CUDA_VISIBLE_DEVICES"
    with suppress(pynvml.NVMLError):
        version = pynvml.nvmlSystemGetCudaDriverVersion()
        major, minor = version // 1000, version % 1000 // 10
        if major < int(build.partition(".")[0]):
            return f"the driver supports CUDA {major}.{minor}, PyTorch needs {build}; update it"
    return None


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the processor's features by Linux's names, such as avx512_vnni; an empty set if they
    are not listed, as on ARM."""
    return frozenset(_proc("cpuinfo", "flags").split())


def int8_problem() -> str | None:
    """Return why PyTorch's int8 products are wrong on this processor; None if they are right, or if
    that is not known."""
    flags = cpu_flags()
    if not flags or flags & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        return None
    return "int8 sums saturate on this CPU, which has no VNNI"


def fast_bf16() -> bool:
    """Return whether this processor has instructions for bfloat16; True if that is not known."""
    flags = cpu_flags()
    return not flags or bool(flags & {"avx512_bf16", "amx_bf16"})


def memory_gib(device: str) -> float:
    """Return GiB of memory: all of the first GPU's, or on a CPU what the host has free now."""
    if device == "cuda":
        return visible_gpus()[0].memory_gib
    return psutil.virtual_memory().available / GIB


@functools.cache
def torch_cuda() -> str | None:
    """Return the CUDA version of the installed PyTorch; None for a build without CUDA, or without
    PyTorch."""
    text = package_source("torch", "version.py")
    match = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def package_source(package: str, name: str) -> str:
    """Return the text of a file of an installed ``package``, which is not imported, or ""."""
    spec = importlib.util.find_spec(package)
    file = Path(spec.origin).parent / name if spec and spec.origin else Path(os.devnull)
    return file.read_text(encoding="utf-8")


def gpu_slots(
    gpus: str | None, workers: int | None, device: str, *, at_most: int | None = None
) -> list[int]:
    """Return the GPU index of each worker process, at most ``at_most`` of them (None: no limit); an
    empty list means one cell at a time in this process.

    ``gpus`` is None (one GPU), "all" or a number as text; ``workers`` the processes per GPU, by
    default CELLS_PER_GPU, and 1 on a CPU. Raises RecipeError for GPUs that are not there.
    """
    if device == "cpu":
        if gpus is not None:
            raise RecipeError(f"--gpus {gpus}: this run computes on the CPU; leave --gpus out")
        return [0] * min(workers, at_most or workers) if workers and workers > 1 else []
    present = len(visible_gpus())
    if gpus not in (None, "all") and not (gpus.isdecimal() and 1 <= int(gpus) <= present):
        raise RecipeError(f"--gpus {gpus}: must be all, or a number from 1 to {present}")
    count = present if gpus == "all" else int(gpus or 1)
    return [gpu for _ in range(workers or CELLS_PER_GPU) for gpu in range(count)][:at_most]


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cells_per_gpu(gib: float, gpus: int) -> int:
    """Return how many cells run side by side on each of ``gpus`` GPUs, CELLS_PER_GPU to
    MOST_PER_GPU, by the host's cores and by the memory of a GPU, if each takes about ``gib``."""
    by_cores = cores() // (CORES_PER_CELL * gpus)
    held = int(0.7 * memory_gib("cuda") / gib)  # shapes tell memory only roughly
    return max(CELLS_PER_GPU, min(MOST_PER_GPU, by_cores, held))


version = functools.cache(metadata.version)  # a distribution that is missing is looked for again
ALWAYS = ("torch", "transformers", "lm-eval", "tokenizers", "datasets", "numpy")
# transformers computes linear attention and state spaces by these where they are installed
KERNEL_PACKAGES = (
    "flash-linear-attention", "fla-core", "causal-conv1d", "mamba-ssm", "mambapy", "xlstm",
)  # fmt: skip


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return by name the installed versions of the distributions ``names`` and ``ALWAYS``, "absent"
    for a missing one, and of ``kernel_packages``."""
    return {name: version_of(name) for name in sorted({*ALWAYS, *kernel_packages(), *names})}


@functools.cache  # transformers looks for them once, too
def kernel_packages() -> list[str]:
    """Return those of ``KERNEL_PACKAGES`` that are installed."""
    return [name for name in KERNEL_PACKAGES if version_of(name) != "absent"]


def version_of(name: str) -> str:
    """Return the installed version of a distribution; of a program the start of its file's SHA-256,
    since not all tell their version; "absent" if there is neither."""
    try:
        return version(name)
    except PackageNotFoundError:
        program = shutil.which(name)
        return f"sha256:{file_digest(Path(program))[:16]}" if program else "absent"


def environment(device: str, names: tuple[str, ...], gpu: str | None = None) -> Environment:
    """Return the record's description of this machine, with the versions of ``names``. ``gpu``: the
    name of the planned GPU, None for this host's."""
    from qbench.records import Environment  # Pydantic: a worker starts before it

    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=device,
        hardware=gpu or hardware(device),
        versions=versions((*names, "triton")),
        git_revision=git_revision(),
        qbench=__version__,
        plugins={plugin.name: plugin.digest for plugin in loaded()},
    )


@functools.cache
def hardware(device: str) -> str:
    """Return the name of the processor or of the first GPU."""
    if device == "cuda":
        return visible_gpus()[0].name
    return _proc("cpuinfo", "model name") or platform.processor() or platform.machine()


@functools.cache
def git_revision() -> str | None:
    """Return the commit of this qbench, with ``+`` if its tracked files were changed; None outside
    git, or if git fails."""
    if not (Path(__file__).parents[1] / ".git").exists():
        return None
    git = ["git", "-C", str(Path(__file__).parent)]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", "."]
    try:
        commit, changed = (
            subprocess.run([*git, *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (["rev-parse", "HEAD"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed else "")


def peak_memory_gib(device: str) -> float:
    """Return the peak memory in GiB: of PyTorch's allocator on the fullest GPU; on a CPU, of the
    resident set of this process."""
    if device == "cuda":
        cuda = _cuda()
        each = map(cuda.max_memory_allocated, range(cuda.device_count()))
        return max(each) / GIB
    if peak := _proc("self/status", "VmHWM"):
        return int(peak.split()[0]) * 1024 / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def synchronize(device: str) -> None:
    """Wait until the current GPU has finished its work; on a CPU do nothing."""
    if device == "cuda":
        _cuda().synchronize()


def reset_peak_memory(device: str) -> None:
    """Reset the peak that ``peak_memory_gib`` returns."""
    if device == "cuda":
        cuda = _cuda()
        cuda.init()  # which its statistics do not do
        for index in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(index)
        return
    with suppress(OSError):  # not Linux: the peak is then that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def tidy_memory_seldom() -> None:
    """Have Python look for garbage once in ``SELDOM`` new objects: a look through all objects of a
    model and its tasks takes 0.1 to 0.4 s, and five tasks took nine. Have glibc keep freed blocks
    of up to 32 MiB for the next arrays and tensors: else the tests of a large results folder take
    three times as long, and a tenth of a small model's time on a CPU goes into new pages."""
    gc.set_threshold(SELDOM, *gc.get_threshold()[1:])
    with suppress(OSError, AttributeError):  # other C libraries have no such settings
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(M_MMAP_THRESHOLD, 2**25):  # without, the next would have it stay at 128 KiB
            mallopt(M_TRIM_THRESHOLD, 2**28)


def free(device: str) -> None:
    """Collect garbage, and release the GPU memory that PyTorch holds unused."""
    gc.collect()
    if device == "cuda":
        _cuda().empty_cache()


def _proc(file: str, name: str) -> str:
    """Return the value of ``name`` in a file of /proc; "" if there is none."""
    path = Path("/proc") / file
    text = path.read_text() if path.is_file() else ""
    match = re.search(rf"^{name}\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "GPTQMODEL_DISABLE_GIL_WARNING": "1",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
    "BITSANDBYTES_NOWELCOME": "1",
    # Threads that spin while they wait take the cores from those that they wait for, if anything
    # else runs on the machine: an audit on two busy cores took 196 s with it, and 21 s without.
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # no driver starts in a process that is forked later
}
TALKATIVE = ("torchao", "torch.utils._pytree")  # loggers that warn of their own imports


def set_library_env() -> None:
    """Set the environment variables that libraries read on import, unless the user set them, and
    silence loggers that warn of their own imports."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


UNUSED = ("hqq", "torchao", "sklearn", "scipy")
HIDDEN = ("torchvision", "torchaudio")  # for good
COMPILER = "torch._dynamo"
UNREAD: list[str] = []  # the path of what stands for it
INDEXING = f"{COMPILER}._trace_wrapped_higher_order_op"
MARKS = ("allow_in_graph", "assume_constant_result", "disable")


class _Lazy(ModuleType):
    """Stands for a module until more of it is used than is set here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # others look at the files of all modules
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _CompilersParts(MetaPathFinder, Loader):
    """Imports the compiler before a part of it, while a ``_Lazy`` stands for it. Python alone would
    import such a part twice: the compiler imports it too."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if path is UNREAD else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if isinstance(sys.modules.get(COMPILER), _Lazy):
            del sys.modules[COMPILER]
        module = importlib.import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def import_transformers() -> None:
    """Import transformers' code of models without what no cell needs: hqq (for a cache), torchao
    (for saving models), scikit-learn (for assisted decoding), SciPy (for losses of detectors),
    what reads images and sound (TorchVision imports torch's compiler), the compiler itself and
    tensors over several machines. They take half of the time. The search of all installed files for
    flash-attn is skipped too. TorchVision and TorchAudio stay missing for transformers: it decides
    once which classes there are, and must not find them then.
    """
    from unittest.mock import patch  # slow to import

    import torch  # whole: a thread may be at it, and needs its parts
    import torch.distributed

    # None is Python's own way to say that a module cannot be imported
    hidden: dict[str, Any] = {name: None for name in (*UNUSED, *HIDDEN) if name not in sys.modules}
    if COMPILER not in sys.modules:  # it takes a second, and marks functions that it may meet
        compiler, hidden[INDEXING] = _Lazy(COMPILER), _Lazy(INDEXING)
        unmarked = dict.fromkeys(MARKS, lambda function=None, *_, **__: function or (lambda f: f))
        vars(compiler).update(unmarked, __path__=UNREAD)
        sys.meta_path.insert(0, _CompilersParts())
        hidden[INDEXING].TransformGetItemToIndex = lambda: importlib.import_module(
            INDEXING
        ).TransformGetItemToIndex()
        sys.modules[COMPILER] = compiler
    sys.modules.update(hidden)
    flash = any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_interface")))
    lookup = nullcontext() if flash else patch.object(metadata, "packages_distributions", dict)
    try:
        with lookup, patch.object(torch.distributed, "is_available", lambda: False):
            for name in ("modeling_utils", "generation.utils", "models.llama.modeling_llama"):
                importlib.import_module(f"transformers.{name}")
    finally:
        for name, module in hidden.items():
            if sys.modules[name] is module:
                del sys.modules[name]
        utils = importlib.import_module("transformers.utils")
        for name in UNUSED:
            getattr(utils, f"is_{name}_available").cache_clear()


def terminal() -> AbstractContextManager[TextIO]:
    """Return a copy of standard error that later redirections do not affect; in a notebook, which
    has no file descriptor, standard error itself."""
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8")
    except (OSError, AttributeError):
        return nullcontext(sys.stderr)


@contextmanager
def redirected(log: Path) -> Iterator[None]:
    """Append all that is printed, logged or warned in the body to the file ``log``. The file
    descriptors themselves are redirected, since some libraries print to them, and the root logger
    is restored, since some set its level on import."""
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


def attempt(work: Callable[[], None], log: Path, device: str) -> str | None:
    """Call ``work``; all that it and its libraries print goes to the file ``log``. Returns None, or
    one line on why it failed; a call of ``sys.exit`` counts as a failure. If the GPU then refuses
    further work, ``broken_device`` returns the reason from now on. Threads take turns: file
    descriptors and torch's default dtype belong to the whole process."""
    global _broken_device
    error = None
    with _turn, redirected(log):
        try:
            work()
        except (Exception, SystemExit) as problem:
            traceback.print_exc()
            error = failure_line(problem)
        try:
            free(device)
            if error is not None:
                synchronize(device)
        except Exception as problem:  # CUDA's errors stay: every later call of this process fails
            traceback.print_exc()
            _broken_device = failure_line(problem)
            error = error or _broken_device
    return error


_turn = threading.RLock()
_broken_device: str | None = None


def broken_device() -> str | None:
    """Return why this process can use its GPU no more; None if it can."""
    return _broken_device


def without_current_folder() -> bool:
    """Return whether this process imports nothing from the current folder. Its children must not do
    so either, where a user's own queue.py would stand for Python's."""
    return not {"", os.getcwd()} & {*sys.path}


def python_module(name: str) -> list[str]:
    """Return the command that runs a module in a new process."""
    return [sys.executable, *["-P"] * without_current_folder(), "-m", name]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread during the body. Processes that start there inherit the block;
    their parent must end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
