"""Cases for the Triton kernels, run by the interpreter in a process of its own (the mode is read
when Triton is imported). Prints one line a case: name, largest relative error, what went wrong."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import sys
from dataclasses import replace

import torch

from qbench.attention import kernels, reference
from qbench.attention.kernels import FAMILIES, Family, launch, operator, supported
from qbench.attention.kernels.settings import NONE, Parameters, Settings
from qbench.attention.kernels.tiles import Tile
from qbench.attention.normalizers import NORMALIZERS, Kernels, register
from qbench.attention.transformers import attend
from qbench.errors import UnavailableError

SMALL = Tile(block_q=16, block_k=16, warps=4, stages=1)
CASES = {  # batch, query heads, key heads, queries, keys, width; settings
    "causal": ((2, 2, 2, 37, 37, 16), {"causal": True}),
    "full": ((1, 1, 1, 20, 35, 16), {}),
    "grouped heads": ((1, 4, 2, 19, 19, 20), {"causal": True}),
    "fewer queries": ((1, 1, 1, 18, 41, 16), {"causal": True}),
    "window": ((1, 1, 1, 50, 50, 16), {"causal": True, "window": 9}),
    "one query": ((2, 4, 2, 1, 90, 16), {"causal": True}),
    "one key": ((1, 1, 1, 1, 1, 16), {"causal": True}),
}


def draw(shape, scale=1.0):
    batch, heads, kv_heads, queries, keys, width = shape
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    # [B, T, H, D] in memory, as transformers hands them over.
    q, k, v = (torch.randn(batch, t, h, width).transpose(1, 2) for h, t in sizes)
    return [(q * scale).requires_grad_(), k.requires_grad_(), v.requires_grad_()]


def error(got, expected):
    if not got.isfinite().all():
        return float("inf")
    norm = expected.double().norm().clamp(min=1e-30)
    return ((got.double() - expected.double()).norm() / norm).item()


def parameters(normalizer, heads, sloped=False):
    """What the normalizer has, of some size; slopes only where asked for."""
    given = {}
    for parameter in NORMALIZERS.get(normalizer).parameters:
        if parameter.name != "slopes":
            given[parameter.name] = parameter.initial / 4 + 0.5 + torch.rand(heads)
        elif sloped:
            given["slopes"] = 0.5 ** torch.arange(1, heads + 1)
    return given


def compare(inputs, normalizer, given=None, **settings):
    """Largest relative error of output and gradients against the float64 reference; those of
    parameters are sums of both signs over all rows, and may be ten times as coarse."""
    given = parameters(normalizer, inputs[0].shape[1]) if given is None else given
    learned = [p.requires_grad_() for p in given.values()]
    output = kernels.attention(*inputs, normalizer=normalizer, parameters=given, **settings)
    gradient = torch.randn_like(output)
    gradients = torch.autograd.grad(output, [*inputs, *learned], gradient)
    settings.pop("spans", None)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    given = {name: p.detach().double().requires_grad_() for name, p in given.items()}
    learned = list(given.values())
    truth = reference.attention(*wide, normalizer=normalizer, parameters=given, **settings)
    truths = torch.autograd.grad(truth, [*wide, *learned], gradient.double())
    return largest_error((output, *gradients), (truth, *truths))


def largest_error(got, truth):
    errors = [error(a, b) for a, b in zip(got, truth, strict=True)]
    return max(*errors[:4], *[each / 10 for each in errors[4:]])


def features():
    for normalizer in supported():
        chosen = CASES if normalizer == "softpick" else ("causal", "one query")
        for name in chosen:
            shape, settings = CASES[name]
            yield f"{normalizer}: {name}", compare(draw(shape), normalizer, **settings)
        yield f"{normalizer}: packed", packed(normalizer)
        yield f"{normalizer}: free of a maximum", free(normalizer)
        if not NORMALIZERS.get(normalizer).kernels.scaled:  # log 1 = 0: the score is 0, not near it
            yield f"{normalizer}: a row near zero, fp16", near_zero(normalizer)
    for scale in (1e-7, 1e4):
        yield f"softpick: scores of {scale}", compare_forward(scale)


SHAPED = {  # shape; settings
    "slopes": ((1, 2, 1, 21, 37, 20), {"causal": True}),
    "cap": ((1, 2, 2, 21, 21, 16), {"causal": True, "softcap": 2.0}),
    "all, window": ((1, 2, 1, 21, 37, 16), {"causal": True, "softcap": 2.0, "window": 7}),
    "all, decode": ((2, 4, 2, 3, 70, 16), {"causal": True, "softcap": 2.0, "window": 50}),
}


def shaped():
    """ALiBi's slopes, soft caps and windows together with each normalizer's own parameters."""
    for normalizer in supported():
        whole = normalizer in ("softpick", "sigmoid", "scalable-softmax")
        for name in SHAPED if whole else ("all, window",):
            shape, settings = SHAPED[name]
            given = parameters(normalizer, shape[1], sloped=name != "cap")
            yield f"{normalizer}: {name}", compare(draw(shape), normalizer, given, **settings)
        yield f"{normalizer}: all, mask", masked(normalizer, softcap=2.0, sloped=True)
    shape, settings = SHAPED["all, window"]
    given = parameters("sigmoid", shape[1], sloped=True)
    given.pop("bias")  # −log n
    yield "sigmoid: by length, window", compare(draw(shape), "sigmoid", given, **settings)
    yield "sigmoid: by length, mask", masked("sigmoid", without="bias")
    yield "sigmoid: by length, packed", packed("sigmoid", without="bias")
    for name, sinks in (("huge", [300.0, 0.0]), ("none", [float("-inf"), -300.0])):
        given = {"sinks": torch.tensor(sinks)}
        inputs = [tensor.detach() for tensor in draw((1, 2, 2, 5, 5, 16))]
        got = kernels.attention(*inputs, normalizer="softmax-sink", parameters=given, causal=True)
        truth = reference.attention(
            *inputs, normalizer="softmax-sink", parameters=given, causal=True
        )
        yield f"softmax-sink: {name}", error(got, truth)


def masked(normalizer, softcap=None, sloped=False, without=None):
    """A mask that hides half of the keys, and from one query all."""
    inputs = draw((2, 2, 1, 20, 20, 16))
    mask = torch.rand(2, 1, 20, 20) < 0.5
    mask[0, 0, 3] = False
    given = parameters(normalizer, 2, sloped)
    given.pop(without, None)
    return compare(inputs, normalizer, given, mask=mask, softcap=softcap)


def packed(normalizer, without=None):
    cu_seqlens = torch.tensor([0, 5, 5, 24], dtype=torch.int32)
    given = parameters(normalizer, 2, sloped=True)
    given.pop(without, None)
    inputs, gradient = draw((1, 2, 1, 24, 24, 16)), torch.randn(1, 2, 24, 16)
    sequences = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}

    def run(function, dtype, **longest):
        sources = [t.detach().to(dtype).requires_grad_() for t in (*inputs, *given.values())]
        output = function(
            *sources[:3], normalizer=normalizer, **sequences, **longest,
            parameters=dict(zip(given, sources[3:], strict=True)),
        )  # fmt: skip
        return (output, *torch.autograd.grad(output, sources, gradient.to(dtype)))

    got = run(kernels.packed_attention, torch.float32, max_seqlen_q=19, max_seqlen_k=19)
    truth = run(reference.packed_attention, torch.float64)
    return largest_error(got, truth)


def free(normalizer):
    """The path of the fast bf16 forward pass, here in float32, and both its ways out."""
    worst = 0.0
    for scale in (1.0, 1e-4, 100.0):
        q, k, v = (tensor.detach() for tensor in draw((1, 1, 1, 33, 33, 16), scale))
        tile = replace(SMALL, free=True)
        given = parameters(normalizer, 1)
        settings = Settings(normalizer, 0.25, 0.0, True, 0, 65, 65)
        got, _, _ = launch.forward(q, k, v, None, None, Parameters(**given), settings, tile=tile)
        truth = reference.attention(
            q.double(), k.double(), v.double(), normalizer=normalizer, causal=True,
            parameters=given,
        )  # fmt: skip
        worst = max(worst, error(got, truth))
    return worst / 100  # it is for bf16, and may be that much coarser


def compare_forward(scale):
    q, k, v = (tensor.detach() for tensor in draw((1, 1, 1, 33, 33, 16), scale))
    got = kernels.attention(q, k, v, normalizer="softpick", causal=True)
    truth = reference.attention(
        q.double(), k.double(), v.double(), normalizer="softpick", causal=True
    )
    return error(got, truth) / (1 if scale < 1 else 1e3)  # at 1e4 float32 scores are that coarse


def near_zero(normalizer):
    """The first row sees one key, whose score is nearly 0: dP − D is the difference of two equal
    numbers, times 1 / Σ = 1000."""
    q, k, v = (tensor.detach() for tensor in draw((1, 2, 1, 21, 21, 16)))
    q[:, :, 0] = k[:, :, 0] * (4e-3 / k[:, :, 0].square().sum(-1, keepdim=True))
    inputs = [tensor.half().requires_grad_() for tensor in (q, k, v)]
    return compare(inputs, normalizer, causal=True) * (1e-5 / 2e-3)  # fp16's own limit


def model():
    """A model on the kernels gives what it gives on the reference, padded on both sides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, vocab_size=31, initializer_range=0.3,
    )  # fmt: skip
    built = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 31, (2, 9))
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = 0
    padding[1, -2:] = 0
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    logits, ran = {}, {}
    for implementation in ("reference", "triton"):
        ran[implementation] = attend(built, normalizer="softpick", implementation=implementation)
        with torch.no_grad():
            out = built(ids, attention_mask=padding, position_ids=positions, use_cache=True)
            step = built(
                ids[:, :1], past_key_values=out.past_key_values, position_ids=positions[:, -1:] + 1,
                attention_mask=torch.cat([padding, padding[:, :1] | 1], 1),
            )  # fmt: skip
        logits[implementation] = torch.cat([out.logits[padding.bool()], step.logits[:, 0]])
    assert ran == {"reference": "softpick/reference", "triton": "softpick/triton"}
    yield "a model, padded, and a decode step", error(logits["triton"], logits["reference"])


