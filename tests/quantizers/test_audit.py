"""The audit passes what is right and names what is not."""

import copy
import dataclasses
from contextlib import contextmanager

import pytest
import torch
from quantizer_models import PROBE, check, llama, make, packed_layer, parse, settings
from torch import nn

from qbench.quantizers import linear
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.audit.weights import forward_weight
from qbench.quantizers.linear import KEPT_WEIGHT, linears
from qbench.quantizers.packed import PackedLinear

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def rtn4(tmp_path_factory):
    return make(settings("rtn-4bit"), tmp_path_factory.mktemp("artifacts"))


def test_a_quantizer_that_does_nothing_is_caught():
    report = check(llama(), settings("rtn-4bit"))
    assert not report.passed
    assert report.coverage == 0
    assert "the logits equal the unquantized model's: nothing was quantized" in report.problems
    assert len(report.left_out) == 14


class Wide(PackedLinear):
    """Keeps the weights beside the codes."""

    def unpack(self, settings):
        stored = super().unpack(settings)
        weights = {"weight": self.dequantize(), **stored.tensors}
        return dataclasses.replace(stored, tensors=weights)


@pytest.mark.parametrize(
    ("name", "really", "words"),
    [
        ("rtn-4bit", "rtn-8bit", ("4 bits have 16", "rtn-4bit should take 4 to")),
        ("hqq-4bit", "hqq-8bit", ("4 bits have 16", "hqq-4bit should take 4 to")),
        ("rtn-4bit", "rtn-2bit", ("rtn-4bit should take 4 to",)),
        ("rtn-3bit", "rtn-3bit:group_size=8", ("levels in a group, 3 bits have 8",)),
    ],
)
def test_other_bits_or_groups_than_the_name_says_are_caught(name, really, words, tmp_path):
    """By levels, by storage, or by both."""
    really, _, options = really.partition(":group_size=")
    model = make(settings(really, **({"group_size": int(options)} if options else {})), tmp_path)
    report = check(model, settings(name))
    assert not report.passed
    for part in words:
        assert any(part in problem for problem in report.problems), report.problems


class Keeping(PackedLinear):
    """Holds codes, multiplies by the original."""

    def forward(self, x):
        return nn.functional.linear(x, linears(llama())[LAYER].weight)


class Wandering(PackedLinear):
    """Small batches are multiplied by something else."""

    def forward(self, x):
        return super().forward(x) * (1 if x.shape[0] > 16 else 1.1)


IGNORING = {"ignore": ("*.1.mlp.up_proj",)}
BROKEN = [  # what is done to the layer or its model, settings, what the audit says
    ("layer.__class__ = Keeping", {}, f"{LAYER}: the weights are the original's: nothing was qua"),
    ("layer.__class__ = Keeping", {}, "off the stored ones"),
    ("layer.__class__ = Wandering", {}, "on random inputs"),
    ("layer.__class__ = Wide", {}, f"{LAYER}: stores 36.75 bits per weight"),
    ("model.set_submodule(LAYER, original)", {}, f"not quantized: {LAYER} [160, 64]"),
    ("model.lm_head = packed_layer(settings('rtn-4bit'), llama().lm_head)", {},
     "lm_head: quantized, though the settings leave it out"),
    ("pass", IGNORING, f"{LAYER}: quantized, though the settings leave it out"),
    ("original.weight.data *= 1.01; model.set_submodule(LAYER, original)", IGNORING,
     f"{LAYER}: neither quantized nor the original"),
    ("layer.zero += 1", {}, "the mean error is"),
    ("layer.scale = layer.scale.flip(0) * 4", {}, "weight error"),
    ("layer.scale[0, 0] = torch.inf", {}, f"{LAYER}: weights that are not finite"),
    ("layer.scale[0, 0] = torch.inf", {}, "logits are not finite"),
    ("inner.norm.weight.data[5] = torch.nan", {}, "model.norm.weight: 1 of 64 values are not fin"),
    ("layer.bias = torch.full((160,), 0.1)", {}, f"{LAYER}.bias: the original has none"),
    ("inner.layers[1].input_layernorm.weight.data *= 2", {},
     "model.layers.1.input_layernorm.weight: not the original's"),
    ("inner.embed_tokens.weight.data[5] += 0.5", {}, "its embeddings: not the original's"),
    ("model.lm_head.weight.data *= 1.01", {}, "its LM head: not the original's"),
    ("layer.codes = torch.zeros(1, 1, dtype=torch.uint8)", {}, "forward fails"),
    ("layer.codes = torch.zeros(1, 1, dtype=torch.uint8)", {}, f"{LAYER}: cannot be measured"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "options", "says"), BROKEN)
