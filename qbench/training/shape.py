"""A shape as configurations, parameters and work. Imports no torch."""

from __future__ import annotations

from typing import Any

from qbench.attention.normalizers import NORMALIZERS, Parameter
from qbench.checkpoints import fla
from qbench.checkpoints.find import parameter_shapes
from qbench.training.recipe import OwnParameter, Shape


def checkpoint_config(
    shape: Shape, normalizer: str, *, bos: int | None, eos: int | None, pad: int | None
) -> dict[str, Any]:
    """``config.json`` of such a model in flash-linear-attention's format."""
    named = fla.IMPLEMENTATION_OF.get(normalizer)
    return {
        "architectures": ["TransformerForCausalLM"],
        **({"attn_impl": named} if named else {"qbench_normalizer": normalizer}),
        **({"qbench_rotary": False} if shape.rope_theta is None else {}),
        "bos_token_id": bos,
        "elementwise_affine": True,
        "eos_token_id": eos,
        "fuse_cross_entropy": True,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": shape.hidden,
        "initializer_range": shape.init,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions or shape.context,
        "model_type": "transformer",
        "norm_eps": shape.norm_eps,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_kv_heads": shape.kv_heads,
        "pad_token_id": pad,
        "qkv_bias": False,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
        "window_size": None,
    }


def llama_settings(shape: Shape, normalizer: str, **tokens: int | None) -> dict[str, Any]:
    """``model_type`` and its configuration's fields: what loading the checkpoint will make of
    it."""
    settings = fla.llama_settings(checkpoint_config(shape, normalizer, **tokens))
    return settings | {"initializer_range": shape.init}


def own_parameters(shape: Shape, normalizer: str) -> list[tuple[Parameter, OwnParameter]]:
    """The parameters that ``normalizer`` gets in such a model, and what the shape says of each."""
    asked = shape.parameters
    return [
        (one, asked.get(one.attribute, OwnParameter()))
        for one in NORMALIZERS.get(normalizer).parameters
        if one.required or one.attribute in asked
    ]


def parameters(shape: Shape, normalizer: str = "softmax") -> int:
    """Numbers in a model's weights, those of its normalizer too."""
    settings = llama_settings(shape, normalizer, bos=None, eos=None, pad=None)
    modules = fla.attention_modules(settings)
    shapes = fla.expected_shapes(settings)
    own = [f"{modules[0]}.{one.attribute}" for one, _ in own_parameters(shape, normalizer)]
    shapes |= parameter_shapes(normalizer, modules, shape.heads, own)
    return sum(_product(one) for one in shapes.values())


def flops_per_token(shape: Shape) -> float:
    """Of forward and backward pass: 6 a parameter in matrix products (all matrices but the
    embeddings, which are looked up; the output matrix counts, tied or not), and 6 · layers ·
    hidden · context for attention's two products, half of whose pairs are causal. Recomputation
    and norms are not counted (Narayanan et al. 2021, arXiv 2104.04473, equation 3, halved for
    causality)."""
    settings = llama_settings(shape, "softmax", bos=None, eos=None, pad=None)
    matrices = [s for s in fla.expected_shapes(settings).values() if len(s) == 2]
    products = sum(_product(one) for one in matrices)
    products -= 0 if shape.tied else shape.vocabulary * shape.hidden  # of two, one is looked up
    return 6.0 * products + 6.0 * shape.layers * shape.hidden * shape.context


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
