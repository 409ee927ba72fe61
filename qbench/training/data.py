"""Make token files from text, read them, cut sequences from them, and choose those of each step.

Imports no torch before a batch is made."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from qbench import hub
from qbench.checkpoints.find import HUB_ID, READ
from qbench.errors import DataError, RecipeError, first_line, validation_line
from qbench.evaluation.tasks import parse_rows, read_rows
from qbench.files import clean_temporaries, file_digest, new_folder
from qbench.records import Digest, Line, RecordModel
from qbench.training.training_recipe import TrainingRecipe

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


ABOUT = "tokens.json"
TOKENIZER = "tokenizer.json"
PARTS = ("train", "held_out")
NOT_TOKENIZER = ("config.json", "generation_config.json", "*.index.json")


class TokenArray(RecordModel):
    """The size and the checksum of one array of token ids."""

    tokens: Annotated[int, Field(ge=0)]
    documents: Annotated[int, Field(ge=0)]
    sha256: Digest


class TextSource(RecordModel):
    """A source of documents. ``sha256`` is None if it was streamed from the hub."""

    name: Line
    documents: int
    sha256: Digest | None


class AboutTokens(RecordModel):
    """The content of ``tokens.json``. ``vocabulary``: the tokenizer's largest id + 1."""

    schema_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    bos: int | None  # ids; None: the tokenizer has none
    eos: int | None
    pad: int | None
    bos_of_documents: bool
    eos_of_documents: bool
    # hub id, name of a local folder, or how it was learnt
    tokenizer: Line
    tokenizer_digest: Digest
    sources: tuple[TextSource, ...]
    licences: Line = ""  # filled by earlier versions
    # that shared a 13-gram with an evaluation text
    left_out_lines: int = 0
    train: TokenArray
    held_out: TokenArray

    @property
    def special(self) -> dict[str, int | None]:
        """Return the ids of bos, eos and pad, by name; None for one that the tokenizer lacks."""
        return {"bos": self.bos, "eos": self.eos, "pad": self.pad}

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the ids of both parts and the tokenizer's files."""
        text = f"{self.dtype} {self.train.sha256} {self.held_out.sha256} {self.tokenizer_digest}"
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFiles:
    """A folder of token files, mapped into memory: only the parts in use are read."""

    folder: Path
    about: AboutTokens
    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]


