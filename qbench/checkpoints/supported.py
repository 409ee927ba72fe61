"""Which classes of transformers run, on whose attention, and how fast they can be scored.

One row a class that was tried: the same rows make ``qbench list models`` and the README table, and
tests run a tiny random model of each. What is said of a model before it is loaded comes from its
config.json, the table, and transformers' source. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from qbench.attention.implementation import NATIVE, choose
from qbench.errors import RecipeError

Mode = Literal["fast", "exact", "lm-eval"]
Own = Literal["sdpa", "eager"]

LINEAR, CONV1D = "linear layers", "linear layers (Conv1D, transposed)"
EXPERTS = "linear layers, fused experts one by one"
NO_INTERFACE = "its class computes attention itself"
DROPS = "its layers do not pass on what a pack needs"
HEAD = "scales or caps its logits after the LM head"
MIXED = "windows or layers without attention"
UNTRIED = "this class was not tried"


@dataclass(frozen=True, slots=True)
class ModelClass:
    """What is known of one ``model_type``; ``models``: which were tried, "" for none.

    ``native``: why it runs on its own attention, ``own``, and not on ours; "" where it runs on
    ours. ``scoring`` is the fastest mode that such a model can be scored in, ``slower`` why it is
    not fast. ``defaults``: fields that matter here and that a config.json may leave to the class.
    ``bounded``: it has no positions beyond its context, and fails on more tokens.
    """

    kind: str
    models: str
    native: str = ""
    normalizer: str = "softmax"  # what the class computes
    own: Own = "sdpa"
    scoring: Mode = "fast"
    slower: str = ""
    weights: str = LINEAR
    left_out: str = ""  # weight matrices that stay as they are, since they are no linear layers
    bounded: bool = False
    spared: str = ""  # a linear layer whose weight the class reads by itself: to be left out
    defaults: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return class_names().get(self.kind, self.kind)

    @property
    def attention(self) -> str:
        if self.native:
            return f"native ({self.own}): {self.native}"
        return "ours" if self.normalizer == "softmax" else f"ours: {self.normalizer}"


def _exact(why: str) -> dict[str, Any]:
    return {"scoring": "exact", "slower": why}


def _native(why: str, own: Own = "eager") -> dict[str, Any]:
    return {"native": why, "own": own, **_exact("packs need our attention")}


_ROUTER = {"weights": EXPERTS, "left_out": "routers"}
_WINDOW = (("sliding_window", 4096),)
_HEAD = {"scoring": "lm-eval", "slower": HEAD}
_SINKS = {"normalizer": "softmax-sink", "own": "eager", **_exact(MIXED)}
_CONVOLUTION = {"left_out": "short convolutions", **_exact(MIXED)}

_ROWS = (
    ModelClass("llama", "Llama 1–3, SmolLM 1–2, TinyLlama, Yi, DeepSeek LLM"),
    ModelClass("mistral", "Mistral 7B, Nemo", defaults=_WINDOW),
    ModelClass("ministral", "Ministral", **_exact(MIXED)),
    ModelClass("qwen2", "Qwen 1.5–2.5"),
    ModelClass("qwen3", "Qwen 3"),
    ModelClass("phi", "Phi 1–2"),
    ModelClass("phi3", "Phi 3–4"),
    ModelClass("olmo", "OLMo 1"),
    ModelClass("olmo2", "OLMo 2"),
    ModelClass("olmo3", "OLMo 3", **_exact(MIXED)),
    ModelClass("stablelm", "StableLM 2", **_exact(DROPS)),
    ModelClass("smollm3", "SmolLM 3"),
    ModelClass("gpt_neox", "Pythia, GPT-NeoX, RedPajama"),
    ModelClass("gemma", "Gemma 1"),
    ModelClass(
        "gemma2", "Gemma 2", own="eager", **_HEAD, defaults=(("final_logit_softcapping", 30.0),)
    ),
    ModelClass("gemma3_text", "Gemma 3", **_exact(MIXED)),
    ModelClass("gpt2", "GPT-2, DistilGPT-2", weights=CONV1D, bounded=True),
    ModelClass("gpt_bigcode", "SantaCoder, StarCoder", bounded=True),
    ModelClass("starcoder2", "StarCoder 2"),
    ModelClass("opt", "OPT, OutEffHop", bounded=True),
    ModelClass("cohere", "Command R", **_HEAD, defaults=(("logit_scale", 0.0625),)),
    ModelClass("cohere2", "Command R7B", **_HEAD, defaults=(("logit_scale", 0.0625),)),
    ModelClass("granite", "Granite 3", **_HEAD),
    ModelClass("granitemoe", "Granite MoE", **{**_HEAD, **_ROUTER}),
    ModelClass("mixtral", "Mixtral", **_ROUTER),
    ModelClass("olmoe", "OLMoE", **_ROUTER),
    ModelClass("qwen2_moe", "Qwen 1.5 and 2 MoE", **_ROUTER),
    ModelClass("qwen3_moe", "Qwen 3 MoE", **_ROUTER),
    ModelClass("phimoe", "Phi 3.5 MoE", **_ROUTER),
    ModelClass("deepseek_v2", "DeepSeek V2", **_ROUTER),
    ModelClass("deepseek_v3", "DeepSeek V3, Kimi K2", **_ROUTER),
    ModelClass("glm4_moe", "GLM 4.5", **_ROUTER),
    ModelClass("gpt_oss", "gpt-oss", **_SINKS, **_ROUTER),
    ModelClass(
        "qwen3_next",
        "Qwen 3 Next (gated attention)",
        weights=EXPERTS,
        left_out="routers, short convolutions",
        **_exact(MIXED),
    ),
    ModelClass("qwen3_5_text", "Qwen 3.5 (gated attention)", **_CONVOLUTION),
    ModelClass("afmoe", "Trinity (gated attention)", weights=EXPERTS, **_exact(MIXED)),
    ModelClass("lfm2", "LFM 2", **_CONVOLUTION),
    ModelClass("bamba", "Bamba", **_CONVOLUTION),
    ModelClass("falcon_h1", "Falcon H1", **_CONVOLUTION),
    ModelClass("nemotron", "Nemotron, Minitron", **_exact(DROPS)),
    ModelClass("ernie4_5", "ERNIE 4.5"),
    ModelClass("glm", "GLM 4"),
    ModelClass("glm4", "GLM 4 0414"),
    ModelClass("exaone4", "EXAONE 4", **_exact(MIXED)),
    ModelClass("helium", "Helium"),
    ModelClass("seed_oss", "Seed OSS"),
    ModelClass("hunyuan_v1_dense", "Hunyuan"),
    ModelClass("arcee", "Arcee AFM"),
    ModelClass("apertus", "Apertus"),
    ModelClass("biogpt", "BioGPT", bounded=True),
    ModelClass("persimmon", "Persimmon"),
    ModelClass("bloom", "BLOOM (ALiBi)", **_native(NO_INTERFACE)),
    ModelClass("falcon", "Falcon (rotary or ALiBi)", **_native(NO_INTERFACE, "sdpa")),
    ModelClass("mpt", "MPT (ALiBi)", bounded=True, **_native(NO_INTERFACE)),
    ModelClass("gptj", "GPT-J", bounded=True, **_native(NO_INTERFACE)),
    ModelClass("gpt_neo", "GPT-Neo, TinyStories", bounded=True, **_native(NO_INTERFACE)),
    ModelClass("codegen", "CodeGen", bounded=True, **_native(NO_INTERFACE)),
    ModelClass("xglm", "XGLM", **_native(NO_INTERFACE)),
    ModelClass("granite_swa", "Granite SWA", **_SINKS),
    ModelClass("mimo_v2_flash", "MiMo V2 Flash", **_native("sinks in some layers only"), **_ROUTER),
    ModelClass(
        "mamba",
        "Mamba",
        **_native("it has no attention"),
        left_out="state spaces, short convolutions",
        spared="dt_proj",
    ),
    ModelClass(
        "mamba2", "Mamba 2", **_native("it has no attention"), left_out="short convolutions"
    ),
)

CLASSES = {row.kind: row for row in _ROWS}
assert len(CLASSES) == len(_ROWS)


# Factors and caps that transformers' classes apply to logits, and the values that change nothing.
AFTER_HEAD = {
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
}
MOVING_ROPES = ("longrope", "dynamic")  # angles that depend on the longest sequence of a batch


def model_support(config: Mapping[str, Any]) -> ModelClass:
    """Of a model of transformers with this config.json; a class that nobody tried is taken for
    what transformers' source says of it, and scored exactly."""
    kind = config["model_type"]
    row = CLASSES.get(kind) or _by_source(kind)
    stated = {**dict(row.defaults), **config}
    scoring, slower = row.scoring, row.slower
    if reason := _after_head(stated):
        scoring, slower = "lm-eval", reason
    elif slower in ("", HEAD):
        slower = unlike_a_pack(stated) or ""
        scoring = "exact" if slower else "fast"
    return replace(row, scoring=scoring, slower=slower)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """``implementation``: reference or triton, or for ``native`` sdpa or eager; ``why`` it is
    native, "" where it is not."""

    normalizer: str
    implementation: str
    why: str = ""


