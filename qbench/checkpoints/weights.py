"""Weight files and what their headers say, through safetensors' own reader. Imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from qbench.checkpoints.config import read_json
from qbench.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # transformers would add the adapter to the weights
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Causal masks and positions that GPT-2's and GPT-NeoX's files carry along: they are no weights.
BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|(^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a file says of one of its tensors."""

    file: str
    shape: list[int]
    dtype: str  # safetensors' word: BF16, F32, I8, F8_E4M3, …


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights: those that the index lists, else all
    ``*.safetensors``. Raises CheckpointError for pickles, left-over and missing files."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / ADAPTER).exists():
        raise CheckpointError(f"{ADAPTER}: it is an adapter; merge it into its model first")
    if not (folder / INDEX).exists():
        _refuse_pickles(folder, present)
        return present
    listed = sorted(set(_index(folder).values()))
    if missing := [name for name in listed if name not in present]:
        raise CheckpointError(f"{INDEX} lists {_some(missing)}, which is not there")
    if left_over := [name for name in present if name not in listed]:
        raise CheckpointError(
            f"{_some(left_over)} is not listed in {INDEX}; move what does not belong to the "
            "checkpoint out of its folder"
        )
    return listed


def read_headers(folder: Path) -> dict[str, Header]:
    """All tensors of the weight files by name. Raises CheckpointError for a name that stands in
    two files, for a file that cannot be read, and for numbers that are not floating-point."""
    found: dict[str, Header] = {}
    for file in weight_files(folder):
        for name, header in _read(folder / file).items():
            if name in found:
                raise CheckpointError(
                    f"{name} stands in {found[name].file} and in {file}; move the file that does "
                    "not belong to the checkpoint out of its folder"
                )
            found[name] = header
    if (folder / INDEX).exists():
        _require_index(_index(folder), found)
    strange = [n for n, h in found.items() if h.dtype not in FLOATS and not BUFFERS.search(n)]
    if strange:
        first = found[strange[0]]
        raise CheckpointError(
            f"{_some(strange)} in {first.file}: numbers of type {first.dtype}; weights must be "
            f"unquantized floating-point numbers ({', '.join(sorted(FLOATS))})"
        )
    return found


def elements(headers: dict[str, Header]) -> int:
    """How many numbers the tensors hold together."""
    return sum(math.prod(header.shape) for header in headers.values())


def compare_shapes(found: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    """Raise CheckpointError naming every tensor that is missing, left over or misshapen."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append("missing: " + _some(missing))
    if left_over := [name for name in found if name not in expected]:
        problems.append("left over: " + _some(left_over))
    misshapen = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if misshapen:
        problems.append("misshapen: " + _some(misshapen))
    if problems:
        raise CheckpointError("the tensors do not fit the configuration; " + "; ".join(problems))


def _read(path: Path) -> dict[str, Header]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # a pipe would block its reader for ever
        raise CheckpointError(f"{path.name} is not a regular file")
    found = {}
    try:
        with safe_open(path, framework="numpy") as file:  # reads no tensor
            for name in file.keys():  # noqa: SIM118  no mapping
                part = file.get_slice(name)
                found[name] = Header(
                    file=path.name, shape=list(part.get_shape()), dtype=part.get_dtype()
                )
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} is not a safetensors file, or a broken one ({error})"
        ) from None
    return found


def _index(folder: Path) -> dict[str, str]:
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
        for name in files.values()
    ):
        raise CheckpointError(f"{INDEX} has no weight_map from tensor names to *.safetensors files")
    return files


def _require_index(listed: dict[str, str], found: dict[str, Header]) -> None:
    wrong = [n for n, file in listed.items() if n not in found or found[n].file != file]
    if wrong:
        raise CheckpointError(f"{INDEX} lists {_some(wrong)}, which its file does not hold")
    if unlisted := [name for name in found if name not in listed]:
        raise CheckpointError(f"{INDEX} does not list {_some(unlisted)}, which its files hold")


def _refuse_pickles(folder: Path, present: list[str]) -> None:
    if present:
        return
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if not pickles:
        raise CheckpointError(f"no *.safetensors file in {folder}")
    raise CheckpointError(
        f"{pickles[0]} is a pickle, which can run code when it is read; convert it where you "
        'trust it: python -c "import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{pickles[0]}', weights_only=True), '{SINGLE}')\""
    )


def _some(names: list[str], at_most: int = 6) -> str:
    rest = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {rest} more" if rest > 0 else "")
