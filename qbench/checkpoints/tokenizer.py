"""A checkpoint's tokenizer. Apart from its model: a plan may ask for it, and what loads models
imports libraries that take seconds and print lines of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qbench.checkpoints import fla
from qbench.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qbench.checkpoints.find import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; runs no remote code."""
    try:
        ours = fla.recognizes(checkpoint.config)
        if ours and (checkpoint.folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(checkpoint.folder)
        return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes of the libraries
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: no usable tokenizer ({first_line(error)})"
        ) from error
