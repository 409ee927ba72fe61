"""One step: the same start for every normalizer, one graph under torch.compile, no host numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from qbench.training.data import Sequences, dataloader, sample_indices
from qbench.training.loop import Step
from qbench.training.model import Loss, initial_model, learning_rate
from qbench.training.training_recipe import Schedule, Shape, TrainingRecipe

SHAPE = Shape(hidden=16, layers=2, heads=2, vocabulary=64, context=16)


def new_model(normalizer="softmax", seed=0, **options):
    return initial_model(SHAPE, normalizer=normalizer, seed=seed, device="cpu", **options)[0]


def rows(count=2):
    return torch.randint(64, (count, 17), generator=torch.Generator().manual_seed(1))


def test_models_of_every_normalizer_start_alike_and_other_seeds_elsewhere():
    first, second, other = new_model("softmax"), new_model("softpick"), new_model("softmax", seed=1)
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    assert all(name == same and torch.equal(a, b) for (name, a), (same, b) in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("pad", [1, 2, 3])
def test_the_padding_token_is_trained_too(pad):
    """Rows are never padded, and BOS or EOS may be what pads elsewhere."""
    model = new_model(bos=1, eos=2, pad=pad)
    Loss(model, "float32")(torch.tensor([[1, 2, 3, 4]])).backward()
    embeddings = model.get_input_embeddings()
    assert (embeddings.weight.grad[1:4].norm(dim=1) > 0).all()
    assert (embeddings.weight.norm(dim=1) > 0).all()


@pytest.mark.parametrize("normalizer", ["softmax", "softpick", "rectified"])
def test_the_loss_is_what_the_model_says_of_the_next_tokens(normalizer):
    model, batch = new_model(normalizer), rows()
    logits = model(batch[:, :-1]).logits
    expected = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    torch.testing.assert_close(Loss(model, "float32")(batch), expected)


def test_in_bfloat16_weights_stay_float32_and_all_that_flows_is_bfloat16():
    model, seen = new_model("softpick"), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        layer.self_attn.q_proj.register_forward_hook(lambda m, i, output: seen.append(output.dtype))
    loss = Loss(model, "bfloat16")(rows())
    loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(loss, Loss(model, "float32")(rows()), atol=0.02, rtol=0)


def test_the_compiler_sees_one_graph_once_and_it_gives_the_same(dynamo):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    shape, batch = SHAPE.model_copy(update={"layers": 1}), rows()
    model, _ = initial_model(shape, normalizer="softpick", seed=0, device="cpu")
    plain, loss = Loss(model, "bfloat16")(batch), Loss(model, "bfloat16")
    options = {"fullgraph": True, "dynamic": False, "backend": backend}
    loss.of_embedded = torch.compile(loss.of_embedded, **options)
    compiled = loss(batch)
    compiled.backward()
    assert len(graphs) == 1
    torch.testing.assert_close(compiled, plain)


def recipe(**changed):
    return TrainingRecipe.model_validate({
        "name": "step", "model": SHAPE.model_dump(), "normalizers": ["softmax"],
        "data": {"tokens": "none"}, "tokens": 6400, "batch": {"tokens": 128, "sequences": 8},
        "optimizer": {"learning_rate": 1e-2}, "schedule": {"warmup_steps": 2},
        "compute": {"precision": "float32", "compile": False}, **changed,
    })  # fmt: skip


def process_state(index, processes):
    return SimpleNamespace(device=torch.device("cpu"), process_index=index, num_processes=processes)


def stepped(model, count, **changed):
    """Train ``model`` for ``count`` steps; return the loss and the gradient's norm of the last."""
    settings = recipe(**changed)
    state = process_state(0, 1)
    step = Step(model, settings, state)
    ids = np.random.default_rng(0).integers(0, 64, 3000, np.uint16)
    source = Sequences(tokens=ids, context=16, bos=None)
    batches = dataloader(source, settings, state, first=0, seed=0)
    for number in range(count):
        actual = step(number, batches)
    return actual


def test_gradients_of_several_passes_are_those_of_one():
    whole, parts = new_model(), new_model()
    actual = stepped(whole, 3), stepped(parts, 3, batch={"tokens": 128, "sequences": 2})
    torch.testing.assert_close(*actual)
    for pair in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-3)


def test_gradients_are_clipped_and_the_norm_before_is_told():
    model = new_model()
    _, norm = stepped(model, 1, optimizer={"learning_rate": 1e-9, "clip": 1e-4})
    assert float(norm) > 1e-2


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_norms_decay_only_where_that_is_asked_for(decay_vectors):
    settings = {"learning_rate": 1e-2, "weight_decay": 50.0, "clip": 1e-9, "eps": 1.0,
                "decay_vectors": decay_vectors}  # fmt: skip
    model = new_model()
    stepped(model, 1, optimizer=settings, schedule={"warmup_steps": 0})
    norm = model.model.norm.weight.detach()
    assert bool((norm < 0.9).all()) == decay_vectors
    assert float(model.lm_head.weight.detach().std()) < 0.015  # from 0.02


# Which sequences a step takes: all of them once an epoch, by the seed alone.


TOKENS = np.arange(1000, dtype=np.uint16)


def test_rows_follow_one_another_without_a_gap():
    rows = Sequences(tokens=TOKENS, context=10, bos=None)
    assert len(rows) == 99
    assert rows.rows([0, 98]).tolist() == [list(range(11)), list(range(980, 991))]


def test_an_epoch_takes_every_sequence_once_in_an_order_of_its_own_by_the_seed_alone():
    steps = [sample_indices(step, rows=5, of=23, seed=1) for step in range(23)]
    taken = np.concatenate(steps)
    epochs = [taken[start : start + 23].tolist() for start in range(0, 115, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 5
    for step in (11, 0, 7):  # without those before it
        actual = [sample_indices(step, rows=5, of=23, seed=seed).tolist() for seed in (1, 4)]
        assert actual[0] == steps[step].tolist() != actual[1]


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_step_has_the_same_rows_however_they_are_shared(processes, sequences):
    source = Sequences(tokens=TOKENS, context=8, bos=None)
    shape = {"hidden": 8, "layers": 1, "heads": 1, "vocabulary": 8, "context": 8}
    batch = {"tokens": 64, "sequences": sequences}
    settings = recipe(model=shape, tokens=5 * 64, batch=batch, watch={"length": 8})
    actual, passes = [], 8 // (sequences * processes)
    for index in range(processes):
        state = process_state(index, processes)
        made = list(dataloader(source, settings, state, first=3, seed=2))
        assert len(made) == 2 * passes
        actual += [row.tolist() for batch in made[:passes] for row in batch]
    expected = source.rows(sample_indices(3, rows=8, of=len(source), seed=2)).tolist()
    assert sorted(actual) == sorted(expected)


def test_the_learning_rate_warms_up_and_falls_to_the_floor():
    schedule = Schedule(warmup_steps=10, floor=0.1)
    rates = [learning_rate(step, 110, schedule) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert learning_rate(50, 110, Schedule(warmup_steps=10, decay="none")) == 1
