"""Text → token files. Imports no torch."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from qbench import hub
from qbench.checkpoints.find import HUB_ID, READ
from qbench.errors import DataError, RecipeError, first_line
from qbench.evaluation.tasks import Row, parse_rows, read_rows
from qbench.files import clean_temporaries, file_digest, new_folder
from qbench.training.data import (
    ABOUT,
    PARTS,
    TOKENIZER,
    AboutTokens,
    TextSource,
    TokenArray,
    copy_tokenizer,
    tokenizer_digest,
)

WORDS = 13
WORD = re.compile(r"[^\W_]+")


@dataclass(kw_only=True, slots=True)
class Overlap:
    """Hashes of every run of ``WORDS`` words of the evaluation texts."""

    runs: set[int] = field(default_factory=set)
    left_out: int = 0  # paragraphs so far

    @classmethod
    def of(cls, folder: Path) -> Overlap:
        """All texts of the JSON Lines files below ``folder``. Raises DataError for none."""
        files = sorted(folder.rglob("*.jsonl"))
        if not files:
            raise DataError(f"{folder}: no *.jsonl files of evaluation texts in it")
        found = cls()
        for path in files:
            for row in read_rows(path)[0]:
                for text in _texts(row.fields):
                    found.runs.update(_runs(text))
        return found

    def without(self, texts: Iterable[str]) -> Iterator[str]:
        """``texts`` without the paragraphs (lines) that share a run; empty ones fall away."""
        for text in texts:
            lines = text.split("\n")
            kept = [line for line in lines if self.runs.isdisjoint(_runs(line))]
            self.left_out += len(lines) - len(kept)
            if len(kept) == len(lines):
                yield text
            elif any(line.strip() for line in kept):
                yield "\n".join(kept)


def _runs(text: str) -> Iterator[int]:
    words = [word.lower() for word in WORD.findall(text)]
    return (hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


HUB = "hf://datasets/"  # hf://datasets/OWNER/NAME[@REVISION][:CONFIGURATION]
HUB_SOURCE = re.compile(HUB + r"([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?::([\w.-]+))?")
CHUNK = 1 << 20  # characters of a text read at once
LONGEST = 1 << 28  # characters of one document
OPENERS = {".gz": gzip.open, ".xz": lzma.open}
KINDS = (".jsonl", ".txt", ".parquet")


def documents(source: str, *, field: str = "text", split: str = "train") -> Iterator[str]:
    """The documents of ``source``, in its order; empty ones are left out.

    ``*.jsonl``: the ``field`` of each line; ``*.txt``: separated by a zero byte, or one document;
    both may end in ``.gz`` or ``.xz``. ``*.parquet``: the column ``field``.
    ``hf://datasets/OWNER/NAME``, with ``@REVISION`` and ``:CONFIGURATION`` where wanted: that
    ``split`` of a dataset on the hub, streamed. Raises DataError with the place of what is wrong.
    """
    try:
        if _kind(source) == ".txt":
            found = _separated(source)
        else:
            found = (row.text(field, source) for row in _rows(source, split))
        yield from (text for text in found if text.strip())
    except DataError:
        raise
    except Exception as error:  # whatever files, network and libraries make of each other
        raise DataError(f"{source}: cannot be read ({first_line(error)})") from error


def require_source(source: str) -> None:
    """Raises DataError or RecipeError for a source that cannot be read, before work begins."""
    if source.startswith(HUB):
        if not HUB_SOURCE.fullmatch(source):
            raise RecipeError(f"{source}: write {HUB}OWNER/NAME[@REVISION][:CONFIGURATION]")
        return
    if not Path(source).is_file():
        raise DataError(f"{source}: no such file; name text files, or {HUB}OWNER/NAME")
    if _kind(source) not in KINDS:
        raise DataError(
            f"{source}: text must be {', '.join(KINDS)} (the first two also .gz or .xz)"
        )


def _kind(source: str) -> str:
    """The ending that says what a file holds: ``.txt`` of ``books.txt.xz``; none of the hub's."""
    if source.startswith(HUB):
        return ""
    return Path(source.removesuffix(".gz").removesuffix(".xz")).suffix


def _open(source: str) -> IO[str]:
    opener = OPENERS.get(Path(source).suffix, open)
    return opener(source, "rt", encoding="utf-8", newline="")


def _separated(source: str) -> Iterator[str]:
    held = ""
    with _open(source) as file:
        while chunk := file.read(CHUNK):
            *ended, held = (held + chunk).split("\0")
            yield from ended
            if len(held) > LONGEST:
                raise DataError(
                    f"{source}: a document of more than {LONGEST:,} characters; separate documents "
                    "by a zero byte"
                )
    yield held


def _rows(source: str, split: str) -> Iterator[Row]:
    if _kind(source) == ".jsonl":
        with _open(source) as file:
            yield from parse_rows(source, file)
        return
    from datasets import load_dataset

    if found := HUB_SOURCE.fullmatch(source):
        name, revision, configuration = found.groups()
        rows = load_dataset(name, configuration, split=split, revision=revision, streaming=True)
    else:
        rows = load_dataset("parquet", data_files=source, split="train", streaming=True)
    yield from (Row(line=number, fields=row) for number, row in enumerate(rows, start=1))


SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # ids 0 to 3
DOCUMENTS = 20_000  # of which it is learnt, the first ones


