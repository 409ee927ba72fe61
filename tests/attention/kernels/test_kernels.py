"""The kernels in Triton's interpreter, on a CPU, in float32."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attention_cases import EACH, QUICK, WHOLE

LIMIT = 1e-5  # relative
SLOW = pytest.mark.slow
OF_PARAMETERS = 10  # times that: sums of both signs over all rows


@pytest.fixture(scope="module")
def interpreted():
    """A function: a function's name of interpreter.py and its arguments → what that gives."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("interpreter.py")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip

        def ask(name, *arguments):
            process.stdin.write(json.dumps((name, arguments)) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("answer "):
                    return json.loads(line.removeprefix("answer "))
            pytest.fail(f"interpreter.py died in {name}{arguments}")

        yield ask
        process.stdin.close()


def wrong(errors):
    """Those over their limits."""
    limits = {"output": LIMIT, "dq": LIMIT, "dk": LIMIT, "dv": LIMIT}
    return {n: e for n, e in errors.items() if not e <= limits.get(n, OF_PARAMETERS * LIMIT)}


def indices(cases, quick):
    """Parameters; all but the first ``quick`` are left to make test-all."""
    marks = (() if i < quick else pytest.mark.slow for i in range(len(cases)))
    return [pytest.param(i, id=str(cases[i]), marks=mark) for i, mark in enumerate(marks)]


@pytest.mark.parametrize("index", indices(QUICK, len(EACH)))
def test_output_and_gradients_equal_float64(interpreted, index):
    case = QUICK[index]
    errors = interpreted("case", "quick", index)
    if case.shape[4] == 1:  # the weight of a single key does not depend on its score
        errors = {name: errors[name] for name in ("output", "dv")}
    assert wrong(errors) == {}


@pytest.mark.parametrize("index", indices(WHOLE, 0))
def test_the_whole_table_equals_float64(interpreted, index):
    case = WHOLE[index]
    errors = interpreted("case", "whole", index)
    if case.shape[4] == 1 or case.window == 1:
        errors = {name: errors[name] for name in ("output", "dv")}
    assert wrong(errors) == {}


def test_a_learned_sink_and_a_scale_have_gradients_of_their_own(interpreted):
    assert wrong(interpreted("sinks_and_scale")) == {}


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_a_call_does_not_depend_on_what_was_called_before(interpreted, normalizer):
    assert interpreted("after_shared_tensors", normalizer) <= LIMIT


@pytest.mark.parametrize("scores", [1.0, 1e-4, 60.0])
@pytest.mark.parametrize(
    "normalizer",
    [
        "softpick",
        *(pytest.param(n, marks=SLOW) for n in ("softmax", "rectified", "scalable-softpick")),
    ],
)
def test_the_forward_pass_without_a_maximum_is_as_close_as_bf16(interpreted, normalizer, scores):
    assert interpreted("no_max", normalizer, scores) <= 1e-3


@pytest.mark.parametrize(
    ("tiny", "edges", "flags"),
    [
        ([], None, [0, 0, 0]),
        ([100], None, [0, 1, 0]),
        ([63], None, [1, 0, 0]),
        ([3, 191], None, [1, 0, 1]),
        ([100], [(0, 70), (70, 192)], [0, 1, 1]),  # tiles from 70 on have parts of two chunks
        ([10], [(0, 70), (70, 192)], [1, 0, 0]),
    ],
)
def test_rows_of_tiny_scores_flag_their_keys(interpreted, tiny, edges, flags):
    assert interpreted("needs_expm1", tiny, edges) == flags


@pytest.mark.parametrize("rows", [40, 80], ids=["as in decoding", "more"])
def test_values_have_right_gradients_where_all_scores_are_tiny(interpreted, rows):
    assert interpreted("tiny_rows", rows) <= 2e-3


@pytest.mark.parametrize("sinks", [[300.0, 0.0], [-math.inf, -300.0]], ids=["huge", "none"])
def test_sinks_of_any_size(interpreted, sinks):
    assert interpreted("extreme_sinks", sinks) <= LIMIT


def test_an_unknown_score_function_is_refused_and_does_not_compile(interpreted):
    said, compiled = interpreted("refused", "claimed")
    assert "names the score function 'claimed'; there are softmax, softpick" in said
    assert "no formula" in compiled


def test_a_padded_model_and_a_decode_step_equal_the_reference(interpreted):
    ran, error = interpreted("model")
    assert ran == ["softpick/reference", "softpick/triton"]
    assert error <= LIMIT


@pytest.mark.parametrize(
    ("padding", "positions"),
    [
        pytest.param(None, None, id="plain", marks=SLOW),
        pytest.param(
            None, [[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]], id="packed"
        ),
        pytest.param([[1] * 9, [1] * 9], None, id="all tokens", marks=SLOW),
        pytest.param(
            [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]], None, id="padded",
            marks=SLOW,
        ),
        pytest.param([[1, 1, 0, 1, 1, 1, 0, 1, 1], [1] * 9], None, id="holes", marks=SLOW),
    ],
)  # fmt: skip
def test_a_compiled_model_by_plain_set_attn_implementation(interpreted, padding, positions):
    assert interpreted("compiled_model", padding, positions) <= LIMIT


@pytest.mark.parametrize(
    "normalizer",
    ["sigmoid", *(pytest.param(n, marks=SLOW) for n in ("softmax-sink", "scalable-softpick-next"))],
)
def test_the_operator_is_as_torch_asks_and_gives_the_same_bits(interpreted, normalizer):
    assert interpreted("operator", normalizer) is True


@pytest.mark.parametrize("group", ["one", pytest.param("attends", marks=SLOW)])
def test_the_kernel_of_the_kv_cache_equals_its_definition(interpreted, group):
    assert [line for line in interpreted("kv_cache", group) if not line[1] <= LIMIT] == []


def test_the_kernel_of_the_kv_cache_is_launched_on_the_device_of_its_tensors(interpreted):
    assert interpreted("kv_cache_device") == ["cpu"]
