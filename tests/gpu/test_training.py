"""Training on a GPU: our kernels under torch.compile, no waiting, and the same bits again."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("dynamo")

SETTINGS = {
    "name": "gpu",
    "model": {"hidden": 128, "layers": 2, "heads": 2, "vocabulary": 512, "context": 256},
    "normalizers": ["softmax", "softpick"],
    "data": {"tokens": "none"},
    "tokens": 40 * 2048,
    "batch": {"tokens": 2048, "sequences": 4},
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"warmup_steps": 5},
}


def made(normalizer, attention="triton", eager=False, **compute):
    """A model, and its step by number on random data, on the GPU; ``eager``: never as a graph."""
    from qbench.training.data import Sequences, dataloader
    from qbench.training.loop import Step
    from qbench.training.model import initial_model
    from qbench.training.training_recipe import TrainingRecipe

    recipe = TrainingRecipe.model_validate({**SETTINGS, "compute": compute})
    model, ran = initial_model(
        recipe.model, normalizer=normalizer, seed=0, device="cuda", attention=attention
    )
    assert ran == f"{normalizer}/{attention}"
    alone = SimpleNamespace(device=torch.device("cuda"), process_index=0, num_processes=1)
    step = Step(model, recipe, alone)
    if eager:
        step._eager_steps = math.inf
    ids = np.random.default_rng(0).integers(0, 512, 20_000, np.uint16)
    source = Sequences(tokens=ids, context=256, bos=None)
    batches = dataloader(source, recipe, step.processes, first=0, seed=0)
    return model, lambda number: step(number, batches)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_a_compiled_step_runs_the_causal_kernels_and_never_waits(normalizer, waiting_fails):
    from torch._dynamo.utils import counters

    from qbench.training.model import attention_kernels

    counters.clear()
    _, step = made(normalizer)
    for number in range(3):
        step(number)
    assert counters["stats"]["unique_graphs"] >= 1  # the compiler was at work
    kernels = attention_kernels(lambda: step(3), torch.device("cuda"))
    assert len(kernels) >= 3, kernels  # forward, keys, queries
    assert not any("fmha" in name or "flash" in name for name in kernels)
    for number in range(4, 7):
        step(number)  # captured meanwhile
    waiting_fails()
    step(7)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_compiled_kernels_and_eager_reference_train_alike(normalizer):
    losses = []
    for attention, mode in (("triton", "default"), ("reference", False)):
        _, step = made(normalizer, attention, compile=mode)
        losses.append([float(step(number)[0]) for number in range(10)])
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
def test_the_same_steps_give_the_same_bits_also_as_a_graph(normalizer):
    from qbench.training.loop import joined
    from qbench.training.model import deterministic

    weights = []
    with joined("cuda"), deterministic(True):
        for eager in (True, False):
            torch._dynamo.reset()
            model, step = made(normalizer, eager=eager)
            for number in range(12):
                step(number)
            weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
