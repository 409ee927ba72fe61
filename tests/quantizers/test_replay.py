"""What replay spares changes no bit of what is stored, and nothing of it stays behind."""

import collections
import contextlib
import copy
import gc
import importlib
import weakref
from pathlib import Path

import pytest
import torch
import transformers as T
from quantizer_models import VOCABULARY, calibration, ids, llama, settings
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from qbench.checkpoints import find, load_model
from qbench.errors import QuantizationError
from qbench.quantizers import gptq_library, gptq_torch, replay
from qbench.quantizers.blocks import walk
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.linear import linears

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
SAMPLES, BLOCKS = 8, 2
BACKENDS = {"gptqmodel": gptq_library, "torch": gptq_torch}

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama, eager": lambda: T.LlamaForCausalLM._from_config(
        T.LlamaConfig(**SHAPE, intermediate_size=160, num_key_value_heads=1),
        attn_implementation="eager",
    ),
    "gpt-neox, parallel": lambda: T.GPTNeoXForCausalLM(
        T.GPTNeoXConfig(**SHAPE, intermediate_size=128)
    ),
    "gpt-neox, serial": lambda: T.GPTNeoXForCausalLM(
        T.GPTNeoXConfig(**SHAPE, intermediate_size=128, use_parallel_residual=False)
    ),
    "opt": lambda: T.OPTForCausalLM(
        T.OPTConfig(**SHAPE, ffn_dim=128, word_embed_proj_dim=64, pad_token_id=1)
    ),
}


def stock(name):
    torch.manual_seed(0)
    return MODELS[name]().eval().requires_grad_(False)


def quantized(model, monkeypatch=None, text=None, **stated):
    """The packed tensors; through plain passes if there is a ``monkeypatch`` to see to that."""
    chosen = settings("gptq-4bit", **stated)
    module = BACKENDS[chosen.backend]
    with monkeypatch.context() if monkeypatch else contextlib.nullcontext() as patch:
        if patch:
            patch.setattr(module, "replaying", lambda *_: contextlib.nullcontext([]))
        return module.quantize(model, chosen, text or calibration(), lambda *_: None)[0]


def assert_same_bits(model, monkeypatch, text=None, **stated):
    plain = quantized(copy.deepcopy(model), monkeypatch, text, **stated)
    found = quantized(model, None, text, **stated)
    assert plain.keys() == found.keys()
    for name, tensors in plain.items():
        for part, tensor in tensors.items():
            assert torch.equal(tensor, found[name][part]), (name, part)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
@pytest.mark.parametrize("true_sequential", [True, False])
def test_the_demo_pair_is_stored_bit_for_bit_as_without(normalizer, true_sequential, monkeypatch):
    model = load_model(find(str(DEMO / normalizer)), dtype=torch.float32, device="cpu")
    text = Calibration(ids=ids(3, 6, 40), seed=3)
    assert_same_bits(model, monkeypatch, text, true_sequential=true_sequential)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("true_sequential", [True, False])
def test_stock_models_are_stored_bit_for_bit_as_without(name, true_sequential, monkeypatch):
    assert_same_bits(stock(name), monkeypatch, true_sequential=true_sequential)


@pytest.mark.parametrize(
    "stated",
    [
        {"desc_act": True, "symmetric": False, "compute_dtype": "bfloat16"},
        {"group_aware": True, "group_size": 16, "batch_size": 3},
        {"group_size": -1, "batch_size": 1, "damp": 0.1},
        {"backend": "torch", "batch_size": 3},
        {"backend": "torch", "true_sequential": False, "desc_act": True},
        {"backend": "torch", "compute_dtype": "bfloat16", "batch_size": 1},
    ],
)
def test_every_setting_gives_the_same_bits_as_without(stated, monkeypatch):
    dtype = getattr(torch, settings("gptq-4bit", **stated).compute_dtype)
    assert_same_bits(llama("softpick", dtype=dtype), monkeypatch, **stated)