def refusals():
    """1 where something ran that has no formulas, else 0."""
    import plugins.toy_normalizer as toy

    query = torch.randn(1, 1, 20, 16)
    try:
        output = kernels.attention(query, query, query, normalizer="toy", causal=True)
        softmax = kernels.attention(query, query, query, normalizer="softmax", causal=True)
        ran = "as softmax" if torch.allclose(output, softmax) else "as something"
        print(f"toy: it ran {ran}", file=sys.stderr)
        yield "toy: refused by name", 1
    except UnavailableError as refused:
        yield "toy: refused by name", float("normalizer 'toy'" not in str(refused))
    # A family that no formula knows does not compile, not even behind the host's back.
    FAMILIES["claimed"] = Family()
    claims = Kernels(family="claimed", backward=True, decode=True, gluon=False)
    register(type("Claims", (toy.Toy,), {"name": "claims", "kernels": claims})())
    settings = Settings("claims", 0.25, 0.0, True, 0, 20, 20)
    for name, queries, tile in (("forward", 20, SMALL), ("free", 20, replace(SMALL, free=True)),
                                ("decode", 1, SMALL)):  # fmt: skip
        rows = query[:, :, :queries]
        arguments = (rows, query, query, None, None, NONE, settings._replace(max_seqlen_q=queries))
        yield f"{name}: does not compile", compiles(launch.forward, *arguments, tile=tile)
    lse, imprecise = torch.zeros(1, 1, 20), torch.zeros(1, dtype=torch.int32)
    arguments = (query, query, query, query, query, lse, imprecise, None, None, NONE, settings)
    yield "backward: does not compile", compiles(launch.backward, *arguments)
    assert NORMALIZERS.get("claims").kernels is claims


