"""The kernels that are tried and not in use: what they are for, what they compile to, and which
blocks their programs take."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qbench.attention.kernels import (
    gluon_backward,
    lasting,
    launch,
    modes,
    recall,
    schedules,
    tiles,
)

CAPPED = modes.CAPPED.value
PLANS = [
    schedules.Plan(4096, 64, 192, 128, 132, None),
    schedules.Plan(1024, 128, 128, 128, 132, None),
    schedules.Plan(640, 7, 192, 128, 5, None),
    schedules.Plan(128, 1, 128, 128, 1, None),
]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(schedules, "_tables", {})


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_block_is_taken_once_and_of_a_section_the_longest_first(plan):
    rows = schedules.rows(plan)
    assert len(rows) == plan.programs
    taken = sorted(item for row in rows for item in row)
    assert taken == list(range(plan.pairs * plan.blocks))
    for row in rows:
        order = [(i // plan.blocks // schedules.SECTION, -(i % plan.blocks)) for i in row]
        assert order == sorted(order)


@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
def test_no_program_has_much_more_than_another(plan):
    loads = [
        sum(schedules.load(plan, i % plan.blocks) for i in row) for row in schedules.rows(plan)
    ]
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


def test_a_table_has_its_rows_after_their_numbers_and_stays(hopper):
    plan = PLANS[2]
    table = schedules.table(plan)
    assert table.dtype == torch.int32
    assert [row[1 : 1 + row[0]] for row in table.tolist()] == schedules.rows(plan)
    assert schedules.table(plan) is table
    assert schedules.kept(table)
    assert not schedules.kept(table.clone())


def test_a_table_is_not_made_while_a_graph_is_captured_or_for_very_many_blocks(hopper, monkeypatch):
    plan = PLANS[2]
    assert schedules.possible(plan)
    assert not schedules.possible(replace(plan, pairs=schedules.LARGEST))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not schedules.possible(plan)
    schedules.table(plan)
    assert schedules.possible(plan)


def test_a_call_that_is_repeated_has_the_same_table_and_new_room(hopper):
    table = schedules.table(PLANS[3])
    given, output, room = torch.zeros(3), torch.zeros(4), torch.zeros(5)
    seen = []
    launches = [(lambda *arguments: seen.append(arguments), [given, output, room, table], [7])]
    call = recall.Call(launches, [given], [(output, recall.again(output))])
    other = torch.ones(3)
    results = call([other])
    assert seen[0][0] is other
    assert seen[0][1] is results[0]
    assert seen[0][2].shape == room.shape
    assert seen[0][2] is not room
    assert seen[0][3] is table
    assert seen[0][4] == 7


def drawn(*, heads=2, kv_heads=2, length=512, width=64, dtype=torch.bfloat16, v_width=None):
    widths = (width, width, v_width or width)
    sizes = zip((heads, kv_heads, kv_heads), widths, strict=True)
    return [torch.zeros(1, length, h, w, dtype=dtype).transpose(1, 2) for h, w in sizes]


def fits(inputs=None, *, causal=True, window=0, family="softmax", asked=CAPPED, softcap=50.0,
         **changed):  # fmt: skip
    kind = replace(tiles.LASTING_TRIED[64], shortest=0)
    kind = replace(kind, **changed)
    inputs = inputs or drawn()
    return lasting.fits(*inputs, causal, window, family, asked, softcap, kind)


def test_the_lasting_kernel_fits_plain_causal_soft_capped_softmax(hopper):
    assert fits()
    assert fits(asked=CAPPED | modes.NEAR.value)
    assert fits(softcap=15.0)
    assert fits(drawn(width=128), width=128)


@pytest.mark.parametrize(
    "case",
    [
        {"causal": False}, {"window": 64}, {"family": "sigmoid"}, {"family": "softpick"},
        {"asked": 0}, {"softcap": 60.0}, {"softcap": 5.0}, {"shortest": 1024}, {"width": 128},
        {"inputs": drawn(kv_heads=1)}, {"inputs": drawn(length=500)},
        {"inputs": drawn(dtype=torch.float16)}, {"inputs": drawn(v_width=128)},
        *({"asked": CAPPED | bit.value} for bit in (modes.SLOPED, modes.SCALED, modes.SINK_ONE,
                                                    modes.SINK_LEARNED, modes.BIASED)),
    ],
    ids=str,
)  # fmt: skip
def test_the_lasting_kernel_is_for_nothing_else(case, hopper):
    assert not fits(**case)


def test_the_lasting_kernel_is_for_hopper(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert not fits()


def test_nothing_that_is_tried_is_in_use():
    assert tiles.LASTING == {}
    assert gluon_backward.AHEAD == {}
    assert tiles.forward_tile(128, torch.bfloat16, "softmax", CAPPED).lasting is None


def test_a_line_of_the_table_turns_the_lasting_kernel_on(monkeypatch):
    monkeypatch.setattr(tiles, "LASTING", tiles.LASTING_TRIED)
    for width, kind in tiles.LASTING_TRIED.items():
        assert tiles.forward_tile(width, torch.bfloat16, "softmax", CAPPED).lasting is kind
        assert tiles.forward_tile(width, torch.bfloat16, "softmax").lasting is None
        assert tiles.forward_tile(width, torch.float32, "softmax", CAPPED).lasting is None


def launched(monkeypatch, normalizer, kind):
    """Which kernels a forward pass launches, with the lasting one asked for."""
    from qbench.attention.kernels.settings import NONE, Parameters, Settings

    kernels = []
    monkeypatch.setattr(launch, "prepare_thread", lambda device: None)
    for module in (launch, lasting, launch.gluon_forward):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: kernels.append(kernel.__name__))
    monkeypatch.setattr(tiles, "LASTING", {64: kind})
    given = Parameters(bias=torch.zeros(2)) if normalizer == "sigmoid" else NONE
    asked = Settings(normalizer, 0.125, 50.0, True, 0, 512, 512)
    launch._forward(*drawn(), None, None, given, asked)
    return kernels


def test_what_does_not_fit_is_computed_as_before(hopper, monkeypatch):
    kind = replace(tiles.LASTING_TRIED[64], shortest=0)
    assert launched(monkeypatch, "softmax", kind) == ["capped_kernel"]
    assert launched(monkeypatch, "softmax", tiles.LASTING_TRIED[64]) == ["forward_kernel"]
    assert launched(monkeypatch, "sigmoid", kind) == ["forward_kernel"]
    assert launched(monkeypatch, "softpick", kind) == ["forward_kernel"]


def queries_kernel(monkeypatch, width=64, slopes=None, softcap=0.0, normalizer="softmax", **more):
    """Which kernel of the queries' gradients is launched."""
    from qbench.attention.kernels.settings import Parameters, Settings

    kernels = []
    monkeypatch.setattr(launch, "prepare_thread", lambda device: None)
    for module in (launch, gluon_backward):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: kernels.append(kernel.__name__))
    monkeypatch.setattr(gluon_backward, "ENOUGH", 0)
    query, key, value = drawn(width=width)
    output, lse = launch.empty_output(query, value, covered=True)
    given = Parameters(slopes=slopes)
    asked = Settings(normalizer, width**-0.5, softcap, True, 0, 512, 512)
    flag = torch.zeros(1, dtype=torch.int32)
    launch._backward(query, query, key, value, output, lse, flag, None, None, given, asked, **more)
    return kernels[0]


