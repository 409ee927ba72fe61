"""What a model's attention is handed under torch.compile and under autocast."""

import pytest
import torch
import torch.utils.checkpoint
from normalizer_parameters import attach, parameters
from packaging.version import Version
from tiny import tiny_model
from transformers import StaticCache

from qbench.attention import transformers as interface
from qbench.attention.transformers import BLOCKS_JOINED_LAST, positions_counted, set_attention
from qbench.errors import UnavailableError
from qbench.evaluation.scoring.generate import cache_argument

pytestmark = pytest.mark.usefixtures("dynamo")
NONE = torch.fx.Graph()
SLOW = pytest.mark.slow
OLD_COMPILER = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11's compiler fails at an exception of the model"
)
# torch 2.13's compiler cannot look into mask functions of transformers 5.24: a dense mask is made.
UNSEEN = not BLOCKS_JOINED_LAST and Version(torch.__version__).release < (2, 14)
DENSE = (True, False, None, None) if UNSEEN else None


def llama():
    return tiny_model("llama", num_hidden_layers=1).requires_grad_(True)


def mistral():
    return tiny_model("mistral", sliding_window=5, num_hidden_layers=1).requires_grad_(True)


def received(monkeypatch, implementation="triton"):
    """What reaches the attention function of ``implementation``: mask, causal, window."""
    seen = []

    def function(query, key, value, *, mask=None, causal=False, window=None, **settings):
        count = settings.get("seq_count")
        seen.append((mask is not None, causal, window, None if count is None else "seq_bounds"))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
        )

    monkeypatch.setattr(interface.kernels, "attention", function)
    monkeypatch.setattr(interface, "choose", lambda *_: implementation)
    return seen


def plainly_compiled(monkeypatch, make):
    """What attention is handed, a compiled model by plain set_attn_implementation, and its ids."""
    seen = received(monkeypatch)
    interface._registered.cache_clear()
    model = make()
    model.set_attn_implementation(interface.attention_name("softmax", "triton", "cpu"))
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    return seen, torch.compile(model, fullgraph=True, backend="eager"), ids


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    ("make", "inputs", "mask"),
    [
        pytest.param(llama, {}, False, marks=SLOW),
        # the mask is for where it has holes
        pytest.param(llama, {"attention_mask": torch.ones(2, 9).long()}, True, marks=SLOW),
        pytest.param(mistral, {"position_ids": PACKED}, False, marks=SLOW),
    ],
)
def test_a_compiled_model_on_kernels_is_handed_sequences_and_no_dense_mask(
    monkeypatch, make, inputs, mask
):
    """By plain set_attn_implementation."""
    seen, compiled, ids = plainly_compiled(monkeypatch, make)
    compiled(ids, use_cache=False, **inputs).logits.sum().backward()
    window = 5 if make is mistral else None
    expected = (mask, True, window, "seq_bounds") if mask or not DENSE else DENSE
    assert seen == [expected]


def test_a_compiled_model_that_counts_its_positions_looks_for_no_sequences(monkeypatch):
    """As in training: looking waits for the GPU."""
    seen, compiled, ids = plainly_compiled(monkeypatch, llama)
    with positions_counted():
        compiled(ids, use_cache=False)
    assert seen == [(False, True, None, None)]
    seen.clear()
    compiled(ids, use_cache=False)
    assert seen == [DENSE or (False, True, None, "seq_bounds")]


@pytest.mark.parametrize(
    ("joined", "padding", "count", "seq_bounds"),
    [
        ([[1, 1, 1], [1, 1, 1]], None, 0, []),
        ([[1, 1, 0], [1, 1, 1]], None, 3, [[0, 0, 2, 0, 2, 0], [0, 2, 3, 2, 3, 0],
                                          [1, 0, 3, 0, 3, 0]]),
        (None, [[1, 1, 1], [1, 1, 1]], 0, []),
        (None, [[0, 1, 1], [1, 1, 0]], 2, [[0, 1, 3, 1, 3, 0], [1, 0, 2, 0, 2, 0]]),
        (None, [[1, 0, 1], [1, 1, 1]], -1, []),
    ],
)  # fmt: skip
def test_which_sequences_there_are(joined, padding, count, seq_bounds):
    from qbench.attention.kernels.varlen import sequence_bounds

    given = [None if rows is None else torch.tensor(rows).bool() for rows in (joined, padding)]
    bounds, counted = sequence_bounds(*given)
    assert counted.tolist() == [count]
    assert counted.device.type == "cpu"
    assert bounds[: max(count, 0)].tolist() == seq_bounds
    torch.library.opcheck(torch.ops.qbench.sequence_bounds.default, given)


