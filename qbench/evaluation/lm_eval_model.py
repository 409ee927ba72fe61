"""Score a column that another runtime computes, through lm-eval's class for that runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model

from qbench.errors import EvaluationError, UnavailableError, first_line
from qbench.evaluation.settings import ScoringSettings
from qbench.records import ScoringReport


def external_model(model: str, args: Mapping[str, Any]) -> LM:
    """Return lm-eval's ``model`` made with ``args``. Raises UnavailableError if it cannot
    be made.
    """
    try:
        return get_model(model).create_from_arg_obj(dict(args))
    except Exception as error:  # whatever its library, its server or its arguments say
        raise UnavailableError(
            f"lm-eval's {model} cannot be started: {first_line(error)}"
        ) from error


class ExternalScorer(LM):
    """An lm-eval language model that hands requests to another runtime."""

    def __init__(self, model: LM, settings: ScoringSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self._probed = False

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        if not self._probed:
            self._require_probabilities()
            self._probed = True
        return self._asked("loglikelihood", requests)

    def _require_probabilities(self) -> None:
        """Raise EvaluationError if the runtime's log-likelihoods are not probabilities.

        Those of continuations that exclude each other must sum to at most 1. They do not if a
        server leaves out the generated token: lm-eval's classes then take the prompt's last one for
        it, and drop it. llama-cpp-python's server does.
        """
        instances = [
            Instance(request_type="loglikelihood", doc={}, arguments=("The", f" {letter}"), idx=i)
            for i, letter in enumerate(ascii_lowercase)
        ]
        answers = self._asked("loglikelihood", instances)
        total = sum(math.exp(min(value, 1.0)) for value, _ in answers)
        if not total <= 1.01:  # servers round
            raise EvaluationError(
                f"{type(self.model).__name__}.loglikelihood: the probabilities of 26 continuations "
                f"that exclude each other sum to {total:.3g}: the server leaves tokens out of a "
                "prompt's log-probabilities, or lm-eval cannot read its format; score "
                "generate_until tasks only"
            )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._asked("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._asked("generate_until", requests)

    def _asked(self, kind: str, requests: list[Any]) -> list[Any]:
        try:
            return getattr(self.model, kind)(requests, disable_tqdm=True)
        except (Exception, SystemExit) as error:  # of the runtime, whatever it is
            what = f"{type(self.model).__name__}.{kind}"
            raise EvaluationError(f"{what}: {type(error).__name__}: {first_line(error)}") from error

    def take_report(self) -> ScoringReport:
        return self.report()

    def report(self) -> ScoringReport:
        return ScoringReport(
            mode="lm-eval",
            softmax_dtype="its own",
            batching=f"by {type(self.model).__name__}",
            peak_memory_gib=0.0,
        )
