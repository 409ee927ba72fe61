"""Text → token files. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from tokenizers import Tokenizer

from qbench import hub
from qbench.checkpoints.find import HUB_ID, READ
from qbench.errors import DataError, RecipeError
from qbench.files import clean_temporaries, temporary
from qbench.training.overlap import Overlap
from qbench.training.sources import HUB, documents, require_source
from qbench.training.token_files import (
    AboutTokens,
    TextSource,
    TokenArray,
    copy_tokenizer,
    tokenizer_digest,
    write_about,
)
from qbench.training.tokenizer import learn_tokenizer

BATCH = 1 << 22  # characters that are encoded at once, on all cores
STRIDE = 50  # one document of so many is held out, until there are enough
HELD_OUT = 200_000  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizing:
    """How documents become ids; each is BOS, its text, EOS. ``most_tokens``: stop there."""

    field: str = "text"
    split: str = "train"
    bos: bool = True
    eos: bool = True
    held_out: int = HELD_OUT
    most_tokens: int | None = None
    evaluation: Path | None = None  # folder of evaluation texts, whose paragraphs are left out
    licences: str = ""


@dataclass(kw_only=True, slots=True)
class _Writer:
    """One array as it grows."""

    file: IO[bytes]
    dtype: np.dtype
    tokens: int = 0
    documents: int = 0
    hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, ids: Sequence[int]) -> None:
        payload = np.asarray(ids, self.dtype).tobytes()
        self.file.write(payload)
        self.hash.update(payload)
        self.tokens += len(ids)
        self.documents += 1

    def about(self) -> TokenArray:
        return TokenArray(
            tokens=self.tokens, documents=self.documents, sha256=self.hash.hexdigest()
        )


def tokenize(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str | int,
    settings: Tokenizing,
    progress: Callable[[int, int], None] | None = None,
) -> AboutTokens:
    """Write the folder ``out`` of token files; it must not exist.

    ``tokenizer``: a folder or hub id that has one, or how many entries a new one gets, learnt from
    the text. ``progress`` is told documents and tokens. Raises DataError, RecipeError and
    OutputError.
    """
    for source in sources:
        require_source(source)
    if out.exists():
        raise RecipeError(f"--out {out}: is there already; name a new folder, or remove it")
    found = _tokenizer_folder(tokenizer) if isinstance(tokenizer, str) else None
    making = temporary(out)
    making.mkdir(parents=True)
    try:
        if found is None:
            named = f"learnt from the text, {tokenizer} entries"
            texts = (
                t for s in sources for t in documents(s, field=settings.field, split=settings.split)
            )
            learn_tokenizer(texts, int(tokenizer), making)
        else:
            named = str(tokenizer)
            copy_tokenizer(found, making)
        about = _write(sources, making, named, settings, progress or (lambda *_: None))
        write_about(making, about)
        making.replace(out)
    finally:
        shutil.rmtree(making, ignore_errors=True)
        clean_temporaries(out.parent)
    return about


def _write(
    sources: Sequence[str],
    folder: Path,
    named: str,
    settings: Tokenizing,
    progress: Callable[[int, int], None],
) -> AboutTokens:
    encode, ids = _load(folder, named, settings)
    size = encode.get_vocab_size()
    dtype = np.dtype("<u2" if size <= 2**16 else "<u4")
    overlap = Overlap.of(settings.evaluation) if settings.evaluation else None
    begin = [ids["bos"]] if settings.bos else []
    end = [ids["eos"]] if settings.eos else []
    told: list[TextSource] = []
    number = 0
    with (folder / "train.bin").open("wb") as one, (folder / "held_out.bin").open("wb") as other:
        train, held_out = _Writer(file=one, dtype=dtype), _Writer(file=other, dtype=dtype)
        for source in sources:
            first = number
            texts = documents(source, field=settings.field, split=settings.split)
            kept = overlap.without(texts) if overlap else texts
            for batch in _batches(kept):
                for encoded in encode.encode_batch_fast(batch, add_special_tokens=False):
                    hold = number % STRIDE == 0 and held_out.tokens < settings.held_out
                    (held_out if hold else train).add([*begin, *encoded.ids, *end])
                    number += 1
                progress(number, train.tokens)
                if settings.most_tokens and train.tokens >= settings.most_tokens:
                    break
            told.append(_told(source, number - first))
    if train.tokens == 0:
        raise DataError(f"{', '.join(sources)}: no documents in it beside those held out")
    return AboutTokens(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocabulary=size,
        **ids,
        bos_of_documents=settings.bos,
        eos_of_documents=settings.eos,
        tokenizer=_tokenizer_name(named),
        tokenizer_digest=tokenizer_digest(folder),
        sources=tuple(told),
        licences=settings.licences,
        left_out_paragraphs=overlap.left_out if overlap else 0,
        train=train.about(),
        held_out=held_out.about(),
    )


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= BATCH:
            yield held
            held, size = [], 0
    if held:
        yield held


def _told(source: str, count: int) -> TextSource:
    if source.startswith(HUB):
        return TextSource(name=source, documents=count, sha256=None)
    with Path(source).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return TextSource(name=Path(source).name, documents=count, sha256=digest)


def _tokenizer_folder(named: str) -> Path:
    folder = Path(named).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(named):
        raise RecipeError(f"--tokenizer {named}: no such folder, and not a hub id (owner/name)")
    return hub.snapshot(named, None, READ)


def _tokenizer_name(named: str) -> str:
    folder = Path(named).expanduser()
    return folder.resolve().name if folder.is_dir() else named


def _load(folder: Path, named: str, settings: Tokenizing) -> tuple[Tokenizer, dict]:
    """The tokenizer's fast half, and the ids of its bos, eos and pad."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # nothing else runs in this process
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
        whole = kind.from_pretrained(folder)
        encode = whole.backend_tokenizer
    except Exception as error:  # whatever a broken file makes of the libraries
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"--tokenizer {named}: no usable tokenizer ({line})") from error
    ids = {"bos": whole.bos_token_id, "eos": whole.eos_token_id, "pad": whole.pad_token_id}
    for what in ("bos", "eos"):
        if getattr(settings, what) and ids[what] is None:
            raise DataError(f"--tokenizer {named}: it has no {what.upper()} token; say --no-{what}")
    encode.no_truncation()
    encode.no_padding()
    return encode, ids
