"""LLM.int8's layers that share a quantized input give what the library's own give."""

import gc
import threading
import weakref

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from quantizer_models import logits, make, settings
from torch.utils._python_dispatch import TorchDispatchMode

from qbench.quantizers import bnb
from qbench.quantizers.bnb import quantized


@pytest.fixture
def quantizations(monkeypatch):
    """Inputs that were quantized, one entry each."""
    counted, inner = [], bnb._quantize
    monkeypatch.setattr(bnb, "_quantize", lambda *given: counted.append(given) or inner(*given))
    return counted


def model_of(tmp_path, dtype="bfloat16", **stated):
    return make(settings("bnb-8bit", compute_dtype=dtype, **stated), tmp_path).model


def outlying(inputs, x):
    columns, values = inputs.outliers(x)
    assert torch.equal(values, x[:, columns])
    return columns.tolist()


def librarys(monkeypatch):
    """The layers as the library has them."""
    monkeypatch.setattr(bnb.Linear8, "forward", bitsandbytes.nn.Linear8bitLt.forward)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 6.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_librarys_to_the_bit(threshold, dtype, tmp_path, monkeypatch):
    model = model_of(tmp_path, dtype, threshold=threshold)
    ours = logits(model)
    librarys(monkeypatch)
    assert torch.equal(ours, logits(model))


def test_a_block_quantizes_four_inputs_for_its_seven_layers(tmp_path, quantizations):
    logits(model_of(tmp_path, threshold=0.5))
    assert len(quantizations) == 2 * 4  # blocks


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("threshold", [0.5, 1.5, 6.0])
def test_codes_scales_and_columns_are_the_librarys(rows, threshold):
    x = torch.randn(rows, 33, generator=torch.Generator().manual_seed(rows)).half()
    x[0] = 9.0  # a row of nothing but outliers at every threshold
    x[-1, 4:7] = torch.tensor([threshold, -threshold, 0.0])
    codes, scales, columns = functional.int8_vectorwise_quant(x.clone(), threshold=threshold)
    found = quantized(x, threshold)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales, scales)
    assert outlying(found, x) == columns.tolist()


class Waits(TorchDispatchMode):
    """Operations that make the CPU wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "int8_scaled_mm"):
            self.seen.append(name)
        if name == "int8_vectorwise_quant" and len(args) > 1 and args[1]:
            self.seen.append("the library's")
        return func(*args, **(kwargs or {}))


def test_where_outliers_are_is_asked_once_an_input_and_after_the_first_product(tmp_path):
    model = model_of(tmp_path, threshold=0.5)
    logits(model)  # the first forward sets the layers up
    with Waits() as waits:
        model.model.layers[0].mlp(torch.randn(2, 3, 64).bfloat16())
    first_and_second = ["int8_scaled_mm", "nonzero", "int8_scaled_mm"]
    assert waits.seen == [*first_and_second, "int8_scaled_mm", "nonzero"]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_a_bias_or_one_row_is_the_librarys(rows, bias, monkeypatch, tmp_path):
    layer = model_of(tmp_path, threshold=1.0).model.layers[0].mlp.gate_proj
    if bias:
        layer.bias = torch.nn.Parameter(torch.randn(layer.out_features), requires_grad=False)
    x = torch.randn(rows, 2, layer.in_features, generator=torch.Generator().manual_seed(0))
    given = [x.bfloat16(), x[:, 0].bfloat16(), x[:1, :1].bfloat16()]
    ours = [layer(x) for x in given]
    librarys(monkeypatch)
    for x, outputs in zip(given, ours, strict=True):
        assert torch.equal(outputs, layer(x))


def test_an_input_that_was_written_to_is_quantized_again(quantizations):
    x = torch.ones(2, 4)
    before = quantized(x, 6.0)
    assert quantized(x, 6.0) is before
    x[0, 1] = 9.0
    after = quantized(x, 6.0)
    assert outlying(after, x) == [1]
    assert len(quantizations) == 2


def test_another_threshold_or_an_equal_tensor_is_quantized_itself(quantizations):
    x = torch.ones(2, 4)
    quantized(x, 6.0)
    assert outlying(quantized(x, 0.5), x) == [0, 1, 2, 3]
    quantized(x.clone(), 0.5)
    assert len(quantizations) == 3


def test_a_tensor_that_is_gone_leaves_nothing_behind():
    x = torch.ones(2, 4)
    codes = weakref.ref(quantized(x, 6.0).codes)
    assert codes() is not None
    del x
    gc.collect()
    assert codes() is None
    for _ in range(20):  # ids come again
        value = torch.rand(()).item()
        row = torch.full((2, 4), value)
        assert quantized(row, 6.0).scales.tolist() == pytest.approx([value] * 2, rel=1e-3)
        del row


def test_float16_which_the_library_writes_to_is_shared_too(quantizations):
    x = torch.ones(2, 4, dtype=torch.float16)
    x[0, 0] = 7.0
    assert quantized(x, 6.0) is quantized(x, 6.0)
    assert len(quantizations) == 1


def test_a_tensor_without_a_version_is_always_quantized(quantizations):
    with torch.inference_mode():
        x = torch.ones(2, 4)
        quantized(x, 6.0)
        x[0, 0] = 9.0
        assert outlying(quantized(x, 6.0), x) == [0]


def test_each_thread_knows_its_own_input(quantizations):
    inputs = [torch.full((2, 4), float(i + 1)) for i in range(4)]
    turn, wrong = threading.Barrier(4), []

    def work(x):
        for _ in range(20):
            turn.wait()
            if quantized(x, 6.0).scales[0] != x[0, 0]:
                wrong.append(x)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(quantizations) == 4


def test_gradients_are_the_librarys(tmp_path, monkeypatch):
    model = model_of(tmp_path, "float32", threshold=0.5)
    layer = model.model.layers[0].mlp.gate_proj

    def gradient():
        x = torch.ones(2, layer.in_features, requires_grad=True)
        layer(x).square().sum().backward()
        return x.grad

    ours = gradient()
    librarys(monkeypatch)
    assert torch.equal(ours, gradient())
