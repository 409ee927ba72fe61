"""A tiny model's hidden states, kept as an unquantized cell's are."""

from scoring_models import scorer

from qbench.evaluation.kl import BaselineHiddenStates, BaselineWriter

KEY = "0123456789abcdef" * 4


def watch(model, observer, requests, mode="exact", **changes):
    lm = scorer(model, mode, max_length=96, observer=observer, sample=2, **changes)
    if requests[0].request_type == "loglikelihood":
        return lm.loglikelihood(requests, disable_tqdm=True)
    return lm.loglikelihood_rolling(requests, disable_tqdm=True)


def recorded(model, requests, mode="exact") -> BaselineHiddenStates:
    writer = BaselineWriter()
    watch(model, writer, requests, mode)
    return writer.hidden_states()