def test_a_broken_layer_is_caught_and_named(rtn4, harm, options, says):
    model = copy.deepcopy(rtn4)
    names = {"model": model, "inner": model.model, "layer": model.get_submodule(LAYER)}
    exec(harm, globals() | names | {"original": linears(llama())[LAYER]})
    report = check(model, settings("rtn-4bit", **options))
    assert not report.passed
    assert any(says in problem for problem in report.problems)
    assert (report.left_out == (LAYER,)) == ("set_submodule(LAYER" in harm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("path", ["embed_tokens", "norm", "layers.0.mlp.up_proj"])
def test_a_weight_that_is_not_finite_is_named_though_the_probe_never_meets_it(value, path):
    model = llama()
    weight = model.get_submodule(f"model.{path}").weight.data
    unmet = [token for token in range(len(weight)) if token not in PROBE] if weight.dim() > 1 else 3
    weight[unmet] = value
    report = check(copy.deepcopy(model), parse("fp32"), model)
    assert not report.passed
    assert report.problems[0].startswith(f"the unquantized model: model.{path}.weight: ")
    assert report.problems[0].endswith("values are not finite")


def test_an_unquantized_cell_of_quantized_weights_is_caught(rtn4):
    report = check(rtn4, parse("fp32", {}))
    assert any("not a plain weight in float32" in problem for problem in report.problems)


def test_an_unquantized_cell_of_other_weights_is_caught():
    model = llama()
    linears(model)[LAYER].weight.data[0, 0] += 1
    assert f"{LAYER}: not the original weights" in check(model, parse("fp32", {})).problems


@pytest.mark.parametrize("inputs", [5, 4096, 4100])
def test_the_identity_reads_a_weight_off_its_forward(inputs):
    layer = nn.Linear(inputs, 3)
    assert torch.equal(forward_weight(layer, inputs, torch.float32), layer.weight)
    assert layer.bias is not None


def silent(rows):
    """Inputs of o_proj that are never on. In layers of a trained softpick model 10 of 12 heads were
    silent."""

    def change(block):
        block.self_attn.v_proj.weight.data[:rows] = 0  # of two heads

    return change


def small(block):
    """Weights as of a model's largest activations, which training made small."""
    block.input_layernorm.weight.data[3] *= 20
    block.self_attn.v_proj.weight.data[:, 3] /= 40


@pytest.mark.parametrize(
    ("name", "part", "change", "dead"),
    [("gptq-8bit", "o_proj", silent(8), 16), ("gptq-8bit", "o_proj", silent(24), 48),
     ("gptq-2bit", "v_proj", small, 1)],
)  # fmt: skip
def test_columns_that_gptq_rounds_to_zeros_pass(name, part, change, dead, tmp_path):
    chosen, model = settings(name), llama()
    change(model.model.layers[1])
    report = check(make(chosen, tmp_path, model=copy.deepcopy(model)), chosen, model)
    (module,) = [m for m in report.modules if m.name == f"model.layers.1.self_attn.{part}"]
    assert module.dead_inputs == dead
    assert report.passed, report.problems


@pytest.mark.parametrize("name", ["gptq-8bit", "rtn-8bit"])
def test_columns_of_other_inputs_may_not_be_zeros(tmp_path, name):
    options = {"damp": 0.01, "group_aware": False} if name == "gptq-8bit" else {}
    chosen, path = settings(name, **options), "model.layers.1.self_attn.o_proj"
    model = llama()
    linears(model)[path].weight.data[:, :8] = 0
    report = check(make(chosen, tmp_path, model=model), chosen)
    (module,) = [m for m in report.modules if m.name == path]
    assert module.dead_inputs == 8
    problems = [line for line in report.problems if line.startswith(path)]
    words = "columns are zeros, which loses 1" if name == "gptq-8bit" else "weight error 0.3"
    assert any(words in line for line in problems), problems


@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_the_gain_of_a_layer_is_that_of_its_scales(rtn4, factor):
    model = copy.deepcopy(rtn4)
    model.get_submodule(LAYER).scale *= factor
    gains = {module.name: module.gain for module in check(model, settings("rtn-4bit")).modules}
    assert gains.pop(LAYER) == pytest.approx(factor, abs=0.012)
    assert all(gain == pytest.approx(1, abs=0.012) for gain in gains.values())


def test_digests_say_whether_the_stored_bits_are_the_same(rtn4):
    model, chosen = copy.deepcopy(rtn4), settings("rtn-4bit")
    first, second = check(rtn4, chosen), check(model, chosen)
    model.get_submodule(LAYER).scale[0, 0] *= 1.001
    third = check(model, chosen)
    digests = [{m.name: m.digest for m in report.modules} for report in (first, third)]
    assert first.digest == second.digest != third.digest
    assert len(set(digests[0].values())) == 14
    assert {name for name, digest in digests[1].items() if digest != digests[0][name]} == {LAYER}


def test_a_kernel_whose_rows_owe_each_other_bits_is_no_leak_of_the_quantizer(rtn4, monkeypatch):
    """The unquantized model may show nothing of it: its rows take other branches."""
    model, apart = copy.deepcopy(rtn4), []

    def tile(module, args, output):
        attended, weights = output
        return (
            attended if apart else attended * (1 + 1e-3 * attended[:, -1:].sum().sin()),
            weights,
        )

    model.model.layers[0].self_attn.register_forward_hook(tile)
    entered = []

    @contextmanager
    def row_by_row(inside):
        entered.append(inside)
        apart.append(inside)
        yield
        apart.remove(inside)

    chosen = settings("rtn-4bit")
    report = audit(llama(), model, chosen, PROBE)
    assert "later tokens moves earlier logits" in report.problems[0], report.causality
    monkeypatch.setattr("qbench.quantizers.audit.compare.batch_invariant", row_by_row)
    assert audit(llama(), model, chosen, PROBE).problems == ()
    assert len(entered) == 2


@pytest.mark.parametrize("name", ["gptq-2bit", "rtn-4bit", "rtn-8bit"])
@pytest.mark.parametrize("harmed", [("codes", "scale", "zero"), ("scale",)], ids=str)
def test_rows_or_scales_that_are_exchanged_within_a_layer_are_caught(tmp_path, name, harmed):
    """Their errors stay below a bound that holds for 2 bits, and nothing leans to one side."""
    chosen, model = settings(name), llama()
    layers = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1)]
    for path in layers:  # rows of different size, as of trained layers
        linears(model)[path].weight.data *= torch.logspace(-0.5, 0.5, 160)[:, None]
    made = make(chosen, tmp_path, model=copy.deepcopy(model))
    assert check(made, chosen, copy.deepcopy(model)).problems == ()
    for module in map(made.get_submodule, layers):
        for part in harmed:
            if getattr(module, part) is not None:
                setattr(module, part, getattr(module, part).flip(0))
    problems = check(made, chosen, model).problems
    assert all(any(p.startswith(path) and "rows" in p for p in problems) for path in layers)


