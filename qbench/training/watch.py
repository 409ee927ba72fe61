"""A look at the model on held-out text while it trains, by the measures of ``qbench analyze``."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from qbench.analysis.measure import measure
from qbench.errors import DataError
from qbench.record.training import Sample
from qbench.training.recipe import TrainingRecipe
from qbench.training.token_files import TokenFiles

BATCH_TOKENS = 8192
SINK = "0.3"  # ε of the sink rates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Watched:
    """``ids`` [N, T] int64 of the texts; the model reads them in ``dtype``."""

    ids: Tensor
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype

    def look(self, model: LlamaForCausalLM, step: int) -> Sample:
        """At a copy, in the dtype that the checkpoint will be read in: what is seen is what
        ``qbench analyze`` would see. A model that gives no numbers raises EvaluationError."""
        copied = copy.deepcopy(model).to(self.dtype).eval().requires_grad_(False)
        found = measure(
            copied,
            self.ids,
            tokenizer=self.tokenizer,
            linears=(),
            batch=max(1, BATCH_TOKENS // self.ids.shape[1]),
        )
        first = found.sinks[0]
        return Sample(
            step=step,
            loss=math.log(found.perplexity),
            sink_rate=first.rates[SINK],
            sink_rate_gu=first.rates_gu[SINK],
            kurtosis=found.hidden.kurtosis,
            largest=max(abs(found.hidden.minimum), abs(found.hidden.maximum)),
        )


def watched(recipe: TrainingRecipe, files: TokenFiles, dtype: torch.dtype) -> Watched:
    """The first held-out documents that are long enough, each BOS, where the tokenizer has one,
    and its first tokens. Raises DataError where there are too few."""
    from transformers import PreTrainedTokenizerFast

    bos = files.about.bos
    begin = [] if bos is None else [bos]
    room = recipe.watched_length - len(begin)
    wanted = recipe.watch.samples
    texts = [text[:room] for text in _documents(files) if len(text) >= room][:wanted]
    if len(texts) < wanted:
        raise DataError(
            f"{files.folder}: {len(texts)} held-out documents have {room} tokens or more, and "
            f"watch.samples asks for {wanted}: lower it or watch.length, or tokenize with more "
            "--held-out"
        )
    rows = [[*begin, *text.tolist()] for text in texts]
    return Watched(
        ids=torch.tensor(rows, dtype=torch.int64),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(files.folder),
        dtype=dtype,
    )


def _documents(files: TokenFiles) -> list[np.ndarray]:
    """The held-out documents, without their BOS; as one where nothing parts them."""
    about, ids = files.about, np.asarray(files.held_out).astype(np.int64)
    if about.bos_of_documents:
        return [part[1:] for part in np.split(ids, np.flatnonzero(ids == about.bos)) if len(part)]
    if about.eos_of_documents:
        return np.split(ids, np.flatnonzero(ids == about.eos) + 1)
    return [ids]
