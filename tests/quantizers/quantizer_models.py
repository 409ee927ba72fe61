"""A tiny Llama with correlated activations, its calibration, and quantizing it in one line."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from qbench.attention.transformers import set_attention
from qbench.machine import int8_problem
from qbench.quantizers import QuantizationConfig, config_of
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.quantize import backend, quantize
from qbench.records import Audit

needs_vnni = pytest.mark.skipif(int8_problem() is not None, reason=str(int8_problem()))
VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
DIGEST = "0123456789abcdef" * 4


def llama(
    normalizer: str = "softmax",
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    hidden: int = 64,
    intermediate: int = 160,
    bias: bool = False,
) -> LlamaForCausalLM:
    """Random weights; embeddings of low rank, so that layers' inputs are correlated."""
    model = copy.deepcopy(_llama(hidden, intermediate, bias))
    for parameter in model.parameters():  # not the rotary frequencies, which stay float32
        parameter.data = parameter.data.to(dtype)
    model = model.to(device).eval().requires_grad_(False)
    set_attention(model, normalizer=normalizer, implementation="reference")
    return model


@functools.cache
def _llama(hidden: int, intermediate: int, bias: bool) -> LlamaForCausalLM:
    draw = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": 2,
             "num_key_value_heads": 1, "attention_bias": bias}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                rank = 12 if "embed" in name else parameter.shape[1]
                left = torch.randn(parameter.shape[0], rank, generator=draw)
                right = torch.randn(rank, parameter.shape[1], generator=draw)
                parameter.copy_(left @ right / (rank * parameter.shape[1]) ** 0.5)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def ids(seed: int, samples: int, length: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (samples, length), generator=draw)


@functools.cache
def calibration(seed: int = 1) -> Calibration:
    return Calibration(ids=ids(seed, 8, 48))


PROBE = ids(2, 2, 23)


def parse(name: str, options: dict[str, Any] | None = None) -> QuantizationConfig:
    """Of weights alone, by their name and ``stated`` options."""
    return config_of({"name": name, **(options or {})})


def settings(name: str, **options: object) -> QuantizationConfig:
    """Of a tiny model: groups of 32, float32."""
    chosen: dict[str, object] = {"compute_dtype": "float32", "group_size": 32}
    if not name.startswith(("rtn", "gptq", "hqq")):
        del chosen["group_size"]
    return parse(name, {**chosen, **options})


def make_with_detail(
    chosen: QuantizationConfig,
    artifacts: Path,
    normalizer: str = "softmax",
    *,
    model: PreTrainedModel | None = None,
    calibrated: Calibration | None = None,
) -> tuple[PreTrainedModel, str]:
    """The tiny model, or ``model``, quantized, and how it came about."""
    return quantize(
        model or llama(normalizer, dtype=getattr(torch, chosen.compute_dtype)),
        chosen,
        calibration=(calibrated or calibration()) if chosen.needs_calibration else None,
        digest=DIGEST,
        artifacts=artifacts,
    )


def make(*of: Any, **more: Any) -> PreTrainedModel:
    return make_with_detail(*of, **more)[0]


def check(
    quantized: PreTrainedModel, chosen: QuantizationConfig, original: PreTrainedModel | None = None
) -> Audit:
    """The audit against the tiny model, or ``original``."""
    original = original or llama(dtype=getattr(torch, chosen.compute_dtype))
    report = audit(original, quantized, chosen, PROBE)
    assert Audit.model_validate_json(report.model_dump_json()) == report
    return report


def packed_layer(chosen: QuantizationConfig, layer: nn.Linear) -> nn.Module:
    """The module that takes the place of ``layer``."""
    functions = backend(chosen.weights)
    tensors = functions.quantize("layer", layer, chosen.weights)
    return functions.from_packed(layer, tensors, chosen.weights).eval()


@torch.no_grad()
def logits(model: LlamaForCausalLM, tokens: Tensor = PROBE) -> Tensor:
    return model(input_ids=tokens.to(model.device), use_cache=False).logits.float()


def damage(model: LlamaForCausalLM, original: LlamaForCausalLM, tokens: Tensor = PROBE) -> float:
    """Mean KL divergence of the next token, in nats."""
    before, after = logits(original, tokens), logits(model, tokens)
    before, after = before.log_softmax(-1), after.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())
