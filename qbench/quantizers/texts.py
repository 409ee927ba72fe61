"""Find and read files of calibration text. Imports no torch."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from qbench import hub
from qbench.errors import DataError, RecipeError
from qbench.files import file_digest

BYTES_PER_TOKEN = 8  # of text: more than natural languages need
HUB_FILE = "hf://"  # prefix of a file in a hub dataset: hf://datasets/<owner>/<name>/<file>


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationText:
    """``samples`` documents of ``length`` tokens, drawn by ``seed`` from a file with ``digest``.
    ``bos``: whether each begins with BOS, as every scored text does; None: if the tokenizer puts
    one before a text, which the caller finds out."""

    path: Path
    digest: str  # SHA-256 of the file's bytes
    samples: int
    length: int
    seed: int
    bos: bool | None = False


def find_text(address: str, *, data: Path | None) -> Path:
    """Return the local file of a calibration ``address``: a path, which need not exist, or a file
    of the hub, which is fetched. With a ``data`` folder the hub is not used: the only file of a
    folder ``calibration`` in ``data`` or beside it takes the place of the hub's. Raises RecipeError
    for an address that is malformed, DataError if there is no such file, or more than one."""
    if not address.startswith(HUB_FILE):
        return Path(address).resolve()
    if data is not None:
        for folder in (data / "calibration", data.parent / "calibration"):
            files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
            if len(files) == 1:
                return files[0]
            if files:
                names = ", ".join(file.name for file in files)
                raise DataError(
                    f"{folder}: which one is the calibration text? choose it with --calibration "
                    f"({names})"
                )
        raise DataError(
            f"calibration: no *.jsonl in {data}/calibration or {data.parent}/calibration, and with "
            "--data the hub is not used; add --calibration FILE"
        )
    parts = address.removeprefix(HUB_FILE).split("/", 3)  # datasets/<owner>/<name>/<file>
    if len(parts) != 4 or parts[0] != "datasets" or not all(parts):
        raise RecipeError(
            f"calibration.path: {address}: write {HUB_FILE}datasets/OWNER/NAME[@REVISION]/FILE"
        )
    _, owner, name, file = parts
    name, _, revision = name.partition("@")
    try:
        return hub.dataset_file(f"{owner}/{name}", file, revision or None)
    except DataError as error:
        raise DataError(
            f"calibration.path: {address}: {error}; try again, or name a local JSON Lines file "
            "with --calibration FILE"
        ) from error


def read_texts(path: Path, *, most: int | None = None, digest: str | None = None) -> list[str]:
    """Return the ``text`` of each of the first ``most`` lines (None: all) of a JSON Lines file,
    which may be gzipped; blank lines are left out. ``digest``: the SHA-256 that the file must have.
    Raises DataError with file and line."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; name JSON Lines with a text field")
    if digest not in (None, file_digest(path)):
        raise DataError(f"{path}: the calibration text changed after this run began; run again")
    texts = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(islice(lines, most), start=1):
                if not line.strip():
                    continue
                text = None
                with suppress(ValueError, TypeError, KeyError, RecursionError):
                    text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise DataError(
                        f"{path}: line {number}: not a JSON object with a text field; write "
                        '{"text": …} in each line'
                    )
                texts.append(text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a complete gzip file ({error}); fetch it again") from None
    return texts


def draw_windows(
    text: CalibrationText, encode: Callable[[str], list[int]], *, end: int | None
) -> list[list[int]]:
    """Return ``text.samples`` windows of ``text.length`` token ids each, or one less with BOS.
    ``encode`` gives a text's ids without special tokens. Texts are taken in an order drawn by the
    seed. One that is long enough gives one window, at an index drawn by the seed; shorter ones are
    joined to their successors, with the end-of-text token ``end`` between them (None: nothing),
    until they are. Raises DataError for too little text."""
    draw, length = random.Random(text.seed), text.length - bool(text.bos)
    texts = read_texts(text.path, digest=text.digest)
    draw.shuffle(texts)
    windows: list[list[int]] = []
    joined: list[int] = []
    for document in texts:
        if len(windows) == text.samples:
            break
        if joined and end is not None:
            joined.append(end)
        joined += encode(document)
        if len(joined) >= length:
            start = draw.randrange(len(joined) - length + 1)
            windows.append(joined[start : start + length])
            joined = []
    if len(windows) < text.samples:
        raise DataError(
            f"{text.path}: gives {len(windows):,} windows of {text.length:,} tokens, "
            f"{text.samples:,} are needed; lower calibration samples or length, or add text"
        )
    return windows


def require_windows(text: CalibrationText, path: Path) -> None:
    """Raise DataError if the file gives fewer windows than ``text.samples``, counted in tokens of
    the tokenizer.json at ``path``; texts that are long enough by their bytes are not tokenized, and
    with a tokenizer that cannot be read nothing is checked."""
    long = BYTES_PER_TOKEN * text.length
    with gzip.open(text.path) if text.path.suffix == ".gz" else text.path.open("rb") as lines:
        enough = (line for line in lines if len(line) >= long)
        if sum(1 for _ in islice(enough, text.samples)) == text.samples:
            return
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # said where the checkpoint is loaded
        return
    draw_windows(text, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, end=0)