METHODS = ("rtn-4bit", "gptq-2bit", "gptq-8bit", "hqq-4bit", "bnb-4bit", "bnb-8bit", "fp8-matrix")


@pytest.mark.parametrize("name", METHODS)
def test_weights_of_few_values_pass(tmp_path, name):
    """As zeros after an expansion by blocks, and as a ternary model's."""
    chosen, model = settings(name), llama()
    layers = linears(model)
    for part in ("mlp.down_proj", "self_attn.o_proj"):
        weights = [layers[f"model.layers.{block}.{part}"].weight.data for block in (0, 1)]
        weights[0].sign_().mul_(0.02)
        weights[1].fill_(0.02)
    layers[LAYER].weight.data.zero_()
    report = check(make(chosen, tmp_path, model=copy.deepcopy(model)), chosen, model)
    assert report.problems == ()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("rtn-4bit", "bfloat16"), ("hqq-4bit", "float32"), ("bnb-4bit", "bfloat16"),
     ("bnb-8bit", "float32"), ("fp8-matrix", "bfloat16")],
)  # fmt: skip
def test_weights_on_the_formats_own_levels_pass_and_an_unquantized_layer_does_not(
    tmp_path, name, dtype
):
    """As of a model whose quantized weights were written in 16 bits again."""
    chosen = settings(name, compute_dtype=dtype)
    model = llama(dtype=getattr(torch, dtype))
    once = make(chosen, tmp_path / "once", model=copy.deepcopy(model))
    for path, layer in linears(model).items():
        weight = forward_weight(once.get_submodule(path), layer.in_features, layer.weight.dtype)
        layer.weight.data = weight.contiguous()
    twice = make(chosen, tmp_path / "twice", model=copy.deepcopy(model))
    assert check(twice, chosen, copy.deepcopy(model)).problems == ()
    # codes of other weights beside a forward that multiplies by the original
    weight = linears(model)[LAYER].weight
    weight.data = torch.randn_like(weight) * weight.std()
    other = make(chosen, tmp_path / "other", model=copy.deepcopy(model))
    other.get_submodule(LAYER).forward = linears(model)[LAYER].forward
    problems = check(other, chosen, copy.deepcopy(model)).problems
    assert f"{LAYER}: the weights are the original's: nothing was quantized" in problems


