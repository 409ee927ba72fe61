"""``qbench budget``: the choice is the best one, costs are those of the whole model, and a search
that was stopped goes on."""

import copy
import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from loading import load_model
from published_copies import copy_of, first_blocks, original
from small_recipe import DEMO, blocks, qbench
from tiny import tiny_model

from qbench.analysis import sensitivity
from qbench.analysis.sensitivity import Baseline
from qbench.budget import measure, search
from qbench.budget.choose import (
    UNQUANTIZED,
    Costs,
    column,
    curve,
    expand,
    patterns,
    smaller_groups,
    solve,
    uniform_columns,
    uniform_entry,
)
from qbench.checkpoints import find
from qbench.errors import QbenchError
from qbench.files import cache_folder
from qbench.quantizers import packed
from qbench.quantizers.linear import linears
from qbench.quantizers.registry import config_of
from qbench.recipe import Recipe
from qbench.statistics import Missing
from qbench.store import Store

OPTIONS = (
    "--data", DEMO / "data", "--definitions",
    DEMO / "tasks", "--calibration", DEMO / "calibration.jsonl", "--calibration-samples", 12,
    "--calibration-length", 64, "--tasks", "demo_choice", "--limit", 3, "--dtype", "float32",
    "--device", "cpu", "--texts", 4,
)  # fmt: skip


def table_of(options):
    """Return the table of ``Costs``, of options that hold bits and KL by layer and choice."""
    rows = {
        (n, c): (*each, each[0]) for n, choices in options.items() for c, each in choices.items()
    }
    index = pd.MultiIndex.from_tuples(rows, names=["layer", "choice"])
    return pd.DataFrame([*rows.values()], index, ["bits", "kl", "width"])


def random_costs(seed, layers=4):
    draw = random.Random(seed)
    shapes = {f"layers.{i}.up": (draw.choice([1, 4, 7]), 10) for i in range(layers)}
    options = {
        name: {f"rtn-{w}bit": ((w + 0.25) * 10 * rows, draw.random() * 4**-w) for w in (2, 3, 4)}
        | {UNQUANTIZED: (160.0 * rows, 0.0)}
        for name, (rows, _) in shapes.items()
    }
    return Costs(shapes=shapes, table=table_of(options), others=(30, 480.0), outside=8.0 * 2**30)


@pytest.mark.parametrize(("seed", "room"), [(0, 0.1), (1, 0.6), (0, 3.0)])
def test_the_choice_is_the_cheapest_of_all_that_fit(seed, room):
    costs = random_costs(seed)
    budget = costs.of(dict.fromkeys(costs.shapes, "rtn-2bit"))[0] + room
    layers = [rows[["bits", "kl"]].to_numpy() for _, rows in costs.table.groupby(level="layer")]
    every = (np.sum(rows, 0) for rows in itertools.product(*layers))
    room = budget * costs.numbers - costs.others[1]
    best = min(total for bits, total in every if bits <= room)
    bits, total = costs.of(solve(costs, budget))
    assert bits <= budget
    assert total == pytest.approx(best, rel=1e-6)
    assert costs.from_gib(costs.gib(budget)) == pytest.approx(budget)
    points = curve(costs, most=12.0)
    assert len(points) > 3
    for size, total in points:
        assert costs.of(solve(costs, size + 1e-9)) == pytest.approx((size, total))


@pytest.mark.parametrize("seed", range(5))
def test_patterns_give_each_layer_its_choice(seed):
    draw = random.Random(seed)
    names = [f"model.layers.{i}.mlp.{part}" for i in range(23) for part in ("up_proj", "down_proj")]
    chosen = {n: draw.choice(["rtn-3bit", "gptq-4bit", "hqq-2bit", UNQUANTIZED]) for n in names}
    entry = column(chosen, "mix")
    assert len(entry["layers"]) <= 2 * 9  # three choices over three tens of layers each
    weights = config_of({k: v for k, v in entry.items() if k != "label"}).weights
    given = {n: UNQUANTIZED if n in weights.ignore else weights.for_layer(n).name for n in names}
    assert given == chosen
    assert patterns(dict.fromkeys(names, "rtn-3bit")) == [
        ("model.layers.*.mlp.up_proj", "rtn-3bit"), ("model.layers.*.mlp.down_proj", "rtn-3bit"),
    ]  # fmt: skip


