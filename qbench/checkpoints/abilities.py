"""What can be said of a model before it is loaded: whose attention it runs on, and how fast it can
be scored. From its config.json, the table of classes, and transformers' source. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.checkpoints.classes import CLASSES, HEAD, MIXED, NO_INTERFACE, Mode, Own

# Factors and caps that transformers' classes apply to logits, and the values that change nothing.
AFTER_HEAD = {
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
}
MOVING_ROPES = ("longrope", "dynamic")  # angles that depend on the longest sequence of a batch
# What classes hand to their attention function that softmax does not compute, and its words.
HANDED = {"s_aux=": "learned sinks"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """``native``: why the model has to run on its own attention, None where ours does; ``own``:
    what that is. ``scoring``: the fastest mode that works, ``slower`` why it is not fast.
    ``tried``: whether the class is one of the table's. ``spared``: a linear layer that has to
    stay as it is, "" for none. ``normalizer``: what the class computes by itself."""

    name: str
    native: str | None
    own: Own
    scoring: Mode
    slower: str
    tried: bool
    spared: str
    normalizer: str


def abilities(config: Mapping[str, Any]) -> Abilities:
    """Of a model of transformers with this config.json; a class that nobody tried is taken for
    what transformers' source says of it, and scored exactly."""
    kind = config["model_type"]
    row = CLASSES.get(kind)
    stated = {**dict(row.defaults), **config} if row else config
    if row is not None:
        native: str | None = row.native or None
        own, mode, slower = row.own, row.scoring, row.slower
        if slower == HEAD and (reason := _after_head(stated)) is None:
            mode, slower = "fast", ""
    else:
        native, own = _by_source(kind)
        mode, slower = "exact", "nobody tried this class"
    if reason := _after_head(stated):
        mode, slower = "lm-eval", reason
    elif mode == "fast" and (reason := _unlike_a_pack(stated)):
        mode, slower = "exact", reason
    return Abilities(
        name=row.name if row else class_name(kind) or kind,
        native=native,
        own=own,
        scoring=mode,
        slower=slower,
        tried=row is not None,
        spared=row.spared if row else "",
        normalizer=row.normalizer if row else "softmax",
    )


@functools.cache
def class_names() -> dict[str, str]:
    """Class by ``model_type`` of all causal language models that transformers has, read from its
    source: importing it would import torch."""
    text = (_package() / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    start = text.index("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    table = text[start : text.index("\n)\n", start)]
    return dict(re.findall(r'\("([\w.-]+)", "(\w+)"\)', table))


def class_name(kind: str) -> str | None:
    """The class of transformers for this ``model_type``; None where it has no causal model."""
    return class_names().get(kind)


def _after_head(config: Mapping[str, Any]) -> str | None:
    for name, neutral in AFTER_HEAD.items():
        if name in config and config[name] not in neutral:
            return f"{HEAD} ({name} {config[name]})"
    return None


def _unlike_a_pack(config: Mapping[str, Any]) -> str | None:
    """Why a pack of sequences cannot be scored as those sequences are, by the configuration."""
    kinds = set(config.get("layer_types") or ())
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds - {"full_attention"} or (windowed and not kinds):
        return MIXED
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    types = [str(part.get("rope_type") or part.get("type") or "") for part in parts]
    moving = [name for name in types if name.startswith(MOVING_ROPES)]
    return f"{moving[0]} rotary angles depend on the batch" if moving else None


@functools.cache
def _by_source(kind: str) -> tuple[str | None, Own]:
    """Whether a class takes its attention from AttentionInterface, and what its own is."""
    name = class_name(kind)
    source = _source(kind, name) if name else None
    if source is None:
        return "nobody tried this class", "eager"
    own: Own = "eager" if "_supports_sdpa = True" not in source else "sdpa"
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return NO_INTERFACE, own
    handed = [words for sign, words in HANDED.items() if sign in source]
    return (handed[0] if handed else None), own


def _source(kind: str, name: str) -> str | None:
    """The modelling code that defines the class ``name``."""
    folder = _package() / "models"
    guesses = [kind.replace("-", "_"), kind.replace("-", "_").removesuffix("_text")]
    for guess in dict.fromkeys(guesses):
        for path in sorted((folder / guess).glob("modeling_*.py")):
            text = path.read_text(encoding="utf-8")
            if f"class {name}(" in text:
                return text
    return None


@functools.cache
def _package() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "transformers is a dependency"
    return Path(str(spec.origin)).parent