def choose_attention(name: str, can: ModelClass, trained: str, wanted: str, device: str) -> Chosen:
    """What the checkpoint ``name`` of a recipe, ``trained`` with a normalizer, runs on where
    ``evaluation.attention`` is ``wanted``.

    Raises RecipeError where that cannot be had, UnavailableError where triton cannot run.
    """
    if NATIVE in (trained, wanted):
        if trained not in (NATIVE, can.normalizer):
            raise RecipeError(
                f"evaluation.attention: native: checkpoints.{name} was trained with {trained}, "
                f"which {can.name} of transformers does not compute; set attention: auto"
            )
        return Chosen(normalizer=NATIVE, implementation=can.own, why="the recipe says so")
    if not can.native:
        return Chosen(normalizer=trained, implementation=choose(trained, wanted, device))
    if trained != can.normalizer:
        raise RecipeError(
            f"checkpoints.{name}: it was trained with {trained}, and {can.name} cannot run on "
            f"qbench's attention: {can.native}"
        )
    if wanted != "auto":
        raise RecipeError(
            f"evaluation.attention: {wanted}: checkpoints.{name} is a {can.name}, which runs on "
            f"its own attention alone ({can.native}); set attention: auto or native"
        )
    return Chosen(normalizer=NATIVE, implementation=can.own, why=can.native)


