"""Read what config.json and transformers' own tables say of a model class before it is loaded.

Whether our attention computes what the class's own does, and how the model can be scored, is
measured when it is loaded (``checkpoints.probe``, ``evaluation.scoring``): no table of classes
decides it. ``tried.csv`` lists the classes that the tests try. Imports no torch.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qbench.attention.implementation import NATIVE, choose
from qbench.errors import RecipeError

Mode = Literal["fast", "exact", "lm-eval"]

CLASS_NORMALIZERS = ("softmax", "softmax-sink")  # that classes of transformers compute themselves
MOVING_ROPES = ("longrope", "dynamic")  # angles depend on the longest sequence of a batch


class TriedClass(NamedTuple):
    """A class that the tests try, with what they measure: a line of ``tried.csv``."""

    model_type: str
    models: str  # published models of the class
    attention: str
    scoring: str  # the fastest mode
    quantized: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenAttention:
    """Holds the attention that a model runs with. ``implementation``: reference or triton; of
    normalizer ``native`` sdpa or eager. ``why``: the reason for ``native``, else empty."""

    normalizer: str
    implementation: str
    why: str = ""


@functools.cache
def tried_classes() -> tuple[TriedClass, ...]:
    """Return the classes that the tests try, in the order of docs/models.md."""
    with (Path(__file__).parent / "tried.csv").open(encoding="utf-8", newline="") as file:
        return tuple(TriedClass(**row) for row in csv.DictReader(file))


@functools.cache
def class_names() -> dict[str, str]:
    """Return the class by ``model_type`` of all causal language models of transformers, read from
    its source: importing it would import torch."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "transformers is a dependency"
    file = Path(str(spec.origin)).parent / "models" / "auto" / "modeling_auto.py"
    text = file.read_text(encoding="utf-8")
    start = text.index("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    table = text[start : text.index("\n)\n", start)]
    return dict(re.findall(r'\("([\w.-]+)", "(\w+)"\)', table))


def choose_attention(
    name: str, class_name: str, normalizer: str, requested: str, device: str
) -> ChosenAttention:
    """Return the attention that checkpoint ``name`` of a recipe, trained with ``normalizer``, is
    loaded with if ``evaluation.attention`` is ``requested``.

    Raises RecipeError if the class cannot compute the normalizer, UnavailableError if triton
    cannot run.
    """
    if NATIVE not in (normalizer, requested):
        implementation = choose(normalizer, requested, device)
        return ChosenAttention(normalizer=normalizer, implementation=implementation)
    if normalizer not in (NATIVE, *CLASS_NORMALIZERS):
        raise RecipeError(
            f"evaluation.attention: native: checkpoints.{name} was trained with {normalizer}, "
            f"which {class_name} of transformers does not compute; set attention: auto"
        )
    return ChosenAttention(normalizer=NATIVE, implementation="sdpa", why="the recipe says so")


def moving_rope(config: Mapping[str, Any]) -> str | None:
    """Return the kind of rotary embedding if its angles depend on how long the texts of a forward
    pass are; else None."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    types = (str(part.get("rope_type") or part.get("type") or "") for part in parts)
    return next((name for name in types if name.startswith(MOVING_ROPES)), None)