def learn_tokenizer(documents: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of at most ``vocabulary`` entries, the
    256 bytes and the special tokens counted in."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(documents, DOCUMENTS), trainer)
    tokenizer.save(str(folder / TOKENIZER))
    unk, bos, eos, pad = SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def begin_with(token: int, folder: Path) -> None:
    """Let the ``tokenizer.json`` of ``folder`` put ``token`` (its id) before a text where special
    tokens are asked for; unchanged where it does already."""
    path = str(folder / TOKENIZER)
    tokenizer = Tokenizer.from_file(path)
    if tokenizer.encode("a").ids[:1] == [token]:
        return
    name = tokenizer.id_to_token(token)
    first = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B:1", special_tokens=[(name, token)]
    )
    before = tokenizer.post_processor
    tokenizer.post_processor = first if before is None else processors.Sequence([before, first])
    tokenizer.save(path)


BATCH = 1 << 22  # characters that are encoded at once, on all cores
STRIDE = 50  # one document of so many is held out, until there are enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizing:
    """How documents become ids; each is BOS, its text, EOS. ``most_tokens``: stop there."""

    field: str = "text"
    split: str = "train"
    bos: bool = True
    eos: bool = True
    held_out: int = 200_000
    most_tokens: int | None = None
    evaluation: Path | None = None  # folder of evaluation texts, whose paragraphs are left out
    licences: str = ""


def tokenize(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str | int,
    settings: Tokenizing,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> AboutTokens:
    """Write the folder ``out`` of token files; it must not exist.

    ``tokenizer``: a folder or hub id that has one, or how many entries a new one gets, learnt from
    the text. ``progress`` is told documents and tokens. Raises DataError, RecipeError and
    OutputError.
    """
    for source in sources:
        require_source(source)
    if out.exists():
        raise RecipeError(f"--out {out}: exists already; name a new folder, or remove it")
    clean_temporaries(out.parent)
    with new_folder(out) as making:
        if isinstance(tokenizer, int):
            named = f"learnt from the text, {tokenizer} entries"
            texts = (documents(one, field=settings.field, split=settings.split) for one in sources)
            learn_tokenizer(chain.from_iterable(texts), tokenizer, making)
        else:
            folder, named = _find_tokenizer(tokenizer)
            copy_tokenizer(folder, making)
        about = _write(sources, making, named, settings, progress)
        text = about.model_dump_json(indent=2) + "\n"
        (making / ABOUT).write_text(text, encoding="utf-8")
    return about


def _write(
    sources: Sequence[str],
    folder: Path,
    named: str,
    settings: Tokenizing,
    progress: Callable[[int, int], None],
) -> AboutTokens:
    encode, special = _load(folder, named, settings)
    size = encode.get_vocab_size()
    dtype = np.dtype("<u2" if size <= 2**16 else "<u4")
    overlap = Overlap.of(settings.evaluation) if settings.evaluation else None
    begin = [special["bos"]] if settings.bos else []
    end = [special["eos"]] if settings.eos else []
    most = settings.most_tokens or math.inf
    read: list[TextSource] = []
    tokens, count = Counter[str](), Counter[str]()  # of each part
    with ExitStack() as stack:
        files = {part: stack.enter_context((folder / f"{part}.bin").open("wb")) for part in PARTS}
        for source in sources:
            if tokens["train"] >= most:
                break
            first = count.total()
            texts = documents(source, field=settings.field, split=settings.split)
            for encoded in _encoded(encode, overlap.without(texts) if overlap else texts):
                if tokens["train"] >= most:
                    break
                number = count.total()
                hold = number % STRIDE == 0 and tokens["held_out"] < settings.held_out
                part = "held_out" if hold else "train"
                ids = np.asarray([*begin, *encoded, *end], dtype)
                files[part].write(ids.tobytes())
                tokens[part] += len(ids)
                count[part] += 1
                progress(number + 1, tokens["train"])
            read.append(_source(source, count.total() - first))
    if not tokens["train"]:
        raise DataError(f"{', '.join(sources)}: no documents in it beside those held out")
    digests = {part: file_digest(folder / f"{part}.bin") for part in PARTS}
    arrays = {
        part: TokenArray(tokens=tokens[part], documents=count[part], sha256=digest)
        for part, digest in digests.items()
    }
    return AboutTokens(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocabulary=size,
        **special,
        bos_of_documents=settings.bos,
        eos_of_documents=settings.eos,
        tokenizer=named,
        tokenizer_digest=tokenizer_digest(folder),
        sources=tuple(read),
        licences=settings.licences,
        left_out_paragraphs=overlap.left_out if overlap else 0,
        **arrays,
    )


def _encoded(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each text; a batch is encoded at once."""
    for batch in _batches(texts):
        for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield one.ids


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


def _source(source: str, count: int) -> TextSource:
    if source.startswith(HUB):
        return TextSource(name=source, documents=count, sha256=None)
    path = Path(source)
    return TextSource(name=path.name, documents=count, sha256=file_digest(path))


def _find_tokenizer(named: str) -> tuple[Path, str]:
    """Its folder, and what to call it."""
    folder = Path(named).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if not HUB_ID.fullmatch(named):
        raise RecipeError(f"--tokenizer {named}: no such folder, and not a hub id (owner/name)")
    return hub.snapshot(named, None, READ), named


def _load(folder: Path, named: str, settings: Tokenizing) -> tuple[Tokenizer, dict]:
    """The tokenizer's fast half, and the ids of its bos, eos and pad."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # nothing else runs in this process
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
        whole = kind.from_pretrained(folder)
        encode = whole.backend_tokenizer
    except Exception as error:  # whatever a broken file makes of the libraries
        raise DataError(
            f"--tokenizer {named}: no usable tokenizer ({first_line(error)})"
        ) from error
    ids = {"bos": whole.bos_token_id, "eos": whole.eos_token_id, "pad": whole.pad_token_id}
    for what in ("bos", "eos"):
        if getattr(settings, what) and ids[what] is None:
            raise DataError(f"--tokenizer {named}: it has no {what.upper()} token; add --no-{what}")
    encode.no_truncation()
    encode.no_padding()
    return encode, ids
