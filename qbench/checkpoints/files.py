"""Which files of a folder make the checkpoint, and their digest. Imports no torch."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from pathlib import Path

from qbench.checkpoints.weights import INDEX, weight_files
from qbench.errors import CheckpointError

# All that transformers reads to build a causal model, its generation settings and its tokenizer:
# whatever of it changes can change a score. (A tokenizer may also come as tokenizer.4.0.json.)
READ = (
    "config.json", "generation_config.json", INDEX,
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "dict.txt",
    "*vocab*", "*.model", "*.spm", "*.tiktoken", "*.tokenizer", "*.codes", "emoji.json",
    "byte_maps.json", "normalizer.json", "word_*.json", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip


def file_names(folder: Path) -> list[str]:
    """Paths within ``folder`` of all files that loading the checkpoint reads: the weights, the
    configuration, the rest by name."""
    others = [path for pattern in ("*", "additional_chat_templates/*")
              for path in folder.glob(pattern)]  # fmt: skip
    names = [path.relative_to(folder).as_posix() for path in others if path.is_file()]
    read = {name for name in names if any(fnmatchcase(name, pattern) for pattern in READ)}
    weights = weight_files(folder)
    return [*weights, "config.json", *sorted(read - {*weights, "config.json"})]


def stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, bytes and time of change in nanoseconds of every file that the digest is of."""
    try:
        found = [(name, (folder / name).stat()) for name in file_names(folder)]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror})") from None
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the files: 64 hexadecimal digits."""
    total = hashlib.sha256()
    for name in file_names(folder):
        try:
            with (folder / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from None
        total.update(f"{name} {content}\n".encode())
    return total.hexdigest()