def compiles(run, *arguments, **settings):
    try:
        run(*arguments, **settings)
    except Exception as error:  # the interpreter wraps what it meets in an error of its own
        return float("no formula" not in f"{error} {error.__cause__}")
    return 1.0


def operators():
    """What torch.compile sees: the operator as torch checks one, and its gradients, those of
    every parameter too, as without the dispatcher."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for normalizer in ("sigmoid", "softmax-sink", "scalable-softpick-next"):
        given = {n: t.requires_grad_() for n, t in parameters(normalizer, 2, sloped=True).items()}
        settings = Settings(normalizer, 0.25, 2.0, True, 0, 9, 9)
        inputs = draw((1, 2, 1, 9, 9, 16))
        arguments = (*inputs, None, None, *Parameters(**given), *settings)
        torch.library.opcheck(torch.ops.qbench.attention.default, arguments, test_utils=checks)
        if (
            "softpick" in normalizer
        ):  # of the others a flag is left as it was, since nobody reads it
            torch.library.opcheck(torch.ops.qbench.attention.default, arguments)
        sources = [*inputs, *given.values()]
        plain = operator.apply(*arguments[:5], Parameters(**given), settings)
        outputs = (plain, operator.attention(*arguments)[0])
        gradient = torch.randn_like(plain)
        found, expected = (torch.autograd.grad(out, sources, gradient) for out in outputs)
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        yield f"{normalizer}: the operator", float(not same)


GROUPS = {
    "features": features, "shaped": shaped, "model": model, "refusals": refusals,
    "operators": operators,
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for group in sys.argv[1:]:
        for name, worst in GROUPS[group]():
            print(f"{name}\t{worst:.1e}", flush=True)