def read_token_files(folder: Path) -> TokenFiles:
    """Return the token files in ``folder``, after hashing all bytes (about a gigabyte per second).
    Raises DataError if the folder holds none, or if a file was changed."""
    path = folder / ABOUT
    if not path.is_file():
        raise DataError(
            f"{folder}: no token files there; make them with: qbench tokenize TEXT --tokenizer "
            f"FOLDER_OR_HUB_ID --out {folder}"
        )
    try:
        about = AboutTokens.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: {validation_line(error)}; tokenize again") from None
    if not (folder / TOKENIZER).is_file():
        raise DataError(f"{folder}: {TOKENIZER} is missing; tokenize again")
    arrays, dtype = {}, np.dtype(about.dtype).newbyteorder("<")
    for part in PARTS:
        file = folder / f"{part}.bin"
        if not file.is_file() or file_digest(file) != getattr(about, part).sha256:
            raise DataError(f"{file}: missing, or changed after it was written; tokenize again")
        empty = not file.stat().st_size
        arrays[part] = np.empty(0, dtype) if empty else np.memmap(file, dtype, mode="r")
    if tokenizer_digest(folder) != about.tokenizer_digest:
        raise DataError(f"{folder}: its tokenizer did not make its token files; tokenize again")
    return TokenFiles(folder=folder, about=about, **arrays)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer's files in ``folder``, by name, without ``tokens.json``. Raises
    DataError if there are none."""
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name != ABOUT
        and any(fnmatchcase(path.name, pattern) for pattern in READ)
        and not any(fnmatchcase(path.name, pattern) for pattern in NOT_TOKENIZER)
    ]
    if not files:
        raise DataError(f"{folder}: no tokenizer there (no tokenizer.json); name another folder")
    return files


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of ``tokenizer_files``, which raises DataError."""
    total = hashlib.sha256()
    for path in tokenizer_files(folder):
        total.update(f"{path.name} {file_digest(path)}\n".encode())
    return total.hexdigest()


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files from the folder ``source`` to the folder ``target``."""
    for path in tokenizer_files(source):
        shutil.copyfile(path, target / path.name)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Token ids cut into rows of ``context`` + 1 ids: every token but the first is predicted. Rows
    follow one another without a gap. Without ``bos`` the last token of a row is the first of the
    next; with it each row begins with that id instead."""

    tokens: NDArray[np.unsignedinteger]
    context: int
    bos: int | None

    def __len__(self) -> int:
        usable = len(self.tokens) - (self.bos is None)
        return max(0, usable // self.context)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows ``indices``, int64 [len(indices), context + 1]."""
        length = self.context + (self.bos is None)
        starts = np.asarray(indices) * self.context
        rows = sliding_window_view(self.tokens, length)[starts].astype(np.int64)
        return rows if self.bos is None else np.insert(rows, 0, self.bos, axis=1)


def sample_indices(step: int, *, rows: int, of: int, seed: int) -> NDArray[np.int64]:
    """Return the indices [rows] of the sequences of ``step``, from 0, among ``of`` sequences. Each
    epoch has another order, a permutation by NumPy's PCG64 seeded with (seed, epoch), so that any
    step can be computed without the steps before it. A step may lie in two epochs."""
    positions = np.arange(step * rows, (step + 1) * rows)
    epochs = positions // of
    indices = np.empty(rows, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permutation(of, seed, int(epoch))[positions[here] % of]
    return indices


@lru_cache(maxsize=2)  # a step may lie in two epochs
def permutation(of: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``of`` sequences in this epoch, int64 [of]."""
    return np.random.default_rng([seed, epoch]).permutation(of)


def dataloader(
    source: Sequences, recipe: TrainingRecipe, processes: PartialState, *, first: int, seed: int
) -> Iterator[Tensor]:
    """Yield the batches of this process, int64 [sequences, context + 1] on its device: one per
    forward pass, step by step from ``first``, in the order of ``seed``. The sequences of a step are
    the same for any number of processes and passes."""
    import torch

    size = recipe.batch.sequences
    offset, stride = processes.process_index * size, processes.num_processes * size
    for step in range(first, recipe.steps):
        indices = sample_indices(step, rows=recipe.global_batch_size, of=len(source), seed=seed)
        for begin in range(offset, len(indices), stride):
            batch = torch.from_numpy(source.rows(indices[begin : begin + size]))
            if processes.device.type == "cuda":
                batch = batch.pin_memory()
            yield batch.to(processes.device, non_blocking=True)


def watched_rows(recipe: TrainingRecipe, files: TokenFiles) -> list[list[int]]:
    """Return ``watch.samples`` rows of ``watch.length`` ids for evaluation: the first held-out
    documents that are long enough, each as BOS, if the tokenizer has one, and its first tokens.
    Raises DataError if there are too few."""
    bos = files.about.bos
    begin = [] if bos is None else [bos]
    room = recipe.watched_length - len(begin)
    count = recipe.watch.samples
    texts = [text[:room] for text in _documents(files) if len(text) >= room][:count]
    if len(texts) < count:
        raise DataError(
            f"{files.folder}: {len(texts)} held-out documents have {room} tokens or more, and "
            f"watch.samples asks for {count}; lower it or watch.length, or tokenize more text"
        )
    return [[*begin, *text.tolist()] for text in texts]


def _documents(files: TokenFiles) -> list[np.ndarray]:
    """Return the held-out documents' ids without BOS; a single one if nothing separates them."""
    about, ids = files.about, np.asarray(files.held_out).astype(np.int64)
    if about.bos_of_documents:
        return [part[1:] for part in np.split(ids, np.flatnonzero(ids == about.bos)) if len(part)]
    if about.eos_of_documents:
        return np.split(ids, np.flatnonzero(ids == about.eos) + 1)
    return [ids]


def sequences(recipe: TrainingRecipe, files: TokenFiles) -> Sequences:
    """Return the sequences that the training of ``recipe`` reads."""
    bos = first_token(recipe, files)
    return Sequences(tokens=files.train, context=recipe.model.context, bos=bos)


def first_token(recipe: TrainingRecipe, files: TokenFiles) -> int | None:
    """Return the BOS id that begins every sequence; None unless the recipe sets ``bos_first``."""
    return files.about.bos if recipe.data.bos_first else None


def require_data(recipe: TrainingRecipe, files: TokenFiles, *, processes: int) -> None:
    """Raise RecipeError if the recipe, the data and the processes do not fit together, DataError if
    there are too few held-out texts to evaluate."""
    about = files.about
    if about.vocabulary > recipe.model.vocabulary:
        raise RecipeError(
            f"model.vocabulary {recipe.model.vocabulary}: the tokenizer of {files.folder} has "
            f"{about.vocabulary} ids; set model.vocabulary to at least that"
        )
    if recipe.data.bos_first and about.bos is None:
        raise RecipeError(
            f"data.bos_first: the tokenizer of {files.folder} has no BOS token; set it to false"
        )
    at_once = recipe.batch.sequences * processes
    if recipe.global_batch_size % at_once:
        raise RecipeError(
            f"batch.sequences {recipe.batch.sequences} × {processes} processes must divide "
            f"the {recipe.global_batch_size} sequences of a step; lower batch.sequences in the "
            "recipe or with --sequences"
        )
    if len(sequences(recipe, files)) < recipe.global_batch_size:
        raise RecipeError(
            f"{files.folder}: {len(files.train):,} tokens are fewer than one step takes "
            f"({recipe.batch.tokens:,}); tokenize more text"
        )
    watched_rows(recipe, files)


# --- token files from text


NGRAM = 13  # words
WORD = re.compile(r"[^\W_]+")
HUB = "hf://datasets/"  # hf://datasets/OWNER/NAME[@REVISION][:CONFIGURATION]
HUB_SOURCE = re.compile(HUB + r"([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?::([\w.-]+))?")
KINDS = (".txt", ".jsonl", ".parquet")
CHUNK = 1 << 20  # characters of a text file that are read at once
SPECIAL = {  # ids 0 to 3 of a learned tokenizer
    "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"
}  # fmt: skip
LEARNED_FROM = 20_000  # documents at most
BATCH = 1024  # documents
STRIDE, HELD_OUT = 50, 200_000  # one document in 50 is held out, up to so many tokens


def _ngrams(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of its first word and the hash of each 13-gram of ``words``, in any case."""
    for start in range(len(words) - NGRAM + 1):
        yield start, hash(" ".join(words[start : start + NGRAM]).lower())


def evaluation_ngrams(folder: Path) -> set[int]:
    """Return the hashes of all 13-grams of words, in lower case, in the strings of the JSON Lines
    files below ``folder``, of this process only. Raises DataError without files."""
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        raise DataError(
            f"{folder}: no *.jsonl files of evaluation texts in it; name the folder of --data"
        )
    values: list[Any] = [row.fields for path in files for row in read_rows(path)[0]]
    ngrams: set[int] = set()
    while values:
        match values.pop():
            case str(text):
                ngrams.update(ngram for _, ngram in _ngrams(WORD.findall(text)))
            case dict(fields):
                values += fields.values()
            case list(parts):
                values += parts
    return ngrams


def without_shared(text: str, ngrams: set[int]) -> tuple[str, int]:
    """Return ``text`` without the lines that contain a word of a 13-gram in ``ngrams`` (which may
    span lines), and how many lines were left out."""
    lines = text.split("\n")
    places = [number for number, line in enumerate(lines) for _ in WORD.findall(line)]
    shared = {
        number
        for start, ngram in _ngrams(WORD.findall(text))
        if ngram in ngrams
        for number in places[start : start + NGRAM]
    }
    kept = (line for number, line in enumerate(lines) if number not in shared)
    return "\n".join(kept), len(shared)


def require_source(source: str) -> None:
    """Raise DataError or RecipeError if ``source`` cannot be read, before work begins."""
    if source.startswith(HUB):
        if not HUB_SOURCE.fullmatch(source):
            raise RecipeError(f"{source}: write {HUB}OWNER/NAME[@REVISION][:CONFIGURATION]")
    elif not Path(source).is_file():
        raise DataError(f"{source}: no such file; name text files, or {HUB}OWNER/NAME")
    elif Path(source).suffix not in KINDS:
        raise DataError(f"{source}: text must be {', '.join(KINDS)}; unpack .gz and .xz first")


def documents(source: str) -> Iterator[str]:
    """Yield the documents of ``source`` in order, without empty ones. ``*.txt``: separated by a
    zero byte, or one document. ``*.jsonl``, ``*.parquet``: the field "text" of each line or row.
    ``hf://datasets/OWNER/NAME``, with ``@REVISION`` and ``:CONFIGURATION`` if there are several:
    that column of the split "train" on the hub, streamed. Raises DataError with the place of an
    error."""
    try:
        texts = _separated(source) if source.endswith(".txt") else _fields(source)
        yield from (text for text in texts if text.strip())
    except DataError:
        raise
    except Exception as error:  # whatever files, network and libraries make of each other
        raise DataError(
            f"{source}: cannot be read ({first_line(error)}); correct it, or leave it out"
        ) from error


def _separated(source: str) -> Iterator[str]:
    """Yield the parts of a text file between zero bytes."""
    rest = ""
    with open(source, encoding="utf-8", newline="") as file:
        while chunk := file.read(CHUNK):
            *ended, rest = (rest + chunk).split("\0")
            yield from ended
    yield rest


def _fields(source: str) -> Iterator[str]:
    """Yield the text of each row of JSON Lines, Parquet or the hub; "" for a null."""
    for number, fields in enumerate(_rows(source), start=1):
        text = fields.get("text", 0)
        if not isinstance(text, str | None):
            raise DataError(
                f"{source}:{number}: no text in the field 'text', but there are "
                f"{', '.join(fields)}; rename the field that holds the text"
            )
        yield text or ""


def _rows(source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set on the hub, a parquet or a JSON Lines file, as mappings."""
    from datasets import load_dataset

    load = partial(load_dataset, split="train", streaming=True)
    if match := HUB_SOURCE.fullmatch(source):
        yield from load(match[1], match[3], revision=match[2])
    elif source.endswith(".parquet"):
        yield from load("parquet", data_files=source)
    else:
        with open(source, encoding="utf-8") as file:
            yield from (row.fields for row in parse_rows(source, file))


def learn_tokenizer(documents: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Learn a byte-level BPE with single digits and at most ``vocabulary`` entries (256 bytes and
    special tokens included) from the first LEARNED_FROM ``documents``, and write ``tokenizer.json``
    and ``tokenizer_config.json`` to ``folder``."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL.values()), show_progress=False,
        initial_alphabet=sorted(level.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(islice(documents, LEARNED_FROM), trainer)
    tokenizer.save(str(folder / TOKENIZER))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = {**kind, **SPECIAL}
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def begin_with(token: int, folder: Path) -> None:
    """Change ``tokenizer.json`` in ``folder`` so that the only special token that it adds is the id
    ``token``, before each text; no change if that holds already."""
    path = str(folder / TOKENIZER)
    tokenizer = Tokenizer.from_file(path)
    plain, special = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    if special == [token, *plain]:
        return
    name = tokenizer.id_to_token(token)
    first = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B:1", special_tokens=[(name, token)]
    )
    others = [tokenizer.post_processor] if tokenizer.post_processor and special == plain else []
    tokenizer.post_processor = processors.Sequence([*others, first])
    tokenizer.save(path)


def tokenize(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str | int,
    bos: bool = True,
    eos: bool = True,
    most_tokens: int | None = None,
    decontaminate: Path | None = None,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> AboutTokens:
    """Write the token files to train on and held out for measuring to the new folder ``out``;
    return what ``tokens.json`` says. ``sources``: see :func:`documents`. ``tokenizer``: a folder or
    hub id that has one, or the number of entries of a new one, learned from the text. Each document
    becomes BOS (if ``bos``), its text, EOS (if ``eos``); one in STRIDE is held out, up to HELD_OUT
    ids. Writing stops after the document that reaches ``most_tokens`` ids to train on.
    ``decontaminate``: a folder of evaluation texts; lines that share a 13-gram with one are left
    out. ``progress`` is called with the documents and tokens so far. Raises DataError for text or
    tokenizers that do not serve, RecipeError for a bad name or an ``out`` that exists, OutputError
    if it cannot be written."""
    for source in sources:
        require_source(source)
    if out.exists():
        raise RecipeError(f"--out {out}: exists already; name a new folder, or remove it")
    ngrams = evaluation_ngrams(decontaminate) if decontaminate else set[int]()
    most, left_out = most_tokens or math.inf, 0
    clean_temporaries(out.parent)
    with new_folder(out) as folder:
        name, fast = _tokenizer(tokenizer, sources, folder)
        special = {part: getattr(fast, f"{part}_token_id") for part in ("bos", "eos", "pad")}
        for part, used in {"bos": bos, "eos": eos}.items():
            if used and special[part] is None:
                raise DataError(f"--tokenizer {name}: no {part.upper()} token; add --no-{part}")
        begin, end = [special["bos"]] * bos, [special["eos"]] * eos
        size = 1 + max(fast.backend_tokenizer.get_vocab().values())  # ids may have gaps
        dtype = np.dtype("<u2" if size <= 2**16 else "<u4")
        read: list[TextSource] = []
        tokens, count = Counter[str](), Counter[str]()  # of each part
        paths = {part: folder / f"{part}.bin" for part in PARTS}
        with paths["train"].open("wb") as train, paths["held_out"].open("wb") as held_out:

            def texts(source: str) -> Iterator[str]:
                nonlocal left_out
                for text in documents(source):
                    kept, lines = without_shared(text, ngrams) if ngrams else (text, 0)
                    left_out += lines
                    if kept.strip():
                        yield kept

            for source in sources:
                if tokens["train"] >= most:
                    break
                first = count.total()
                for encoded in _encoded(fast.backend_tokenizer, texts(source)):
                    if tokens["train"] >= most:
                        break
                    number = count.total()
                    row = np.asarray([*begin, *encoded, *end], dtype)
                    hold_out = number % STRIDE == 0 and len(row) <= HELD_OUT > tokens["held_out"]
                    part = "held_out" if hold_out else "train"
                    (held_out if hold_out else train).write(row.tobytes())
                    tokens[part] += len(row)
                    count[part] += 1
                    progress(number + 1, tokens["train"])
                streamed = source.startswith(HUB)
                read.append(TextSource(
                    name=source if streamed else Path(source).name,
                    documents=count.total() - first,
                    sha256=None if streamed else file_digest(Path(source)),
                ))  # fmt: skip
        if not tokens["train"]:
            raise DataError(
                f"{', '.join(sources)}: no documents beside those held out, the first of each "
                f"{STRIDE}; add text, or put zero bytes between the documents of plain text"
            )
        arrays = {
            part: TokenArray(tokens=tokens[part], documents=count[part], sha256=file_digest(path))
            for part, path in paths.items()
        }
        about = AboutTokens(
            dtype="uint16" if dtype.itemsize == 2 else "uint32", vocabulary=size, **special,
            bos_of_documents=bos, eos_of_documents=eos, tokenizer=name,
            tokenizer_digest=tokenizer_digest(folder), sources=tuple(read),
            left_out_lines=left_out, **arrays,
        )  # fmt: skip
        text = about.model_dump_json(indent=2) + "\n"
        (folder / ABOUT).write_text(text, encoding="utf-8")
    return about


def _encoded(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[list[int]]:
    """Yield the ids of each text; BATCH texts are encoded at once, on all cores."""
    while batch := list(islice(texts, BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield encoding.ids


def _tokenizer(
    given: str | int, sources: Sequence[str], folder: Path
) -> tuple[str, PreTrainedTokenizerFast]:
    """Write the tokenizer's files into ``folder``; return its name for records, and the tokenizer,
    to which the name of a special token in a document is text like any other."""
    if isinstance(given, int):
        learn_tokenizer(chain.from_iterable(map(documents, sources)), given, folder)
        name = f"learnt from the text, {given} entries"
    elif (path := Path(given).expanduser()).is_dir():
        copy_tokenizer(path, folder)
        name = path.resolve().name
    elif HUB_ID.fullmatch(given):
        copy_tokenizer(hub.snapshot(given, None, READ), folder)
        name = given
    else:
        raise RecipeError(
            f"--tokenizer {given}: no such folder; name one, or a hub id (owner/name)"
        )
    if not (folder / TOKENIZER).is_file():
        raise DataError(
            f"--tokenizer {name}: it has no {TOKENIZER}; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # nothing else runs in this process
    from transformers import PreTrainedTokenizerFast

    try:
        fast = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # whatever a broken file makes of the libraries
        raise DataError(
            f"--tokenizer {name}: no usable tokenizer ({first_line(error)}); name another"
        ) from error
    fast.backend_tokenizer.encode_special_tokens = True
    fast.backend_tokenizer.no_truncation()
    fast.backend_tokenizer.no_padding()
    return name, fast