@functools.cache
def class_names() -> dict[str, str]:
    """Class by ``model_type`` of all causal language models that transformers has, read from its
    source: importing it would import torch."""
    text = (_package() / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    start = text.index("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    table = text[start : text.index("\n)\n", start)]
    return dict(re.findall(r'\("([\w.-]+)", "(\w+)"\)', table))


def _after_head(config: Mapping[str, Any]) -> str | None:
    for name, neutral in AFTER_HEAD.items():
        if name in config and config[name] not in neutral:
            return f"{HEAD} ({name} {config[name]})"
    return None


def unlike_a_pack(config: Mapping[str, Any]) -> str | None:
    """Why a pack of sequences cannot be scored as those sequences are, by the configuration."""
    kinds = set(config.get("layer_types") or ())
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds - {"full_attention"} or (windowed and not kinds):
        return MIXED
    moving = moving_rope(config)
    return f"{moving} rotary angles depend on the batch" if moving else None


def moving_rope(config: Mapping[str, Any]) -> str | None:
    """The kind of rotary embedding, where its angles depend on how long the texts of a forward
    are; else None."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    types = (str(part.get("rope_type") or part.get("type") or "") for part in parts)
    return next((name for name in types if name.startswith(MOVING_ROPES)), None)


@functools.cache
def _by_source(kind: str) -> ModelClass:
    """Whether a class takes its attention from AttentionInterface, and what its own is."""
    source, native = _source(kind), ""
    if not source:
        native = UNTRIED
    elif "ALL_ATTENTION_FUNCTIONS" not in source:
        native = NO_INTERFACE
    elif "s_aux=" in source:
        native = "learned sinks"
    own: Own = "sdpa" if "_supports_sdpa = True" in source else "eager"
    return ModelClass(kind, "", native=native, own=own, **_exact(UNTRIED))


def _source(kind: str) -> str:
    """The modelling code that defines the class of a ``model_type``; "" where it is not found."""
    folder = kind.replace("-", "_").removesuffix("_text")
    texts = (
        path.read_text(encoding="utf-8")
        for path in (_package() / "models").glob(f"{folder}*/modeling_*.py")
    )
    return next((text for text in texts if f"class {class_names().get(kind)}(" in text), "")


@functools.cache
def _package() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "transformers is a dependency"
    return Path(str(spec.origin)).parent
