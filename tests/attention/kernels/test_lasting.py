"""The forward kernel whose programs take many blocks: what it is for, and which blocks these are;
the ways of the backward kernels; and what all of them compile to."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_scripts import lines_of

from qbench.attention.kernels import (
    FAMILIES,
    gluon_ways,
    lasting,
    launch,
    modes,
    recall,
    schedules,
    tiles,
)
from qbench.attention.kernels.gluon_family import ROWS

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
    kind = replace(tiles.LASTING[64], shortest=0)
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


def test_the_lasting_kernel_is_for_soft_caps_in_half_precision():
    for width, kind in tiles.LASTING.items():
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
    kind = replace(tiles.LASTING[64], shortest=0)
    assert launched(monkeypatch, "softmax", kind) == ["capped_kernel"]
    assert launched(monkeypatch, "softmax", replace(kind, shortest=4096)) == ["forward_kernel"]
    assert launched(monkeypatch, "sigmoid", kind) == ["forward_kernel"]
    assert launched(monkeypatch, "softpick", kind) == ["forward_kernel"]


def test_which_ways_the_backward_kernels_go():
    plain, sloped = 0, modes.SLOPED.value
    learning = modes.LEARNING.value | modes.SINK_LEARNED.value
    for of in (gluon_ways.of_queries, gluon_ways.of_keys):
        assert of("softmax", 64, plain).ahead
        assert of("softmax", 64, plain | learning) == of("softmax", 64, plain)
        assert of("softmax", 64, sloped | modes.LEARNING_SLOPES.value) == of("softmax", 64, sloped)
        assert not of("sigmoid", 64, modes.BIASED.value | modes.SUMLESS.value).ahead
    for family in FAMILIES:
        assert not gluon_ways.of_queries(family, 128, plain).ahead
    assert gluon_ways.of_keys("softpick", 128, plain).ahead == "pairs"
    assert not gluon_ways.of_keys("sigmoid", 128, modes.SUMLESS.value).ahead
    assert gluon_ways.of_keys("rectified", 64, CAPPED).held == 1
    assert gluon_ways.of_keys("softpick", 128, sloped).held == 1


def test_ways_are_of_kernels_that_there_are():
    for table in (gluon_ways.QUERIES, gluon_ways.KEYS):
        for (family, *_), way in table.items():
            assert family in FAMILIES
            assert way.held in (0, 0.5, 1, 2)
            if way.ahead:  # the tile before, this one and the next are in the ring at once
                assert way.slots >= 3
    for (_, width, _), way in gluon_ways.QUERIES.items():
        assert way.held != 0.5
        assert way.ahead != "pairs"
        assert width == 64 or not way.ahead
    for (_, width, _), way in gluon_ways.KEYS.items():
        assert (way.held == 0.5) == (way.ahead == "pairs")
        if way.ahead:
            queries = (
                2 * gluon_ways.BLOCK_Q[width] if way.held == 0.5 else gluon_ways.BLOCK_Q[width]
            )
            assert queries == ROWS.value


SPILLED = 150  # bytes of a thread: in softpick's keys' kernel, where scores are scaled


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_and_no_product_waits_for_another():
    lines = lines_of("compiled.py")
    names = {line[0] for line in lines}
    assert len(names) == len(tiles.LASTING) + len({**gluon_ways.QUERIES, **gluon_ways.KEYS})
    assert [line for line in lines if line[4] != "False"] == []
    # The second of softpick's keys' kernels is for few blocks.
    usual = [line for line in lines if line[5] != "precise"]
    assert [line for line in usual if int(line[3]) > SPILLED] == []
