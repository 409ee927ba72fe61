"""From what the user named to a Checkpoint that can be loaded. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import flash_linear_attention as fla
from qbench.checkpoints.checkpoint import Checkpoint
from qbench.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip


def find(
    source: str,
    *,
    revision: str | None = None,
    normalizer: str | None = None,
    base: Path | None = None,
) -> Checkpoint:
    """Resolve ``source``, a folder (relative to ``base``) or a hub id, and check its headers.

    ``normalizer`` is what the recipe states; it must agree with the checkpoint's own.
    Raises CheckpointError, naming left-over, missing and misshapen tensors.
    """
    folder = _folder(source, revision, base or Path())
    try:
        config = _config(folder)
        _refuse_pickles(folder)
        stated = _normalizer(config, normalizer)
        if fla.recognizes(config):
            settings = fla.llama_settings(config)
            found = {fla.llama_name(name): shape for name, shape in shapes(folder).items()}
            compare_shapes(found, fla.expected_shapes(settings))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {source}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {source}: config.json lacks or garbles {error}"
        ) from error
    return Checkpoint(
        source=source,
        folder=folder,
        format="flash-linear-attention" if fla.recognizes(config) else "transformers",
        normalizer=stated,
        config=config,
        digest=_digest(folder),
        files=stamps(folder),
    )


def shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of all tensors in ``folder``, read from the safetensors headers."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            try:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            except (struct.error, ValueError, MemoryError, OverflowError):
                raise CheckpointError(f"{path.name} is not a safetensors file") from None
        found |= {k: v["shape"] for k, v in header.items() if k != "__metadata__"}
    return found


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


def _some(names: list[str], at_most: int = 6) -> str:
    rest = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {rest} more" if rest > 0 else "")


def _folder(source: str, revision: str | None, base: Path) -> Path:
    path = (base / Path(source).expanduser()).resolve()
    if path.is_dir():
        return path
    if HUB_ID.fullmatch(source):
        return _download(source, revision)
    raise CheckpointError(
        f"checkpoint {source}: no such folder ({path}), and not a hub id (owner/name)"
    )


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.json", *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"checkpoint {hub_id}: no such folder, and the hub did not give it ({reason}); "
            "name a local folder with --checkpoint NAME=FOLDER"
        ) from None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"no config.json in {folder}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"config.json is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a JSON object")
    if config.get("quantization_config"):
        raise CheckpointError(
            "it is quantized already (quantization_config); name the unquantized checkpoint"
        )
    return config


def _refuse_pickles(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if not pickles:
        raise CheckpointError(f"no *.safetensors file in {folder}")
    raise CheckpointError(
        f"{pickles[0]} is a pickle, which can run code when it is read; convert it where you "
        'trust it: python -c "import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{pickles[0]}', weights_only=True), 'model.safetensors')\""
    )


def _normalizer(config: dict[str, Any], stated: str | None) -> str:
    own = config.get("qbench_normalizer")
    if fla.recognizes(config):
        by_format = fla.normalizer(config)
        if own not in (None, by_format):
            raise CheckpointError(
                f"its config contradicts itself: attn_impl {config.get('attn_impl')!r} is "
                f"{by_format}, qbench_normalizer is {own!r}"
            )
        own = by_format
    own = own or "softmax"
    if own not in NORMALIZERS:
        known = ", ".join(NORMALIZERS)
        raise CheckpointError(f"qbench_normalizer {own!r} is not known; known: {known}")
    if stated not in (None, own):
        raise CheckpointError(
            f"it was trained with {own}, the recipe says normalizer: {stated}; "
            "leave normalizer out, or name the right checkpoint"
        )
    return own


def stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every file that the digest is of."""
    found = ((name, (folder / name).stat()) for name in _names(folder))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _names(folder: Path) -> list[str]:
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    tokenizer = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return [*weights, "config.json", *tokenizer]


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for name in _names(folder):
        with (folder / name).open("rb") as file:
            total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