def added_in_place(self, hidden_states, **rest):
    """Adds to the attention's output, which is kept."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)
    attended += hidden_states
    return attended + self.mlp(self.post_attention_layernorm(attended))


def input_changed(self, hidden_states, **rest):
    hidden_states += self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def attended_twice(self, hidden_states, **rest):
    for _ in range(2):
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(hidden_states=normed, **rest)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def one_input(self, hidden_states, **rest):
    """Attention and MLP side by side on the same tensor; five layers share it."""
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **rest)
    return hidden_states + attended + self.mlp(normed)


def attention_last(self, hidden_states, **rest):
    hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
    normed = self.input_layernorm(hidden_states)
    return hidden_states + self.self_attn(hidden_states=normed, **rest)[0]


def doubled(self, *args, attend=modeling_llama.LlamaAttention.forward, **kwargs):
    """The attention's output is not its last layer's."""
    output, weights = attend(self, *args, **kwargs)
    return output * 2, weights


def doubled_in_place(self, *args, attend=modeling_llama.LlamaAttention.forward, **kwargs):
    output, weights = attend(self, *args, **kwargs)
    return output.mul_(2), weights


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("module", "forward"),
    [
        ("LlamaDecoderLayer", added_in_place),
        ("LlamaDecoderLayer", input_changed),
        ("LlamaDecoderLayer", attended_twice),
        ("LlamaDecoderLayer", one_input),
        ("LlamaDecoderLayer", attention_last),
        ("LlamaAttention", doubled),
        ("LlamaAttention", doubled_in_place),
    ],
)
def test_blocks_of_other_structure_give_the_same_bits_as_without(
    module, forward, backend, monkeypatch
):
    monkeypatch.setattr(getattr(modeling_llama, module), "forward", forward)
    assert_same_bits(llama("softpick"), monkeypatch, backend=backend, batch_size=3)


def test_a_block_that_is_handed_a_cache_is_left_alone():
    """A forward would change it."""
    model = llama("softpick")
    layers = linears(model)
    route = walk(model, layers, calibration(), 1)
    block, rest, chosen = route.blocks[0], route.arguments[0, 1], set(layers.values())
    assert replay.learn(block, route.sample, rest, chosen, set()) is not None
    rest = {**rest, "past_key_values": T.DynamicCache()}
    assert replay.learn(block, route.sample, rest, chosen, set()) is None


def counted(monkeypatch, **stated):
    """How often each linear layer of the last block was computed, and its attention."""
    model, calls = llama("softpick"), collections.Counter()
    block = model.model.layers[-1]
    kinds = {id(module): name.rpartition(".")[2] for name, module in block.named_modules()}

    def counting(inner):
        def forward(module, *args, **kwargs):
            calls[kinds.get(id(module))] += 1
            return inner(module, *args, **kwargs)

        return forward

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", counting(nn.Linear.forward))
        name = model.config._attn_implementation
        patch.setitem(ALL_ATTENTION_FUNCTIONS, name, counting(ALL_ATTENTION_FUNCTIONS[name]))
        quantized(model, batch_size=1, **stated)
    return calls


LOOKS = 2  # at one sample: what a block is called with, and what it does
ONCE = SAMPLES + LOOKS


def test_attention_runs_once_for_each_sample_and_block(monkeypatch):
    calls = counted(monkeypatch)
    assert {calls[n] for n in ("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")} == {ONCE}
    assert calls["down_proj"] == ONCE
    assert {calls["gate_proj"], calls["up_proj"]} == {ONCE + SAMPLES}  # as replay.py says


def test_where_all_layers_see_the_unquantized_block_there_are_two_passes(monkeypatch):
    calls = counted(monkeypatch, true_sequential=False)
    assert {calls[n] for n in ("self_attn", "q_proj", "o_proj", "gate_proj")} == {ONCE + SAMPLES}
    assert calls["down_proj"] == ONCE


def test_our_own_backend_attends_once_too(monkeypatch):
    calls = counted(monkeypatch, backend="torch")
    assert calls["self_attn"] == ONCE
    # Its passes end right before the layer, but for the one that gives the block's outputs.
    assert calls["down_proj"] == ONCE


def test_without_room_attention_is_computed_again(monkeypatch):
    plain = quantized(llama("softpick"), monkeypatch)
    monkeypatch.setattr(replay, "WIDEST", 0)
    found = quantized(llama("softpick"))
    assert all(torch.equal(plain[n]["qweight"], found[n]["qweight"]) for n in plain)
    assert counted(monkeypatch)["self_attn"] == LOOKS + 4 * SAMPLES


@pytest.mark.parametrize("true_sequential", [True, False])
def test_an_input_that_layers_share_is_counted_and_inverted_once(true_sequential, monkeypatch):
    from gptqmodel.quantization import GPTQ

    calls = collections.Counter()
    for name in ("process_batch", "hessian_inverse"):
        inner = getattr(GPTQ, name)

        def method(self, *args, inner=inner, name=name):
            calls[name] += 1
            return inner(self, *args)

        monkeypatch.setattr(GPTQ, name, method)
    quantized(llama("softpick"), batch_size=1, true_sequential=true_sequential)
    inputs = 4 * BLOCKS  # of q, k and v; of o; of gate and up; of down
    assert calls == {"process_batch": inputs * SAMPLES, "hessian_inverse": inputs}


def state(model):
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for m in model.modules()
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("failing", [False, True])
def test_nothing_stays_behind_even_if_quantizing_fails(backend, failing, monkeypatch):
    model, seen, states = llama("softpick"), ([], []), []
    for block, tensors in zip(model.model.layers, seen, strict=True):
        block.self_attn.o_proj.register_forward_hook(
            lambda _, x, y, tensors=tensors: tensors.extend(map(weakref.ref, (x[0], y)))
        )
    model.model.layers[0].register_forward_pre_hook(lambda _, x: states.append(weakref.ref(x[0])))
    before = state(model)
    if failing:
        owner, name = {
            "gptqmodel": (importlib.import_module("gptqmodel.quantization").GPTQ, "quantize"),
            "torch": (gptq_torch, "_solve"),
        }[backend]
        inner, calls = getattr(owner, name), iter(range(6))

        def failing_later(*args, **kwargs):
            if next(calls, None) is None:
                raise QuantizationError("no room")
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing_later)

    def alive(tensors):
        return len({id(tensor()) for tensor in tensors if tensor() is not None})

    def progress(path, _):
        if path.endswith(".1"):  # what a block kept goes with it
            assert not alive(seen[0])
            assert alive(states) <= 1  # of the sample that shows what blocks do

    chosen = settings("gptq-4bit", backend=backend, batch_size=1)
    with pytest.raises(QuantizationError) if failing else contextlib.nullcontext():
        BACKENDS[backend].quantize(model, chosen, calibration(), progress)
    gc.collect()
    assert len(seen[0]) > SAMPLES
    assert alive(seen[0]) == alive(seen[1]) == alive(states) == 0
    assert not any(patched for *_, patched in state(model))
    if failing or backend == "torch":  # else the library has replaced the layers
        assert state(model) == before
