"""The kernels on a GPU: accuracy in full, and what makes them fail elsewhere."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from attention_cases import ALL, NORMALIZERS, QUICK, Case, by_kernels, errors, inputs, parameters

from qbench.attention import kernels
from qbench.attention.kernels import hopper, ops
from qbench.attention.kernels.varlen import packed_bounds

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # ‖error‖ / ‖truth‖
OF_PARAMETERS = 10  # times that: sums of both signs over all rows
SQUARE = (2, 4, 2, 333, 333, 64)
FEATURES = (
    {}, {"shape": (2, 4, 2, 333, 333, 128)}, {"slopes": True}, {"softcap": 20.0}, {"window": 100},
    {"shape": (2, 4, 2, 257, 257, 64), "mask": 0.5}, {"shape": (3, 8, 2, 1, 1000, 64)}, ALL,
    {"shape": (1, 4, 2, 900, 900, 64), "packed": (5, 295, 1, 599)},
    {"shape": (1, 4, 2, 1500, 1500, 64), "packed": (5, 295, 1, 1199)},
)  # fmt: skip
CASES = [Case(normalizer=n, **{"shape": SQUARE, **f}) for n in NORMALIZERS for f in FEATURES]
WIDTHS = [
    # as many rows as a warpgroup multiplies, of which Triton's pipeliner ended the process
    Case(normalizer="softpick", shape=(1, 1, 1, 32, 512, 256)),
    *(
        Case(normalizer=n, shape=(2, 4, 2, 200, 333, width))
        for n in ("softmax", "softpick", "sigmoid")
        for width in (16, 80, 256)
    ),
]
HOPPER = [
    Case(normalizer=n, shape=(2, 4, kv_heads, 640, 640, width), seed=kv_heads, **settings)
    for n in NORMALIZERS
    for width in (64, 128)
    for kv_heads, settings in ((4, {}), (2, {"slopes": True}), (1, {"softcap": 50.0}))
]


@pytest.fixture(autouse=True)
def decided_afresh():
    """Tests change what decides which kernels run."""
    ops.backward_launches.cache_clear()
    yield
    ops.backward_launches.cache_clear()


def wrong(actual, dtype):
    limits = dict.fromkeys(("output", "dq", "dk", "dv"), LIMITS[dtype])
    return {
        n: e for n, e in actual.items() if not e <= limits.get(n, OF_PARAMETERS * LIMITS[dtype])
    }


def on_gpu(case):
    return {name: tensor.cuda() for name, tensor in parameters(case).items()}


def checkpointed(run, *sources):
    return torch.utils.checkpoint.checkpoint(run, *sources, use_reentrant=False)


def step(case, tensors, given=None, call=None):
    """Output and gradients of inputs and parameters; ``given`` are these, for a captured step."""
    *inputs, gradient = tensors
    given = on_gpu(case) if given is None else given
    # of its own: a leaf's node of the graph of gradients keeps the stream that it was made on
    sources = [tensor.detach().requires_grad_() for tensor in (*inputs, *given.values())]

    def run(query, key, value, *parameters):
        return by_kernels(case, query, key, value, dict(zip(given, parameters, strict=True)))

    output = call(run, *sources) if call else run(*sources)
    return (output.detach(), *torch.autograd.grad(output, sources, gradient))


def drawn(case, dtype=torch.bfloat16):
    return inputs(case, dtype, "cuda")


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("case", [*CASES, *WIDTHS], ids=str)
def test_output_and_gradients_equal_float64(case):
    assert wrong(errors(case, by_kernels, torch.bfloat16, "cuda"), torch.bfloat16) == {}


@pytest.mark.parametrize("longest", [2, 70], ids=["decoded", "in tiles"])
def test_there_may_be_more_heads_and_sequences_than_65535(longest):
    """So many programs a grid's second dimension takes."""
    lengths = torch.tensor([longest] + [2] * 2199, dtype=torch.int32, device="cuda")
    case = Case(normalizer="softpick", shape=(1, 32, 32, *2 * [int(lengths.sum())], 64))

    def run(tensors, lengths):
        query, key, value, gradient = (tensor.detach() for tensor in tensors)
        sources = [tensor.requires_grad_() for tensor in (query, key, value)]
        edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        output = kernels.attention(
            *sources, seq_bounds=packed_bounds(edges, edges), normalizer="softpick", causal=True,
            max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
        return (output.detach(), *torch.autograd.grad(output, sources, gradient))

    tensors, half = drawn(case), longest + 2 * 1099
    halves = ([t[:, :, :half] for t in tensors], [t[:, :, half:] for t in tensors])
    parts = [run(*each) for each in zip(halves, (lengths[:1100], lengths[1100:]), strict=True)]
    assert same(run(tensors, lengths), [torch.cat(each, 2) for each in zip(*parts, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_other_dtypes_equal_float64(case, dtype):
    if case.shape[4] == 1 or (dtype == torch.float16 and case.scores < 1e-3):
        pytest.skip("gradients are rounding alone")
    assert wrong(errors(case, by_kernels, dtype, "cuda"), dtype) == {}


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_hopper_kernels_equal_float64_and_give_the_same_bits_in_every_run(case, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(hopper, "MIN_WORK", 0)
    ran, real = [], hopper.backward_launches
    monkeypatch.setattr(
        hopper, "backward_launches", lambda *given: (ran.append(1), real(*given))[1]
    )
    actual = errors(case, by_kernels, torch.bfloat16, "cuda")
    # The gradient of s beside slopes or soft caps is not for them.
    alone = "s" not in parameters(case) or not (case.slopes or case.softcap)
    assert bool(ran) == alone
    assert wrong(actual, torch.bfloat16) == {}
    tensors = drawn(case)
    assert same(step(case, tensors), step(case, tensors))


@pytest.mark.parametrize("min_work", [0, 1 << 60], ids=["hopper", "triton"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", ["one key", "many keys", "tiny"])
def test_gradients_of_rows_near_zero_equal_float64(kind, width, kv_heads, min_work, monkeypatch):
    """Of one key whose score is nearly 0, and of many: 1 / Σ multiplies what is left of dP − D; and
    of rows whose e^x − 1 needs the series."""
    monkeypatch.setattr(hopper, "MIN_WORK", min_work)
    case = Case(normalizer="softpick", shape=(2, 4, kv_heads, 384, 384, width))
    query, key, value, gradient = drawn(case)
    if kind == "one key":
        first = key[:, :, :1].repeat_interleave(4 // kv_heads, 1).float()
        factor = 1e-3 * width**0.5 / first.square().sum(-1, keepdim=True)
        query[:, :, :1] = (first * factor).to(query.dtype)
    elif kind == "many keys":
        query[:, :, [1, 5, 130, 255, 383]] *= 1e-3
    else:
        query, key = torch.ones_like(query), key.abs() * 1e-5
        key[:, :, ::2] = -1
    monkeypatch.setattr("attention_cases.inputs", lambda *_: [query, key, value, gradient])
    assert wrong(errors(case, by_kernels, torch.bfloat16, "cuda"), torch.bfloat16) == {}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("normalizer", ["softmax", "softpick", "rectified", "sigmoid"])
@pytest.mark.parametrize("kind", ["negative first", "all negative", "zeros", "huge", "tiny"])
def test_extreme_scores_give_finite_results_and_gradients(kind, normalizer, dtype):
    case = Case(normalizer=normalizer, shape=(1, 1, 1, 700, 700, 64))
    query, key, value, gradient = drawn(case, dtype)
    if kind == "negative first":
        query, key = torch.ones_like(query), key * 0.1
        key[:, :, :350] -= 14
    elif kind == "all negative":
        query, key = query.abs(), -key.abs() * 10
    else:
        factor = {"zeros": 0, "huge": 100, "tiny": 1e-4}[kind]
        query, key = query * factor, key * max(factor, 1)
    actual = step(case, (query, key, value, gradient))
    assert all(tensor.isfinite().all() for tensor in actual)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_every_row_is_written_the_same_in_every_run_and_whatever_was_called_before(normalizer):
    case = Case(normalizer=normalizer, shape=(2, 4, 4, 777, 777, 64))
    tensors = drawn(case)
    other = drawn(replace(case, seed=1))[0]
    step(case, (other, other, other, other))  # one tensor for all three
    expected = step(case, tensors)
    poison = torch.full((64 << 20,), float("nan"), device="cuda")  # what empty memory will hold
    del poison
    assert same(step(case, tensors), expected)
    wide = errors(case, by_kernels, torch.bfloat16, "cuda")
    assert wrong(wide, torch.bfloat16) == {}


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_captured_or_checkpointed_step_gives_the_bits_of_a_launched_one(normalizer, slopes):
    """Gradients of all that is trained, too."""
    case = Case(normalizer=normalizer, shape=(2, 4, 4, 256, 256, 64), slopes=slopes)
    tensors, given = drawn(case), on_gpu(case)
    assert same(step(case, tensors, call=checkpointed), step(case, tensors))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(case, tensors, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = step(case, tensors, given)
    for seed in (10, 20):  # other numbers in the same tensors
        for tensor, new in zip(tensors, drawn(replace(case, seed=seed)), strict=True):
            tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert same(kept, step(case, tensors, given))


@pytest.mark.parametrize("normalizer", ["softmax", "sigmoid"])
def test_kernels_that_one_thread_loaded_run_in_another(normalizer):
    """Threads, autograd's among them, have no CUDA context of their own."""
    query, key, value, gradient = drawn(Case(normalizer=normalizer, shape=(2, 4, 4, 256, 256, 64)))
    settings = ops.Settings(normalizer, 0.125, 0.0, True, 0, 256, 256)

    def forward():
        return ops.forward(query, key, value, None, None, ops.Parameters(), settings)

    kept = forward()

    def backward():
        return ops.backward(
            gradient, query, key, value, *kept, None, None, ops.NONE, settings, ops.NONE
        )[:3]

    for run, results in ((forward, kept), (backward, backward())):
        with ThreadPoolExecutor(1) as threads:
            assert same(threads.submit(run).result()[:2], results[:2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one():
    case = Case(normalizer="softpick", shape=(1, 2, 2, 200, 200, 64))
    tensors = drawn(case)
    elsewhere = [tensor.to("cuda:1") for tensor in tensors[:3]]
    actual = kernels.attention(*elsewhere, normalizer="softpick", causal=True)
    assert torch.equal(actual.to("cuda:0"), step(case, tensors)[0])