@pytest.mark.parametrize("positions", [PACKED, pytest.param(None, marks=SLOW)])
@pytest.mark.parametrize("make", [llama, pytest.param(mistral, marks=SLOW)])
def test_a_compiled_model_gives_what_the_model_gives(make, positions):
    model = make()
    set_attention(model, normalizer="softpick")
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs = {"use_cache": False, "position_ids": positions}
    got = torch.compile(model, fullgraph=True, backend="eager")(ids, **inputs).logits
    torch.testing.assert_close(got, model(ids, **inputs).logits)


@SLOW
@pytest.mark.parametrize("slopes", [False, pytest.param(True, marks=OLD_COMPILER)])
def test_a_static_cache_in_a_compiled_model_is_right_or_refused(slopes):
    """Whether the last key is the last query's cannot be told there, which slopes go by."""
    model = attach(llama(), "softpick", slopes=slopes)
    set_attention(model, normalizer="softpick")
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="eager")
    cache, pieces = StaticCache(config=model.config, max_cache_len=16), []
    with torch.no_grad():
        if slopes:
            with pytest.raises(
                UnavailableError, match=r"slopes .*cannot be compiled with a static cache"
            ):
                compiled(ids, **{cache_argument(type(model)): cache})
            return
        for piece in ids.split([8, 1], 1):
            pieces.append(compiled(piece, **{cache_argument(type(model)): cache}).logits)
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(pieces, 1), expected)


def test_blocks_that_see_each_other_are_no_plain_causality(monkeypatch):
    from transformers.masking_utils import create_causal_mask

    received(monkeypatch)
    model = llama()
    set_attention(model, normalizer="softmax")
    states, blocks = torch.zeros(1, 6, 64), torch.tensor([[-1, 0, 0, 0, -1, -1]])

    def make(states, positions):
        return create_causal_mask(
            model.config, states, None, None, positions, block_sequence_ids=blocks
        )

    got = torch.compile(make, fullgraph=True, backend="eager")(states, torch.arange(6)[None])
    expected = torch.ones(6, 6, dtype=torch.bool).tril()
    expected[1:4, 1:4] = True
    assert torch.equal(got[0, 0], expected)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_mixed_dtypes_under_autocast_are_cast_as_torchs_own_attention_casts_them(normalizer):
    from qbench.attention import reference

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 7, 16, generator=generator) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = reference.attention(query, key, value.bfloat16(), normalizer=normalizer, causal=True)
    expected = reference.attention(
        query.bfloat16(), key.bfloat16(), value.bfloat16(), normalizer=normalizer, causal=True
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


@pytest.mark.parametrize("normalizer", ["softpick", "sigmoid", "scalable-softmax"])
def test_the_kernels_are_one_operator_of_a_compiled_graph(normalizer):
    """With parameters, under autocast and with checkpointing; nothing is run here."""
    pytest.importorskip("triton")
    from qbench.attention import kernels

    targets = []

    def backend(module, inputs):
        nodes = [node for part in module.modules() for node in getattr(part, "graph", NONE).nodes]
        targets.extend(str(node.target) for node in nodes if node.op == "call_function")
        outputs = next(node for node in module.graph.nodes if node.op == "output").args[0]
        shapes = [node.meta["example_value"].shape for node in outputs]
        return lambda *_: [torch.zeros(shape) for shape in shapes]

    def run(query, key, value, parameters):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(
                kernels.attention, query, key, value, normalizer=normalizer,
                parameters=parameters, softcap=20.0, causal=True, use_reentrant=False,
            )  # fmt: skip

    query, key, value = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    given = parameters(normalizer, 2, dtype=torch.float32, slopes=True)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    compiled(query, key, value.detach().bfloat16(), given)
    assert [target for target in targets if "qbench" in target] == ["qbench.attention.default"]
