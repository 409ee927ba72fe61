"""Which classes of transformers run, on whose attention, and how fast they can be scored.

One row a class that was tried: the same rows make ``qbench list models`` and the README table, and
tests run a tiny random model of each. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["fast", "exact", "lm-eval"]
Own = Literal["sdpa", "eager"]

LINEAR, CONV1D = "linear layers", "linear layers (Conv1D turned)"
EXPERTS = "linear layers, fused experts one by one"
NO_INTERFACE = "its class computes attention itself"
DROPS = "its layers do not hand on what a pack needs"
HEAD = "scales or caps its logits after the LM head"
MIXED = "windows or layers without attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelClass:
    """What was tried of one ``model_type``.

    ``native``: why it runs on its own attention, ``own``, and not on ours; "" where it runs on
    ours. ``scoring`` is the fastest mode that such a model can be scored in, ``slower`` why it is
    not fast. ``defaults``: fields that matter here and that a config.json may leave to the class.
    """

    kind: str
    name: str
    models: str
    native: str = ""
    normalizer: str = "softmax"  # what the class computes
    own: Own = "sdpa"
    scoring: Mode = "fast"
    slower: str = ""
    weights: str = LINEAR
    left_out: str = ""  # weight matrices that stay as they are, since they are no linear layers
    spared: str = ""  # a linear layer whose weight the class reads by itself: to be left out
    defaults: tuple[tuple[str, Any], ...] = ()

    @property
    def attention(self) -> str:
        if self.native:
            return f"native ({self.own}): {self.native}"
        return "ours" if self.normalizer == "softmax" else f"ours: {self.normalizer}"


def _row(kind: str, name: str, models: str, **rest: Any) -> ModelClass:
    return ModelClass(kind=kind, name=name, models=models, **rest)


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
    _row("llama", "LlamaForCausalLM", "Llama 1–3, SmolLM 1–2, TinyLlama, Yi, DeepSeek LLM"),
    _row("mistral", "MistralForCausalLM", "Mistral 7B, Nemo", defaults=_WINDOW),
    _row("ministral", "MinistralForCausalLM", "Ministral", **_exact(MIXED)),
    _row("qwen2", "Qwen2ForCausalLM", "Qwen 1.5–2.5"),
    _row("qwen3", "Qwen3ForCausalLM", "Qwen 3"),
    _row("phi", "PhiForCausalLM", "Phi 1–2"),
    _row("phi3", "Phi3ForCausalLM", "Phi 3–4"),
    _row("olmo", "OlmoForCausalLM", "OLMo 1"),
    _row("olmo2", "Olmo2ForCausalLM", "OLMo 2"),
    _row("olmo3", "Olmo3ForCausalLM", "OLMo 3", **_exact(MIXED)),
    _row("stablelm", "StableLmForCausalLM", "StableLM 2", **_exact(DROPS)),
    _row("smollm3", "SmolLM3ForCausalLM", "SmolLM 3"),
    _row("gpt_neox", "GPTNeoXForCausalLM", "Pythia, GPT-NeoX, RedPajama"),
    _row("gemma", "GemmaForCausalLM", "Gemma 1"),
    _row(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma 2",
        own="eager",
        **_HEAD,
        defaults=(("final_logit_softcapping", 30.0),),
    ),
    _row("gemma3_text", "Gemma3ForCausalLM", "Gemma 3", **_exact(MIXED)),
    _row("gpt2", "GPT2LMHeadModel", "GPT-2, DistilGPT-2", weights=CONV1D),
    _row("gpt_bigcode", "GPTBigCodeForCausalLM", "SantaCoder, StarCoder"),
    _row("starcoder2", "Starcoder2ForCausalLM", "StarCoder 2"),
    _row("opt", "OPTForCausalLM", "OPT, OutEffHop"),
    _row("cohere", "CohereForCausalLM", "Command R", **_HEAD, defaults=(("logit_scale", 0.0625),)),
    _row(
        "cohere2",
        "Cohere2ForCausalLM",
        "Command R7B",
        **_HEAD,
        defaults=(("logit_scale", 0.0625),),
    ),
    _row("granite", "GraniteForCausalLM", "Granite 3", **_HEAD),
    _row("granitemoe", "GraniteMoeForCausalLM", "Granite MoE", **{**_HEAD, **_ROUTER}),
    _row("mixtral", "MixtralForCausalLM", "Mixtral", **_ROUTER),
    _row("olmoe", "OlmoeForCausalLM", "OLMoE", **_ROUTER),
    _row("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen 1.5 and 2 MoE", **_ROUTER),
    _row("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen 3 MoE", **_ROUTER),
    _row("phimoe", "PhimoeForCausalLM", "Phi 3.5 MoE", **_ROUTER),
    _row("deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek V2", **_ROUTER),
    _row("deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek V3, Kimi K2", **_ROUTER),
    _row("glm4_moe", "Glm4MoeForCausalLM", "GLM 4.5", **_ROUTER),
    _row("gpt_oss", "GptOssForCausalLM", "gpt-oss", **_SINKS, **_ROUTER),
    _row(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "Qwen 3 Next (gated attention)",
        weights=EXPERTS,
        left_out="routers, short convolutions",
        **_exact(MIXED),
    ),
    _row(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        "Qwen 3.5 (gated attention)",
        **_CONVOLUTION,
    ),
    _row(
        "afmoe",
        "AfmoeForCausalLM",
        "Trinity (gated attention)",
        weights=EXPERTS,
        **_exact(MIXED),
    ),
    _row("lfm2", "Lfm2ForCausalLM", "LFM 2", **_CONVOLUTION),
    _row("bamba", "BambaForCausalLM", "Bamba", **_CONVOLUTION),
    _row("falcon_h1", "FalconH1ForCausalLM", "Falcon H1", **_CONVOLUTION),
    _row("nemotron", "NemotronForCausalLM", "Nemotron, Minitron", **_exact(DROPS)),
    _row("ernie4_5", "Ernie4_5ForCausalLM", "ERNIE 4.5"),
    _row("glm", "GlmForCausalLM", "GLM 4"),
    _row("glm4", "Glm4ForCausalLM", "GLM 4 0414"),
    _row("exaone4", "Exaone4ForCausalLM", "EXAONE 4", **_exact(MIXED)),
    _row("helium", "HeliumForCausalLM", "Helium"),
    _row("seed_oss", "SeedOssForCausalLM", "Seed OSS"),
    _row("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "Hunyuan"),
    _row("arcee", "ArceeForCausalLM", "Arcee AFM"),
    _row("apertus", "ApertusForCausalLM", "Apertus"),
    _row("biogpt", "BioGptForCausalLM", "BioGPT"),
    _row("persimmon", "PersimmonForCausalLM", "Persimmon"),
    _row("bloom", "BloomForCausalLM", "BLOOM (ALiBi)", **_native(NO_INTERFACE)),
    _row(
        "falcon", "FalconForCausalLM", "Falcon (rotary or ALiBi)", **_native(NO_INTERFACE, "sdpa")
    ),
    _row("mpt", "MptForCausalLM", "MPT (ALiBi)", **_native(NO_INTERFACE)),
    _row("gptj", "GPTJForCausalLM", "GPT-J", **_native(NO_INTERFACE)),
    _row("gpt_neo", "GPTNeoForCausalLM", "GPT-Neo, TinyStories", **_native(NO_INTERFACE)),
    _row("codegen", "CodeGenForCausalLM", "CodeGen", **_native(NO_INTERFACE)),
    _row("xglm", "XGLMForCausalLM", "XGLM", **_native(NO_INTERFACE)),
    _row("granite_swa", "GraniteSWAForCausalLM", "Granite SWA", **_SINKS),
    _row(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        "MiMo V2 Flash",
        **_native("sinks in some layers only"),
        **_ROUTER,
    ),
    _row(
        "mamba",
        "MambaForCausalLM",
        "Mamba",
        **_native("it has no attention"),
        left_out="state spaces, short convolutions",
        spared="dt_proj",
    ),
    _row(
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba 2",
        **_native("it has no attention"),
        left_out="short convolutions",
    ),
)

CLASSES = {row.kind: row for row in _ROWS}
assert len(CLASSES) == len(_ROWS)


def class_normalizer(config: Mapping[str, Any]) -> str:
    """What the class of a model with this config.json computes by itself."""
    row = CLASSES.get(config["model_type"])
    return row.normalizer if row is not None else "softmax"
