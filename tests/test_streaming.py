"""Weights that come to the device block by block: the same numbers, read once for all batches."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_recipe import DEMO, qbench, run_small, small_recipe
from tiny import tiny_model

from qbench import streaming
from qbench.cell import offload_policy
from qbench.checkpoints.find import elements
from qbench.errors import RecipeError, UnavailableError
from qbench.plan import plan
from qbench.quantizers import config_of, quantize
from qbench.recipe import Recipe
from qbench.store import Store
from qbench.streaming import load_block, lockstep, stream, stream_of

CALIBRATION = {"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 128}
QUICK = ["fp32", {"name": "gptq-4bit", "group_size": 64}]
OTHERS = [
    "fp32", {"name": "rtn-4bit", "group_size": 64}, "bnb-4bit", "bnb-8bit", "hqq-4bit",
    {"name": "int8-row"}, {"name": "gptq-3bit", "group_size": 64, "true_sequential": False},
]  # fmt: skip


def results(folder, monkeypatch, option, *options, **changes):
    """Records, outcomes and responses of a run with a cache of its own."""
    monkeypatch.setenv("QBENCH_CACHE", str(folder / f"cache{option}"))
    out = folder / f"out{option}"
    options = ("--only", "softpick/*", "--out", out, option, *options)
    run_small(folder, *options, calibration=CALIBRATION, tasks=["demo_choice"], **changes)
    store = Store(out)
    return [(r, store.outcomes(r), store.responses(r)) for r in store.records()]


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    """Results of the quick quantizers with the weights in memory."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("resident")
        return results(folder, patch, "--no-stream", quantizers=QUICK, evaluation={"limit": 3})


