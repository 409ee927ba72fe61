"""The kernels in Triton's interpreter, in float32."""

import math
import re

import pytest
import torch
from attention_cases import EACH, QUICK, SMALL, WHOLE, Case, by_kernels, definition, errors, inputs
from attention_cases import parameters as parameters_of
from tiny import tiny_model

from qbench.attention import kernels, reference
from qbench.attention.kernels import decode, forward, ops
from qbench.attention.kernels.common import Launch
from qbench.attention.normalizers import NORMALIZERS, Kernels
from qbench.attention.normalizers.normalizer import S
from qbench.attention.normalizers.softmax import SoftmaxSink
from qbench.attention.transformers import set_attention
from qbench.errors import UnavailableError
from qbench.evaluation.scoring.generate import cache_argument

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
LIMIT = 1e-5  # relative
OF_PARAMETERS = 10  # times that: sums of both signs over all rows
SLOW = pytest.mark.slow


def wrong(errors):
    """Those over their limits."""
    limits = dict.fromkeys(("output", "dq", "dk", "dv"), LIMIT)
    return {n: e for n, e in errors.items() if not e <= limits.get(n, OF_PARAMETERS * LIMIT)}


def error(got, truth):
    return float((got.double() - truth.double()).norm() / truth.double().norm())


@pytest.fixture
def claims():
    """A function: registers a plug-in that claims ``kernels`` and takes ``parameters``."""
    before = [*NORMALIZERS]

    def register(name, parameters, **of):
        more = {"name": name, "parameters": parameters, "kernels": Kernels(**of)}
        NORMALIZERS[name] = type("Claims", (SoftmaxSink,), more)()

    yield register
    for name in NORMALIZERS.keys() - before:
        del NORMALIZERS[name]


@pytest.mark.parametrize(
    "case",
    # a sink and a scale of softmax's are in the next test
    [
        pytest.param(case, marks=SLOW if re.search("-next|-sink|e-softmax", str(case)) else ())
        for case in EACH
    ]
    + [pytest.param(case, marks=SLOW) for case in (*QUICK[len(EACH) :], *WHOLE)],
    ids=str,
)
def test_output_and_gradients_equal_float64(case):
    actual = errors(case, by_kernels)
    if case.shape[4] == 1 or case.window == 1:  # one key's weight does not depend on its score
        actual = {name: actual[name] for name in ("output", "dv")}
    assert wrong(actual) == {}


def test_a_learned_sink_and_a_scale_have_gradients_of_their_own(claims):
    taken = (*SoftmaxSink.parameters, S)
    claims("sunk-scaled", taken, score_function="softmax", sink=True, scaled=True)
    assert wrong(errors(Case(normalizer="sunk-scaled", shape=SMALL, slopes=True), by_kernels)) == {}


@pytest.mark.parametrize("normalizer", [pytest.param("softmax", marks=SLOW), "softpick"])
def test_a_call_does_not_depend_on_what_was_called_before(normalizer):
    """With one tensor for several arguments, of the same layout."""
    case = Case(normalizer=normalizer, shape=(1, 1, 1, 33, 33, 16))
    query, key, value, other = inputs(case)
    for tensors in ((other, other, other), (query, other, other), (query, key, other)):
        by_kernels(case, *tensors, {})
    truth = definition(case, *(tensor.double() for tensor in (query, key, value)), {})
    assert error(by_kernels(case, query, key, value, {}), truth) <= LIMIT


@pytest.fixture
def launched_without_a_maximum(monkeypatch):
    """As bf16 is, here in float32."""

    def launch(kernel, grid, numbers, constants):
        if kernel is forward.attn_fwd:
            constants |= {"NO_MAX": True, "PRECISE": False}
        return Launch(kernel, grid, numbers, constants)

    monkeypatch.setattr(ops, "Launch", launch)
    ops.forward_launches.cache_clear()
    yield
    ops.forward_launches.cache_clear()


@pytest.mark.usefixtures("launched_without_a_maximum")
@pytest.mark.parametrize("scores", [pytest.param(1.0, marks=SLOW), 1e-4, 60.0])
@pytest.mark.parametrize(
    "normalizer",
    [
        "softpick",
        *(pytest.param(n, marks=SLOW) for n in ("softmax", "rectified", "scalable-softpick")),
    ],
)
def test_the_forward_pass_without_a_maximum_is_as_close_as_bf16(normalizer, scores):
    """It and both its ways out."""
    case = Case(normalizer=normalizer, shape=(1, 1, 1, 70, 70, 16), scores=scores)
    query, key, value, _ = inputs(case)
    got = by_kernels(case, query, key, value, parameters_of(case))
    given = {name: tensor.double() for name, tensor in parameters_of(case).items()}
    wide = [tensor.double() for tensor in (query, key, value)]
    settings = {"normalizer": normalizer, "parameters": given, "causal": True}
    assert error(got, reference.attention(*wide, **settings)) <= 1e-3


STEP = 2**30  # elements between two rows: the third row's place has more than 32 bits


