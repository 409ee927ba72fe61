"""A look at the model on held-out text while it trains, by the measures of ``qbench analyze``."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qbench.analysis.measure import measure
from qbench.records import TrainingSample
from qbench.training.data import TokenFiles, watched_rows
from qbench.training.recipe import TrainingRecipe

BATCH_TOKENS = 8192
SINK = "0.3"  # ε of the sink rates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluator:
    """``ids`` [N, T] int64 of the texts; the model reads them in ``dtype``."""

    ids: Tensor
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype

    def evaluate(self, model: LlamaForCausalLM, step: int) -> TrainingSample:
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
        return TrainingSample(
            step=step,
            loss=math.log(found.perplexity),
            sink_rate=first.rates[SINK],
            sink_rate_gu=first.rates_gu[SINK],
            kurtosis=found.hidden.kurtosis,
            largest=max(abs(found.hidden.minimum), abs(found.hidden.maximum)),
        )


def evaluator(recipe: TrainingRecipe, files: TokenFiles, dtype: torch.dtype) -> Evaluator:
    """The first held-out documents that are long enough, each BOS, where the tokenizer has one,
    and its first tokens. Raises DataError where there are too few."""
    rows = watched_rows(recipe, files)
    return Evaluator(
        ids=torch.tensor(rows, dtype=torch.int64),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(files.folder),
        dtype=dtype,
    )