def test_methods_stand_for_their_widths_and_groups_may_be_as_small_as_a_budget_allows():
    assert expand(["hqq", "gptq-4bit:group_size=32"]) == [
        "hqq-2bit", "hqq-3bit", "hqq-4bit", "hqq-8bit", "gptq-4bit:group_size=32",
    ]  # fmt: skip
    sizes = Costs(shapes={"layers.0.up": (64, 128), "layers.1.up": (192, 128)})
    choices = ("rtn-2bit:group_size=64", "rtn-4bit:group_size=64", "hqq-4bit:group_size=64")
    settings = {choice: config_of(choice).weights for choice in choices}
    assert list(smaller_groups(sizes, settings, (2.3, 2.8, 5))) == [
        "rtn-2bit:group_size=32", "rtn-4bit:group_size=32", "hqq-4bit:group_size=32",
    ]  # fmt: skip
    assert not smaller_groups(sizes, settings, (2.4, 4.5))


def test_a_uniform_column_may_have_another_choice_for_head_and_embeddings():
    bits = {UNQUANTIZED: 16.0, "gptq-3bit": 3.25, "rtn-3bit": 3.25, "rtn-8bit": 8.25}
    at_end = {UNQUANTIZED: 0.0, "rtn-3bit": 0.5, "rtn-8bit": 0.1}
    costs = Costs(
        shapes={"layers.0.up": (256, 64), "lm_head": (128, 64)},
        table=table_of({
            "layers.0.up": {c: (256 * 64 * each, 0.0) for c, each in bits.items()},
            "lm_head": {c: (128 * 64 * bits[c], cost) for c, cost in at_end.items()},
        }),
        ends=["lm_head"],
    )  # fmt: skip
    kl = {"gptq-3bit": 0.3, "rtn-3bit": 0.2, "rtn-8bit": 0.01}
    columns = uniform_columns(costs, kl)
    assert columns["rtn-3bit-ends-rtn-8bit"] == {
        "bits": pytest.approx((2 * 3.25 + 8.25) / 3), "kl": pytest.approx(0.3),
        "entry": {"name": "mixed", "label": "rtn-3bit-ends-rtn-8bit",
                  "layers": {"lm_head": "rtn-8bit", "*": "rtn-3bit"}},
    }  # fmt: skip
    assert columns["gptq-3bit"] == {
        "bits": pytest.approx((2 * 3.25 + 16) / 3), "kl": 0.3,
        "entry": {"name": "gptq-3bit", "label": "gptq-3bit"},
    }  # fmt: skip
    assert len(columns) == 9
    choices = "gptq-3bit:group_size=64", "rtn-8bit:group_size=64"
    assert uniform_entry(*choices, costs.ends) == {
        "name": "mixed", "label": "gptq-3bit-g64-ends-rtn-8bit-g64",
        "layers": {"lm_head": choices[1], "*": choices[0]},
    }  # fmt: skip
    assert uniform_entry(choices[0]) == {"name": choices[0], "label": "gptq-3bit-g64"}
    assert column({"layers.0.up": "rtn-3bit", "lm_head": UNQUANTIZED}, "m", ["lm_head"]) == {
        "name": "mixed", "label": "m", "layers": {"layers.*.up": "rtn-3bit"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load_model(find(str(DEMO / "softpick")), dtype=torch.float32, device="cpu")


def test_a_layer_alone_costs_what_the_whole_forward_says(model, monkeypatch):
    ids = torch.randint(3, 400, (3, 20), generator=torch.Generator().manual_seed(1))
    baseline = Baseline(model, ids, batch=2)
    monkeypatch.setattr(sensitivity, "memory_gib", lambda device: 1e-6)
    whole = Baseline(model, ids, batch=2)
    assert baseline.skips
    assert not whole.skips
    for block, parts in {0: ("mlp.up_proj",), 2: ("self_attn.q_proj", "mlp.down_proj")}.items():
        variants = {}
        for name in (f"model.layers.{block}.{part}" for part in parts):
            variants[name] = torch.nn.Linear(1, 1, bias=False)
            variants[name].weight = torch.nn.Parameter(1.1 * linears(model)[name].weight)
        each = [{n: layer} for n, layer in variants.items()]
        expected, together = whole.losses(*each), baseline.losses(*each)
        np.testing.assert_allclose(together, expected, rtol=1e-6)
        assert expected[:, 0].min() > 0


@pytest.mark.parametrize("kind", ["falcon", "bloom", "rwkv"])
def test_blocks_may_return_attention_weights_or_a_state_and_take_a_mask_per_head(kind):
    model = tiny_model(kind, num_hidden_layers=2, n_layer=2)
    baseline = Baseline(model, torch.randint(3, 100, (4, 12)), batch=4)
    assert baseline.skips
    names = [name for name in linears(model) if baseline.block_of(name) == 1][:3]
    variants = [{name: copy.deepcopy(linears(model)[name])} for name in names]
    for (layer,) in map(dict.values, variants):
        torch.nn.init.normal_(layer.weight)
    together = baseline.losses(*variants)
    baseline.skips = False
    np.testing.assert_allclose(together, baseline.losses(*variants), rtol=1e-5)
    baseline.skips = True
    torch.nn.init.constant_(variants[1][names[1]].weight, torch.nan)
    with pytest.raises(QbenchError, match=f"^{names[1]}: "):
        baseline.losses(*variants)


def test_rounding_alone_costs_what_is_taken_off_in_bfloat16_and_nothing_in_float32(model):
    ids = torch.randint(3, 400, (4, 60), generator=torch.Generator().manual_seed(1))
    name = "model.layers.0.mlp.down_proj"
    layer = linears(model)[name]
    exact, rounded = (
        Baseline(each, ids, batch=4) for each in (model, copy.deepcopy(model).bfloat16())
    )
    settings = config_of("rtn-8bit:group_size=64").weights
    module = packed.from_packed(layer, packed.quantize(name, layer, settings), settings)
    variants = {name: module}, {name: measure._other_last_bits(layer)}
    cost, last_bits = exact.losses(*variants)[:, 0].mean(1)
    assert last_bits < 1e-3 * cost
    layer = linears(rounded.model)[name]
    module = packed.from_packed(layer, packed.quantize(name, layer, settings), settings)
    variants = {name: module}, {name: measure._other_last_bits(layer)}
    measured, floor = rounded.losses(*variants)[:, 0].mean(1)
    assert measured > 3 * cost
    assert measured - floor < 2 * cost


@pytest.fixture
def checkpoint():
    return "--checkpoint", f"m={blocks('softpick')['softpick']}"


@pytest.mark.usefixtures("own_cache")
def test_a_stopped_search_goes_on_and_the_mix_is_run_and_compared(
    tmp_path, monkeypatch, capfd, checkpoint
):
    command = ("budget", *checkpoint, *OPTIONS, "--methods", "gptq-3bit,rtn-4bit", "--bits", 3.5,
               "--length", 32, "--out", tmp_path)  # fmt: skip
    calls, losses = [], Baseline.losses

    def stops(self, *variants, **options):
        before = len(calls)
        calls.extend(map(tuple, variants))
        if before < 35 <= len(calls):
            raise MemoryError("stopped")
        return losses(self, *variants, **options)

    monkeypatch.setattr(Baseline, "losses", stops)
    with pytest.raises(MemoryError):
        qbench(*command)
    assert qbench(*command) == 0
    single = [names for names in calls if len(names) == 1]
    results = json.loads((tmp_path / "budget.json").read_text())
    choices = len(results["costs"]) + 1  # the floor
    assert choices > 3  # smaller groups too
    assert 14 * choices <= len(single) <= 14 * choices + 7  # of the block in which it stopped
    (mix,) = results["mixes"]
    assert mix["bits"] <= 3.5
    assert mix["kl"] == pytest.approx(mix["sum"], rel=1)
    fitting = {each["kl"]: each["label"] for each in results["uniform"] if each["bits"] <= 3.5}
    assert mix["best_uniform"] == fitting[min(fitting)]
    layers = {n: choice for n, (choice, _) in mix["layers"].items()}
    (certificate,) = results["certificates"]
    assert certificate["other"] == mix["best_uniform"]
    assert certificate["mix_bits"] == pytest.approx(mix["bits"], abs=1e-4)
    recipe = Recipe.load(tmp_path / "recipe.yaml")
    labels = [entry.label for entry in recipe.quantizers]
    assert labels == ["fp32", "mix-3.5", mix["best_uniform"]]
    assert recipe.calibration.samples == 8
    record = next(each for each in Store(tmp_path).records() if each.quantizer == "mix-3.5")
    (detail,) = (stage.detail for stage in record.stages if stage.name == "quantize")
    assert detail.startswith("artifact reused")  # the search made it
    weights = recipe.quantizers[1].quantization.weights
    assert {n: weights.for_layer(n).name for n in layers} == {
        n: choice.partition(":")[0] for n, choice in layers.items()
    }
    printed = capfd.readouterr().out
    assert "above the floor of rounding, sum to a KL of" in printed, printed
    assert (tmp_path / "budget.svg").read_text().startswith("<?xml")
    assert len([*(cache_folder() / "budget").glob("*.json")]) == choices + 1  # and the mix


@pytest.mark.usefixtures("own_cache")
def test_gptq_costs_are_those_of_layers_that_are_calibrated_alone(
    tmp_path, monkeypatch, checkpoint
):
    met = []

    def stops(*arguments):
        met.extend(arguments)
        raise MemoryError

    monkeypatch.setattr(measure.Search, "costs", stops)
    with pytest.raises(MemoryError):
        qbench("budget", *checkpoint, *OPTIONS, "--methods", "gptq-2bit", "--bits", 4,
               "--out", tmp_path)  # fmt: skip
    search, cells = met
    cell, name = next(iter(cells.values())), "model.layers.1.mlp.down_proj"

    def output(**options):
        layer, _ = search._quantized(cell, lambda done, total: None, **options)[name]
        return layer(torch.linspace(-1, 1, search.layers[name].in_features))

    in_turn, alone = output(), output(alone=True)
    others = tuple(layer for layer in search.layers if layer != name)
    weights = replace(cell.quantization.weights, ignore=others)
    cell = replace(cell, quantization=replace(cell.quantization, weights=weights))
    assert torch.equal(alone, output())
    assert not torch.equal(alone, in_turn)


@pytest.mark.usefixtures("own_cache")
def test_a_peer_is_compared_on_the_same_documents_a_copy_or_the_best_uniform_column(tmp_path):
    whole = first_blocks(original(tmp_path / "llama"), tmp_path / "whole")
    copy = copy_of(whole, "fp8", tmp_path / "fp8")
    options = ("--methods", "bnb-4bit", "--bits", 5, "--peers", "bnb-4bit", "--length", 16,
               "--texts", 2, "--limit", 20, "--quantized", f"fp8={copy}")  # fmt: skip
    checkpoint, out = ("--checkpoint", f"m={whole}"), tmp_path / "out"
    assert qbench("budget", *checkpoint, *OPTIONS[:-2], *options, "--out", out) == 0
    store = Store(out)
    records = {each.quantizer: each for each in store.records() if each.quantized}
    means = {}
    for name, record in records.items():
        rows = store.divergences(record).groupby(["task", "document"])
        means[name] = rows.apply(lambda each: np.average(each["kl"], weights=each["tokens"]))
        assert means[name].index.equals(means["mix-5"].index)
    results = json.loads((out / "budget.json").read_text())
    assert results["certificates"][0]["other"] == "bnb-4bit"
    assert (
        {each["other"] for each in results["peers"]}
        == {"bnb-4bit", "fp8"}
        == means.keys() - {"mix-5"}
    )
    peer = next(each for each in results["peers"] if each["other"] == "fp8")
    assert peer["mix"] == "mix-5"
    assert peer["other_bits"] == records["fp8"].audit.size.bits_per_weight
    assert peer["other_bits"] == pytest.approx(8, abs=0.1)
    assert peer["documents"] == len(means["fp8"]) == 20
    assert peer["ratio"] == pytest.approx(means["mix-5"].mean() / means["fp8"].mean())


@pytest.mark.slow  # ten seconds; test_mixed has the cells
@pytest.mark.usefixtures("own_cache")
def test_head_and_embeddings_have_choices_and_count_in_the_budget(tmp_path, checkpoint):
    command = (
        "budget", *checkpoint, *OPTIONS, "--methods", "gptq-2bit,hqq-3bit,rtn-8bit", "--length", 32,
    )  # fmt: skip
    assert qbench(*command, "--bits", 4.5, "--out", tmp_path / "without") == 0
    more = ("--include", "lm_head,embeddings")
    assert qbench(*command, *more, "--bits", 4.5, "--out", tmp_path / "with") == 0
    without, results = (
        json.loads((tmp_path / name / "budget.json").read_text()) for name in ("without", "with")
    )
    assert (
        without["costs"].items()
        <= {
            choice: {n: cost for n, cost in costs.items() if n in without["costs"][choice]}
            for choice, costs in results["costs"].items()
        }.items()
    )  # the same, from the cache
    ends = {"lm_head", "model.embed_tokens"}
    assert results["costs"]["rtn-8bit:group_size=128"].keys() >= ends
    assert not results["costs"]["gptq-2bit:group_size=128"].keys() & ends
    (mix,), (before,) = results["mixes"], without["mixes"]
    assert mix["bits"] <= 4.5
    assert mix["gib"] < 0.7 * before["gib"]
    assert all(mix["layers"][name][1] < 16 for name in ends)
    labels = [each["label"] for each in results["uniform"]]
    assert "hqq-3bit-g64-ends-hqq-3bit-g64" in labels
    (certificate,) = results["certificates"]
    assert certificate["mix_gib"] == pytest.approx(mix["gib"], rel=1e-3)
    assert "GiB" in certificate["text"]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name a budget: --bits 3.5, or --gib 4"),
        (("--bits", "3.5,x"), "--bits 'x': write numbers above 0, such as 2.75,3.5"),
        (("--bits", 1.5), "a budget of 1.5 bits per weight, 0.0.* GiB: the smallest choice takes "
                          "2.188, 0.0.* GiB; give from 2.188 to less than 16 bits"),
        (("--bits", 17), "give from 2.1.* to less than 16"),
        (("--gib", 1e-5), ", 1e-05 GiB: the smallest choice takes 2.188"),
        (("--bits", 3, "--peers", "nope"), "^unknown quantizer 'nope'"),
        (("--bits", 3, "--texts", 12), "--texts 12: must be fewer than the 12 windows"),
        (("--bits", 3, "--methods", "kv4"), "--methods kv4: not a method by which qbench itself"),
        (("--bits", 3, "--include", "head"), "--include head: unknown; possible: lm_head"),
        (("--bits", 3, "--checkpoint", f"n={DEMO / 'softmax'}"), "for one model, not for m, n"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_work_is_refused_in_a_line(options, message, tmp_path, checkpoint):
    methods = () if "--methods" in options else ("--methods", "rtn-2bit,rtn-3bit")
    with pytest.raises(QbenchError, match=message) as error:
        qbench("budget", *checkpoint, *OPTIONS, *methods, "--out", tmp_path, *options)
    assert len(error.value.lines) == 1


@pytest.mark.parametrize("name", ["recipe.yaml", "budget.json", "budget.svg", "tables.md"])
def test_a_folder_with_a_symbolic_link_is_refused_before_the_search(
    name, tmp_path, monkeypatch, checkpoint
):
    """A stranger's folder must not have this machine's files overwritten."""
    monkeypatch.setattr(search, "search", None)
    (folder := tmp_path / "mix").mkdir()
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(QbenchError, match=f"{name}: a symbolic link; put the file"):
        qbench("budget", *checkpoint, *OPTIONS, "--methods", "rtn-2bit", "--bits", 3,
               "--out", folder)  # fmt: skip
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("estimate", "significant", "words"),
    [
        (-0.2, True, "is significantly better than gptq (3.25 bits per weight, 0.812 GiB): KL × 0"),
        (-0.2, False, "is not shown to be better than gptq"),
        (0.2, True, "is significantly worse than gptq"),
    ],
)
def test_the_certificate_says_which_column_to_take(estimate, significant, words):
    answer = SimpleNamespace(
        kind="log ratio", estimate=estimate, low=estimate - 0.1, high=estimate + 0.1, stderr=0.05,
        significant=significant, mark="", documents=300, family=2, p_holm=0.01,
    )  # fmt: skip
    records = tuple(
        SimpleNamespace(
            quantizer=name,
            audit=SimpleNamespace(size=SimpleNamespace(bits_per_weight=b, gib=b / 4)),
        )
        for name, b in (("mix", 3.5), ("gptq", 3.25))
    )
    text = search.certificate(answer, *records)["text"]
    assert words in text
    assert text.endswith("take gptq.") == (not (significant and estimate < 0))
    assert "no test: x" in search.certificate(Missing(reason="x"), *records)["text"]