def test_which_gradients_of_queries_are_computed_ahead(hopper, monkeypatch):
    slopes = torch.zeros(2)
    assert queries_kernel(monkeypatch) == "query_kernel"
    monkeypatch.setattr(gluon_backward, "AHEAD", gluon_backward.AHEAD_TRIED)
    for case in ({}, {"slopes": slopes}, {"softcap": 50.0}, {"softcap": 5.0}):
        assert queries_kernel(monkeypatch, **case) == "ahead_kernel"
    for case in (
        {"width": 128}, {"normalizer": "softpick"}, {"normalizer": "rectified"},
        {"slopes": slopes, "softcap": 50.0}, {"slopes": slopes, "sloping": True},
        {"normalizer": "softmax-sink"}, {"normalizer": "softmax1"},
    ):  # fmt: skip
        assert queries_kernel(monkeypatch, **case) == "query_kernel"


SPILLED = 32  # bytes of a thread: 20 in the soft cap's kernel for heads of 64, 4 with ALiBi


@pytest.mark.slow
def test_what_is_tried_compiles_for_hopper_and_no_product_waits_for_another():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "compiled.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.split("\t") for line in ran.stdout.splitlines()]
    tried = [line for line in lines if line[1] in ("capped_kernel", "ahead_kernel")]
    assert [line[0] for line in tried] == [
        "soft cap 64", "soft cap 128", "softmax 64, backward", "ALiBi 64, backward",
        "soft cap 64, backward",
    ]  # fmt: skip
    assert [line for line in lines if line[4] != "False"] == []
    assert [line for line in tried if int(line[3]) > SPILLED] == []