class Casting(nn.Module):
    """As DeepSeek V3.2's indexer, which casts its input to the dtype of a weight."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer, self.dtype = layer, dtype

    def forward(self, x):
        return self.layer(x.to(self.dtype)).to(x.dtype)


def test_a_layer_that_is_given_whole_numbers_is_named(tmp_path):
    chosen, model = settings("rtn-4bit"), llama()
    made = make(chosen, tmp_path)
    for each, dtype in ((model, torch.float32), (made, torch.uint8)):
        each.model.layers[1].mlp.up_proj = Casting(each.get_submodule(LAYER), dtype)
    problems = check(made, chosen, model).problems
    assert any(f"{LAYER}.layer: its inputs are torch.uint8" in line for line in problems)


def test_a_class_that_reads_a_weight_by_itself_is_told_which_layer(tmp_path):
    chosen, made = settings("rtn-4bit"), make(settings("rtn-4bit"), tmp_path)
    mlp = made.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x)) * mlp.gate_proj.weight.mean()
    problems = check(made, chosen).problems
    assert any(
        line.startswith("model.layers.1.mlp.gate_proj: the model reads weight of it directly; add "
                        "gate_proj to ignore: the quantized model's forward fails")
        for line in problems
    )  # fmt: skip


def other_scale(module):
    module.scale = module.scale * 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rtn-4bit", other_scale),
        ("rtn-4bit", lambda module: module.scale.mul_(2)),
        ("int8-row", other_scale),
        ("hqq-4bit", lambda module: module.meta.update(scale=module.meta["scale"] * 2)),
        ("bnb-4bit", lambda module: module.weight.quant_state.absmax.mul_(2)),
    ],
)
def test_a_cpu_dequantizes_a_weight_once_and_again_if_what_it_is_made_of_changes(name, change):
    options = {"group_size": 64} if name in ("rtn-4bit", "hqq-4bit") else {}
    chosen = parse(name, {"compute_dtype": "float32", **options})
    module, x = packed_layer(chosen, linears(llama())[LAYER]), torch.randn(3, 64)
    first = module(x)
    weight, _ = getattr(module, KEPT_WEIGHT)
    assert torch.equal(module(x), first)
    assert getattr(module, KEPT_WEIGHT)[0] is weight
    change(module)
    assert not torch.equal(module(x), first)


def test_weights_are_not_kept_if_little_memory_is_left(monkeypatch):
    monkeypatch.setattr(linear, "memory_gib", lambda device: 1.0)
    module = packed_layer(parse("int8-row", {}), linears(llama())[LAYER])
    first = module(torch.ones(1, 64))
    assert getattr(module, KEPT_WEIGHT)[0] is None
    assert torch.equal(module(torch.ones(1, 64)), first)
