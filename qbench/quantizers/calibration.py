"""Text that calibrated quantizers see, as token ids."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qbench.errors import DataError
from qbench.quantizers.texts import read_texts


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """``samples`` rows of ``length`` token ids: int64 [samples, length]. ``digest`` is theirs."""

    ids: Tensor
    seed: int

    @property
    def samples(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def digest(self) -> str:
        """SHA-256 of shape and ids; the file's name and format play no part."""
        shape = f"{self.samples}x{self.length}:".encode()
        return hashlib.sha256(shape + self.ids.numpy().astype("<i8").tobytes()).hexdigest()


def read_calibration(
    path: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    seed: int,
    *,
    digest: str | None = None,
    bos: bool = False,
) -> Calibration:
    """Windows of ``length`` tokens from a JSON Lines file with a ``text`` in each line.

    Documents are taken in an order drawn by ``seed``, without special tokens. A document of at
    least ``length`` tokens gives one window, at an index drawn by ``seed``; shorter ones are joined
    to their successors, the end-of-text token between them, until they do. ``bos``: the first
    token of each window is BOS, for a model that sees every text so. ``digest`` is what
    the SHA-256 of the file's bytes must be. Raises DataError for a malformed or changed file, one
    with too little text, or a tokenizer without the BOS that is asked for.
    """
    if bos and tokenizer.bos_token_id is None:
        raise DataError("calibration text begins with BOS, and this tokenizer has none")
    begin = [tokenizer.bos_token_id] if bos else []
    room = length - len(begin)
    texts = read_texts(Path(path), digest=digest)
    draw = random.Random(seed)
    draw.shuffle(texts)
    windows: list[list[int]] = []
    joined: list[int] = []
    for text in texts:
        if len(windows) == samples:
            break
        if joined and tokenizer.eos_token_id is not None:
            joined.append(tokenizer.eos_token_id)
        # verbose=False: documents longer than the model's context are no mistake here.
        joined += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(joined) >= room:
            start = draw.randrange(len(joined) - room + 1)
            windows.append([*begin, *joined[start : start + room]])
            joined = []
    if len(windows) < samples:
        raise DataError(
            f"{path}: gives {len(windows):,} windows of {length:,} tokens, {samples:,} were asked "
            "for; lower calibration samples or length, or add text"
        )
    return Calibration(ids=torch.tensor(windows, dtype=torch.int64), seed=seed)
