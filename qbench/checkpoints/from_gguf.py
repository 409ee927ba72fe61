"""Make a checkpoint folder of a GGUF file: its weights dequantized to bfloat16, and its tokenizer;
in a separate process, so that planning loads no torch: ``python -m qbench.checkpoints.from_gguf
FILE FOLDER``."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from qbench.errors import CheckpointError
from qbench.files import file_digest, kept_digest
from qbench.machine import import_transformers, python_module, tidy_memory_seldom

SECONDS_OF_SILENCE = 15.0
UNREADABLE = 3  # exit code if the last line on standard error says all

if TYPE_CHECKING:
    from gguf import ReaderField
    from transformers import PreTrainedTokenizerBase


def dequantized_folder(file: Path, cache: Path) -> Path:
    """Return the folder in ``cache`` with ``file`` as a transformers checkpoint in bfloat16, made
    at the first call. The weights lie on the file's grid. Raises CheckpointError."""
    folder = cache / "from-gguf" / kept_digest(file, file_digest)[:16] / file.stem
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            line = f"{file.name}: dequantizing it into {folder.parent}, once"
            with _repeated(line), tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                made = Path(temporary) / "made"
                command = python_module("qbench.checkpoints.from_gguf")
                done = subprocess.run([*command, file, made], capture_output=True, text=True)
                if done.returncode < 0:
                    raise CheckpointError(
                        f"checkpoint {file}: dequantizing it was killed by signal "
                        f"{-done.returncode}; run it on a machine with more memory"
                    )
                if done.returncode:
                    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                    if done.returncode == UNREADABLE:
                        raise CheckpointError(f"checkpoint {file}: {lines[-1]}")
                    raise CheckpointError(
                        f"checkpoint {file}: transformers cannot read this GGUF file: {lines[-1]}; "
                        "name the original model here, and this file with --quantized LABEL=FILE"
                    )
                made.rename(folder)
    return folder


@contextmanager
def _repeated(line: str) -> Iterator[None]:
    """Print ``line`` on stderr now, and again every ``SECONDS_OF_SILENCE`` while the body runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(SECONDS_OF_SILENCE):
            print(line, file=sys.stderr)

    print(line, file=sys.stderr)
    threading.Thread(target=repeat).start()
    try:
        yield
    finally:
        ended.set()


def main(file: Path, folder: Path) -> None:
    """Write ``file`` to ``folder``. transformers saves no model that it loaded from GGUF, so the
    weights go into a new one of the same configuration. Raises ValueError for a wrong tokenizer;
    ends the process with ``UNREADABLE`` without the package gguf, and if the file is incomplete."""
    try:
        import gguf
    except ImportError:
        print("GGUF files need the package gguf: pip install -e '.[llamacpp]'", file=sys.stderr)
        sys.exit(UNREADABLE)
    import numpy as np

    tidy_memory_seldom()
    # a view of np.memmap, of which readers take one per entry, takes five times an array's
    np.memmap = lambda *args, mapped=np.memmap, **named: mapped(*args, **named).view(np.ndarray)
    # transformers asks for these, and for each field's values, again and again
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        fields = gguf.GGUFReader(str(file)).fields  # before torch is imported
    except (OSError, ValueError, LookupError, OverflowError) as error:
        remedy = "fetch it again, or one of a newer GGUF version"
        print(f"it is not a complete GGUF file ({error}); {remedy}", file=sys.stderr)
        sys.exit(UNREADABLE)
    import torch

    import_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_utils
    from transformers import modeling_gguf_pytorch_utils as legacy

    values: dict[int, object] = {}

    def value_of(part, types, parse=legacy._gguf_parse_value):
        if id(part) not in values:
            values[id(part)] = parse(part, types)
        return values[id(part)]

    legacy._gguf_parse_value = value_of
    modeling_utils.unwrap_model = lambda model: model  # it would import the compiler
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if problem := tokenizer_problem(tokenizer, fields.get(ADD_BOS)):
        raise ValueError(f"{problem} (an update of transformers may help)")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


ADD_BOS = "tokenizer.ggml.add_bos_token"
ENTRIES = 200  # of the vocabulary, that are tokenized
RETURNED = 0.6  # become one token again: 88 % or more of right tokenizers, 32 % of a wrong one


def tokenizer_problem(
    tokenizer: PreTrainedTokenizerBase, add_bos: ReaderField | None
) -> str | None:
    """Return how ``tokenizer`` differs from the GGUF file's, None if it does not seem to: it splits
    entries of its vocabulary, or leaves out BOS, which the field ``add_bos`` may ask for."""
    size, special = len(tokenizer), set(tokenizer.all_special_ids)
    ids = [i for i in range(0, size, max(1, size // ENTRIES)) if i not in special]
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    returned = sum(encode(tokenizer.decode([i])) == [i] for i in ids)
    if returned < RETURNED * len(ids):
        return f"wrong tokenizer: only {returned} of {len(ids)} entries encode to one token again"
    wants_bos = add_bos is not None and add_bos.contents()
    if wants_bos and tokenizer.encode("a")[:1] != [tokenizer.bos_token_id]:
        return "wrong tokenizer: texts begin without BOS, which the file requires"
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