@pytest.mark.parametrize(
    ("quantizers", "dtype"),
    [
        (QUICK, "float32"),
        pytest.param(OTHERS, "float32", marks=pytest.mark.slow),
        pytest.param(["bf16", "bnb-4bit", "hqq-4bit"], "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_streamed_run_gives_the_bits_of_a_resident_one(
    tmp_path, monkeypatch, quantizers, dtype, resident
):
    settings = {"quantizers": quantizers, "compute_dtype": dtype, "evaluation": {"limit": 3}}
    find = partial(results, tmp_path, monkeypatch, **settings)
    whole = resident if quantizers is QUICK else find("--no-stream")
    streamed = find("--stream")
    assert len(whole) == len(streamed) == len(quantizers)
    for (a, *tables), (b, *others) in zip(whole, streamed, strict=True):
        assert b.status == "ok", b.error
        assert {stage.name: stage.detail for stage in b.stages}["load"] == "block by block"
        assert (a.key, a.scores, a.damage, a.audit) == (b.key, b.scores, b.damage, b.audit)
        assert all(x.equals(y) for x, y in zip(tables, others, strict=True))


def test_what_is_not_computed_block_by_block_is_refused_before_anything_runs(tmp_path):
    path = small_recipe(tmp_path, quantizers=["fp32", {"kv": "int3-token", "label": "kv3"}])
    with pytest.raises(RecipeError, match="stream: block by block, only weights"):
        qbench("plan", path, "--stream", "--device", "cpu")


def tiny():
    return tiny_model("llama", num_hidden_layers=4)


def test_many_forwards_read_each_block_once():
    model = tiny()
    texts = [torch.randint(0, 50, (2, n), generator=torch.Generator().manual_seed(n))
             for n in (3, 9, 5)]  # fmt: skip
    plain = [model.model(text)[0] for text in texts]
    streamed = stream_of(stream(model, "cpu"))
    reads = []
    read = streamed._read
    streamed._read = lambda index: (reads.append(index), read(index))[1]
    assert all(torch.equal(model.model(t)[0], p) for t, p in zip(texts, plain, strict=True))
    assert sorted(reads) == sorted([0, 1, 2, 3] * 3 + [0])  # the last is of a pass to come
    reads.clear()
    calls = [lambda text=text: model.model(text)[0] for text in texts]
    told = []
    found = list(streamed.lockstep(calls, told.append))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert sorted(reads) == [0, 1, 2, 3]
    assert told == [0.25, 0.5, 0.75, 1.0]


@torch.no_grad()
def test_blocks_may_give_more_than_hidden_states():
    """As those of Bamba, which give attention weights, or None, beside them."""
    ids = torch.arange(2, 26).reshape(2, 12)
    model, streamed = tiny_model("bamba"), stream(tiny_model("bamba"), "cpu")
    calls = [
        lambda row=row: streamed(input_ids=row, use_cache=False).logits for row in ids[:, None]
    ]
    for found, row in zip(lockstep(streamed, calls), ids[:, None], strict=True):
        assert torch.equal(found, model(input_ids=row, use_cache=False).logits)


def test_changes_to_a_block_are_forgotten_when_its_turn_is_over():
    model = stream(tiny(), "cpu")
    layer = model.model.layers[1].mlp.up_proj
    before = layer.weight.data.clone()
    load_block(model, "model.layers.1.mlp.up_proj")
    layer.weight.data.zero_()
    load_block(model, "model.layers.3.mlp.up_proj.weight")  # not the block that is read ahead
    assert torch.equal(layer.weight.data, before)
    last = [each.model.layers[3].mlp.up_proj.weight for each in (model, tiny())]
    assert torch.equal(*last)


def test_layers_of_a_streamed_model_are_quantized_one_after_the_other(monkeypatch):
    threads = set()
    monkeypatch.setattr(quantize, "load_block", lambda *_: threads.add(threading.current_thread()))
    model, config = stream(tiny(), "cpu"), config_of("rtn-4bit:group_size=16")
    quantize.make(model, config, None, lambda *_: None)
    assert threads == {threading.main_thread()}


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UnavailableError, match="no list of blocks"):
        stream(torch.nn.Linear(2, 2), "cpu")


def test_blocks_on_several_devices_give_the_bits_of_one(tmp_path, monkeypatch, resident):
    """Two that are both the CPU: what is moved where, a test on two GPUs shows."""
    places = []
    shard, at = streaming.shard, streaming._forward_at
    monkeypatch.setattr(
        "qbench.cell.shard", lambda model, devices: shard(model, ["cpu", torch.device("cpu", 0)])
    )
    monkeypatch.setattr(
        streaming, "_forward_at",
        lambda own, place, after, *args, **kwargs: (
            places.append(place), at(own, place, after, *args, **kwargs))[1],
    )  # fmt: skip
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    settings = {"quantizers": QUICK, "calibration": CALIBRATION, "tasks": ["demo_choice"]}
    settings["evaluation"] = {"limit": 3, "device_map": "auto"}
    store = run_small(tmp_path, "--only", "softpick/*", **settings)
    for (one, *_), over in zip(resident, store.records(), strict=True):
        assert over.status == "ok", over.error
        assert (one.key, one.scores, one.damage, one.audit) == (
            over.key, over.scores, over.damage, over.audit,
        )  # fmt: skip
    assert len(set(map(str, places))) == 2


@pytest.mark.parametrize(
    ("command", "option", "value"), [("run", "--workers", 2), ("run", "--cluster", "tcp://h:1")]
)
def test_a_recipe_that_has_all_gpus_takes_no_workers(tmp_path, command, option, value):
    path = small_recipe(tmp_path, evaluation={"device_map": "auto"})
    with pytest.raises(RecipeError, match=f"device_map and {option} exclude each other"):
        qbench(command, path, option, value, "--device", "cpu", "--out", tmp_path / "out")


@pytest.mark.parametrize(("free", "comes"), [(2.1, False), (1.9, True)])
def test_by_itself_a_model_comes_block_by_block_if_it_has_no_room(
    tmp_path, monkeypatch, free, comes
):
    """Of twice its weights, which are few."""
    planned = plan(Recipe.load(small_recipe(tmp_path, quantizers=["fp32"])), device="cpu")
    cell = planned.cells[0]
    weights = 4 * elements(cell.checkpoint.headers)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * weights, 80 * 2**30))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    on_gpu = replace(planned, device="cuda")
    assert (offload_policy(cell, on_gpu, 4) is not None) == comes
    assert offload_policy(cell, planned, 4) is None  # on a CPU it lies there anyway


def test_blocks_lie_on_gpus_or_come_in_turn_not_both(tmp_path):
    path = small_recipe(tmp_path, evaluation={"device_map": "auto", "stream": True})
    with pytest.raises(RecipeError, match=r"evaluation\.device_map: not together with stream"):
        Recipe.load(path)
