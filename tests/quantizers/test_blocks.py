"""Calibration shows every block what the model's own forward shows it, layers of any kind."""

import pytest
import torch
from quantizer_models import VOCABULARY, calibration, llama, settings
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from qbench.errors import QuantizationError
from qbench.quantizers.blocks import first_states, walk
from qbench.quantizers.linear import linears
from qbench.quantizers.quantize import quantize

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
WINDOW = 8  # calibration samples have 48 tokens
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            head_dim=32,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
    "olmo3": lambda: Olmo3ForCausalLM(
        Olmo3Config(
            **SHAPE,
            pad_token_id=0,
            eos_token_id=1,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        )
    ),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(
            **SHAPE,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
        )
    ),
}


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(4)  # so that attention is not nearly uniform
    return model


def seen_by(blocks, run):
    """The last input and output of each block while ``run`` runs."""
    seen, handles = {}, []
    for index, block in enumerate(blocks):

        def note(_, args, kwargs, output, index=index):
            hidden = args[0] if args else kwargs["hidden_states"]
            states = output[0] if isinstance(output, tuple) else output
            if hidden.shape[0] == len(calibration().ids):
                seen[index] = hidden.clone(), states.clone()

        handles.append(block.register_forward_hook(note, with_kwargs=True))
    result = run()
    for handle in handles:
        handle.remove()
    return seen, result


@pytest.mark.parametrize("backend", ["torch", "gptqmodel"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_see_in_calibration_what_the_models_forward_shows_them(name, backend, tmp_path):
    """The quantized model's own forward shows each block what the blocks before it, quantized,
    give: that is what calibration must have shown it."""
    model, text = model_of(name), calibration()
    chosen = settings("gptq-8bit", backend=backend, batch_size=len(text.ids), damp=0.1)
    calibrated, made = seen_by(
        model.model.layers,
        lambda: (
            quantize(model, chosen, calibration=text, digest="0" * 64, artifacts=tmp_path).model
        ),
    )
    with torch.no_grad():
        own, _ = seen_by(
            made.model.layers, lambda: made(input_ids=text.ids.clone(), use_cache=False)
        )
    assert calibrated.keys() == own.keys() == set(range(SHAPE["num_hidden_layers"]))
    for index, states in own.items():
        for found, wanted in zip(calibrated[index], states, strict=True):
            off = float((found - wanted).norm() / wanted.norm())
            assert off < 5e-3, (index, off)  # the library stores scales in float16


def test_a_model_that_changes_states_between_its_blocks_is_refused():
    model = llama()
    model.model.layers[1].register_forward_pre_hook(lambda _, x: (x[0] * 2, *x[1:]))
    with pytest.raises(QuantizationError, match=r"layers.1: receives something else"):
        walk(model, linears(model), calibration(), 1)


def test_a_model_that_skips_a_block_is_refused():
    model = llama()
    layers = model.model.layers
    layers[0].forward = lambda hidden, **rest: layers[1].forward(hidden, **rest)
    with pytest.raises(QuantizationError, match=r"calibration never reaches model.layers.0"):
        walk(model, linears(model), calibration(), 1)


def test_arguments_that_depend_on_the_text_are_refused():
    model = llama()

    def with_sum(_, args, kwargs):
        return args, {**kwargs, "total": args[0].sum()}

    model.model.layers[0].register_forward_pre_hook(with_sum, with_kwargs=True)
    route = walk(model, linears(model), calibration(), 1)
    with pytest.raises(QuantizationError, match="depends on the text"):
        list(first_states(model, route, calibration(), 1))
