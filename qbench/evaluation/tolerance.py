"""How far fast scoring may lie from exact scoring before a cell fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

Bound = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]  # nats


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Bounds on the sample of each task's documents that is scored both ways.

    ``mean`` and ``largest`` bound the absolute difference of log-likelihoods in nats per scored
    token, over the sample and for a single request: bfloat16 logits of ±16 step by 0.125, so
    single tokens differ by that much for no other reason than rounding. ``changed`` bounds the
    share of sampled documents with another answer; a single one never fails.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    mean: Bound = 0.05
    largest: Bound = 0.5
    changed: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
