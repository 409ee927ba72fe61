"""A look at the model on held-out text while it trains, by the measures of ``qbench analyze``."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from qbench.analysis.measure import measure
from qbench.records import TrainingSample

BATCH_TOKENS = 8192
SINK = "0.3"  # ε of the sink rates


def evaluate(
    model: LlamaForCausalLM,
    step: int,
    *,
    ids: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> TrainingSample:
    """On texts ``ids`` [N, T] int64, at a copy, in the dtype that the checkpoint will be read in:
    what is seen is what ``qbench analyze`` would see. A model that gives no numbers raises
    EvaluationError."""
    found = measure(
        copy.deepcopy(model).to(dtype).eval().requires_grad_(False),
        ids,
        tokenizer=tokenizer,
        linears=(),
        batch=max(1, BATCH_TOKENS // ids.shape[1]),
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
