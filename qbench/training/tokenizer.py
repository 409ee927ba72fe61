"""A tokenizer of one's own: byte-level BPE, digits apart, learnt from the text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TOKENIZER = "tokenizer.json"
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