@pytest.fixture(scope="module")
def memory():
    """2^32 elements, of which few are touched; a place that wrapped around would still be in it."""
    try:
        return torch.empty(2**32 + 64, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the machine does not give 9 GB of address space")


def far_rows(memory):
    """Three rows [1, 1, 3, 16] in ``memory``, ``STEP`` elements apart."""
    return memory.as_strided((1, 1, 3, 16), (3 * STEP, 3 * STEP, STEP, 1), 2**31)


def test_decoding_reads_queries_whose_place_has_more_than_32_bits(memory):
    query, key = torch.randn(2, 1, 1, 3, 16).half()
    far = far_rows(memory)
    far.copy_(query)
    memory[:16] = 0
    got, expected = (
        kernels.attention(q, key, key, normalizer="softmax", causal=True) for q in (far, query)
    )
    assert torch.equal(got, expected)


def test_decoding_writes_rows_whose_place_has_more_than_32_bits(memory):
    far, lse = far_rows(memory), torch.zeros(1, 1, 3)
    far.zero_()
    partial = torch.ones(1, 1, 16, 18)
    decode.combine[(1, 1)](
        far, lse, partial, None, None, (1, 1), 3, 3, 1, far.stride()[:3],
        NORM="softmax", FLAGS=0, BLOCK_R=16, V_HEAD_DIM=16,
    )  # fmt: skip
    assert (far == 1).all()


def test_a_mask_may_lie_where_a_key_has_more_than_32_bits(memory):
    mask = (
        memory.view(torch.uint8).as_strided((1, 1, 3, 3), (1, 1, 1, STEP), 2**31).view(torch.bool)
    )
    mask.fill_(True)
    memory[:8] = 0
    query = torch.randn(1, 1, 3, 16)
    got, expected = (
        kernels.attention(query, query, query, normalizer="softmax", mask=m) for m in (mask, None)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [40, 80], ids=["as in decoding", "more"])
def test_values_have_right_gradients_where_all_scores_are_tiny(rows):
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(1, 1, rows, 16).half() for _ in range(4))
    query *= 2.0**-18
    actual = []
    for function, dtype in ((kernels, torch.half), (reference, torch.double)):
        leaf = value.to(dtype).requires_grad_()
        output = function.attention(
            query.to(dtype), key.to(dtype), leaf, normalizer="softpick", causal=True
        )
        actual += torch.autograd.grad(output, leaf, gradient.to(dtype))
    assert error(*actual) <= 2e-3


@pytest.mark.parametrize("widths", [(264, 16), (16, 264)])
def test_heads_that_are_wider_than_shared_memory_are_refused(widths):
    query, value = (torch.randn(1, 1, 3, width) for width in widths)
    with pytest.raises(UnavailableError, match="up to 256 wide, not 264; use 'reference'"):
        kernels.attention(query, query, value, normalizer="softmax")


@pytest.mark.parametrize("sinks", [[300.0, 0.0], [-math.inf, -300.0]], ids=["huge", "none"])
def test_sinks_of_any_size(sinks):
    query, key, value, _ = inputs(Case(normalizer="softmax-sink", shape=(1, 2, 2, 5, 5, 16)))
    given = {"sinks": torch.tensor(sinks)}
    settings = {"normalizer": "softmax-sink", "parameters": given, "causal": True}
    got, truth = (by.attention(query, key, value, **settings) for by in (kernels, reference))
    assert error(got, truth) <= LIMIT


@pytest.mark.parametrize(
    "normalizer",
    ["sigmoid", *(pytest.param(n, marks=SLOW) for n in ("softmax-sink", "scalable-softpick-next"))],
)
def test_the_operator_is_as_torch_asks_and_gives_the_same_bits(normalizer):
    """As torch.compile sees it; and its gradients, those of every parameter too, are as without the
    dispatcher."""
    case = Case(normalizer=normalizer, shape=(1, 2, 1, 9, 9, 16), slopes=True)
    *tensors, gradient = inputs(case)
    given = parameters_of(case)
    sources = [tensor.requires_grad_() for tensor in (*tensors, *given.values())]
    settings = ops.Settings(normalizer, 0.25, 2.0, True, 0, 9, 9)
    arguments = (*tensors, None, None, None, *ops.Parameters(**given), *settings)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.qbench.attention.default, arguments, test_utils=checks)
    direct = ops.apply(*arguments[:6], ops.Parameters(**given), settings)
    outputs = (direct, ops.attention(*arguments)[0])
    actual, expected = (torch.autograd.grad(out, sources, gradient) for out in outputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.fixture
def model():
    return tiny_model("llama", head_dim=16).requires_grad_(True)


@torch.no_grad()
def test_a_padded_model_and_a_decode_step_equal_the_reference(model):
    """Padded on both sides."""
    ids = torch.randint(0, 31, (2, 9))
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = 0
    padding[1, -2:] = 0
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    actual = []
    for implementation in ("reference", "triton"):
        ran = set_attention(model, normalizer="softpick", implementation=implementation)
        assert ran == f"softpick/{implementation}"
        out = model(ids, attention_mask=padding, position_ids=positions, use_cache=True)
        step = model(
            ids[:, :1], position_ids=positions[:, -1:] + 1,
            attention_mask=torch.cat([padding, padding[:, :1] | 1], 1),
            **{cache_argument(type(model)): out.past_key_values},
        )  # fmt: skip
        actual.append(torch.cat([out.logits[padding.bool()], step.logits[:, 0]]))
    assert error(*actual) <= LIMIT
