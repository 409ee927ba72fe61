"""Our own GPTQ against the definition that it makes fast, and against plain rounding."""

import pytest
import torch
from quantizer_models import calibration, ids, llama, make, settings

from qbench.errors import QuantizationError
from qbench.quantizers import gptq_torch, packed
from qbench.quantizers.blocks import first_states, hessian, walk
from qbench.quantizers.linear import Plain, linears


def problem(outputs: int, inputs: int, seed: int = 0):
    """A weight [outputs, inputs] and the Hessian of correlated inputs."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=draw)
    x = torch.randn(4 * inputs, inputs, generator=draw) @ mixing
    return torch.randn(outputs, inputs, generator=draw), 2 / len(x) * x.T @ x


def solve(weight, moments, chosen):
    factor, order = gptq_torch._factor(moments, chosen, "layer")
    tensors = gptq_torch._solve(weight, moments, factor, order, chosen)
    outputs, inputs = weight.shape
    shape = Plain(
        in_features=inputs,
        out_features=outputs,
        bias=None,
        dtype=torch.float32,
        device=weight.device,
    )
    return gptq_torch.rebuild(shape, tensors, chosen).dequantize()


def by_elimination(weight, moments, chosen, size):
    """Optimal brain quantization in a fixed order, the inverse Hessian shrunk column by column
    (GPTQ paper, equations 2 and 3), in float64."""
    damped = moments.double() + chosen.damp * moments.double().diagonal().mean() * torch.eye(
        len(moments), dtype=torch.float64
    )
    inverse, rest = torch.linalg.inv(damped), weight.double().clone()
    result = torch.empty_like(rest)
    for i in range(rest.shape[1]):
        if i % size == 0:
            scale, zero = packed.grid(
                rest[:, i : i + size].float(), chosen.bits, symmetric=chosen.symmetric
            )
        column = rest[:, i : i + 1]
        code = packed.nearest(column, scale.double(), zero.double(), chosen.bits)
        result[:, i : i + 1] = (code - zero) * scale
        rest -= (column - result[:, i : i + 1]) / inverse[i, i] * inverse[i]
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return result.float()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("inputs", "size"), [(40, 8), (72, 24), (160, 160)])
def test_the_fast_solution_is_that_of_eliminating_columns_one_by_one(bits, symmetric, inputs, size):
    weight, moments = problem(7, inputs)
    chosen = settings(
        f"gptq-{bits}bit", backend="torch", symmetric=symmetric, group_size=size, damp=0.1
    )
    found = solve(weight, moments, chosen)
    wanted = by_elimination(weight, moments, chosen, size)
    # A rounding that float32 decides the other way is passed on to all later columns of its row.
    same = (found - wanted).abs().amax(dim=1) < 1e-4
    assert same.float().mean() > 0.8


@pytest.mark.parametrize("stated", [{}, {"desc_act": True}, {"group_size": -1}, {"damp": 0.1}])
def test_it_disturbs_the_outputs_less_than_plain_rounding_to_the_same_grid(stated):
    weight, moments = problem(33, 96)
    chosen = settings("gptq-3bit", backend="torch", **stated)
    size = 96 if chosen.group_size == -1 else chosen.group_size
    groups = weight.view(33, -1, size)
    scale, zero = packed.grid(groups, 3, symmetric=True)
    rounded = ((packed.nearest(groups, scale, zero, 3) - zero) * scale).view_as(weight)

    def loss(approximation):
        error = approximation - weight
        return float(((error @ moments) * error).sum())

    assert loss(solve(weight, moments, chosen)) < 0.75 * loss(rounded)


def test_with_uncorrelated_inputs_it_is_plain_rounding():
    weight = problem(9, 64)[0]
    chosen = settings("gptq-4bit", backend="torch")
    groups = weight.view(9, -1, 32)
    scale, zero = packed.grid(groups, 4, symmetric=True)
    rounded = ((packed.nearest(groups, scale, zero, 4) - zero) * scale).view_as(weight)
    torch.testing.assert_close(solve(weight, torch.eye(64), chosen), rounded)


def test_inputs_that_are_never_on_get_weight_zero():
    weight, moments = problem(5, 64)
    moments[3] = moments[:, 3] = 0
    assert bool((solve(weight, moments, settings("gptq-4bit", backend="torch"))[:, 3] == 0).all())


def test_a_singular_hessian_names_the_layer_and_the_remedy():
    chosen = settings("gptq-4bit", backend="torch", damp=1e-12)
    row = torch.linspace(1, 2, 64)
    with pytest.raises(QuantizationError, match=r"gptq-4bit: layer: .*singular.*raise damp"):
        gptq_torch._factor(torch.outer(row, row), chosen, "layer")


def test_layers_that_share_an_input_share_a_hessian():
    model = llama("softpick")
    assert walk(model, linears(model), calibration(), 1).groups[0] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_hessian_is_that_of_every_calibration_token(batch_size):
    model = llama()
    seen = []
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        handle = layer.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        model(input_ids=calibration().ids, use_cache=False)
        handle.remove()
    x = seen[0].reshape(-1, seen[0].shape[-1]).double()
    route = walk(model, linears(model), calibration(), batch_size)
    states = list(first_states(model, route, calibration(), batch_size))
    found = hessian(route.blocks[0], layer, route.batches(0, states))
    torch.testing.assert_close(found.double(), 2 / len(x) * x.T @ x, rtol=1e-4, atol=1e-5)


def test_later_blocks_see_what_earlier_blocks_quantization_changed(tmp_path):
    one = make(settings("gptq-2bit", backend="torch"), tmp_path / "a").model
    independent = llama()
    weights = one.model.layers[1].self_attn.q_proj.dequantize()
    route = walk(independent, linears(independent), calibration(), 1)
    states = first_states(independent, route, calibration(), 1)
    states = [route.blocks[0](hidden, **rest) for hidden, rest in route.batches(0, states)]
    layer = route.blocks[1].self_attn.q_proj
    moments = hessian(route.blocks[1], layer, route.batches(1, states))
    alone = solve(layer.weight, moments, settings("gptq-2bit", backend="torch"))
    assert not torch.equal(alone, weights)


def test_a_linear_layer_outside_the_blocks_is_refused():
    model = llama()
    model.model.extra = torch.nn.Linear(8, 8)
    with pytest.raises(QuantizationError, match=r"outside the blocks model.layers: model.extra"):
        walk(model, linears(model), calibration(), 1)


def test_the_same_calibration_gives_the_same_weights(tmp_path):
    chosen = settings("gptq-3bit", backend="torch", desc_act=True)
    first, second = make(chosen, tmp_path / "a").model, make(chosen, tmp_path / "b").model
    tokens = ids(9, 1, 17)
    assert torch.equal(first(tokens).logits, second(tokens).logits)
