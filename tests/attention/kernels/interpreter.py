"""Runs in a process of its own, since Triton reads its mode when it is imported: reads a line with
a function of this file and its arguments, prints what it gives as a line of JSON."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import torch
from attention_cases import QUICK, WHOLE, Case, by_kernels, definition, errors, inputs, parameters

from qbench.attention import kernels, reference
from qbench.attention.kernels import forward, ops
from qbench.attention.kernels.common import Launch
from qbench.attention.normalizers import NORMALIZERS, register
from qbench.attention.normalizers.normalizer import Kernels
from qbench.attention.normalizers.scalable import S
from qbench.attention.normalizers.softmax import SoftmaxSink
from qbench.errors import UnavailableError


def case(table, index):
    return errors({"quick": QUICK, "whole": WHOLE}[table][index], by_kernels)


def sinks_and_scale():
    """A plug-in with both a learned sink and scores times s · log n."""
    kernels = Kernels(score_function="softmax", sink="learned", scaled=True)
    more = {"name": "sunk-scaled", "parameters": (*SoftmaxSink.parameters, S), "kernels": kernels}
    register(type("SunkScaled", (SoftmaxSink,), more)())
    return errors(Case(normalizer="sunk-scaled", slopes=True), by_kernels)


def no_max(normalizer, scores):
    """The fast bf16 forward pass, here in float32, and both its ways out: largest error."""
    of = Case(normalizer=normalizer, shape=(1, 2, 1, 70, 70, 16), scores=scores)
    query, key, value, _ = inputs(of)

    def launch(kernel, grid, numbers, constants):
        if kernel is forward.attn_fwd:
            constants |= {"NO_MAX": normalizer != "sigmoid", "PRECISE": False}
        return Launch(kernel, grid, numbers, constants)

    ops.Launch = launch
    ops.forward_launches.cache_clear()
    try:
        got = by_kernels(of, query, key, value, parameters(of))
    finally:
        ops.Launch = Launch
        ops.forward_launches.cache_clear()
    given = {name: tensor.double() for name, tensor in parameters(of).items()}
    wide = [tensor.double() for tensor in (query, key, value)]
    truth = reference.attention(*wide, normalizer=normalizer, parameters=given, causal=True)
    return float((got - truth).norm() / truth.norm())


def needs_expm1(tiny, edges):
    """The flags of three chunks of keys, from rows whose only positive score is that of their own
    key: 3e-6 in the rows ``tiny``, else 1."""
    length, width = 192, 16
    key = torch.randn(1, 1, length, width)
    scores = torch.ones(length)
    scores[tiny] = 3e-6
    query = key / key.square().sum(-1, keepdim=True) * (scores * width**0.5)[:, None]
    tensors = (query.expand(1, 2, length, width), key, torch.randn(1, 1, length, width))
    tensors = [tensor.half().transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    spans = None
    if edges:
        spans = torch.tensor([[0, a, b, a, b, 0] for a, b in edges], dtype=torch.int32)
    settings = ops.Settings("softpick", width**-0.5, 0.0, True, 0, length, length)
    steep = ops.Parameters(slopes=torch.full((2,), 4.0))
    return ops.forward(*tensors, None, spans, steep, settings)[2].tolist()[0][0]


def tiny_rows(rows):
    """How far gradients of values are off where all scores are tiny."""
    query, key, value, gradient = (torch.randn(1, 1, rows, 16).half() for _ in range(4))
    query *= 2.0**-18
    value.requires_grad_()
    output = kernels.attention(query, key, value, normalizer="softpick", causal=True)
    (got,) = torch.autograd.grad(output, value, gradient)
    wide = value.detach().double().requires_grad_()
    truth = reference.attention(
        query.double(), key.double(), wide, normalizer="softpick", causal=True
    )
    (expected,) = torch.autograd.grad(truth, wide, gradient.double())
    return float((got - expected).norm() / expected.norm())


def after_shared_tensors(normalizer):
    """How far attention(q, k, v) is off after attention(x, x, x) and (q, x, x) of the layout."""
    of = Case(normalizer=normalizer, shape=(1, 1, 1, 70, 70, 16))
    query, key, value, other = inputs(of)
    for tensors in ((other, other, other), (query, other, other), (query, key, other)):
        by_kernels(of, *tensors, {})
    wide = [tensor.double() for tensor in (query, key, value)]
    truth = definition(of, *wide, {})
    return float((by_kernels(of, query, key, value, {}) - truth).norm() / truth.norm())


def extreme_sinks(sinks):
    of = Case(normalizer="softmax-sink", shape=(1, 2, 2, 5, 5, 16))
    given = {"sinks": torch.tensor(sinks)}
    query, key, value, _ = inputs(of)
    got = by_kernels(of, query, key, value, given)
    truth = reference.attention(
        query, key, value, normalizer="softmax-sink", parameters=given, causal=True
    )
    return float((got - truth).norm() / truth.norm())


def refused(name):
    """What is said of a normalizer whose kernels name a score function that is not there, and
    whether its formulas compile behind the host's back."""
    claims = Kernels(score_function=name)
    register(type("Claims", (SoftmaxSink,), {"name": name, "parameters": (), "kernels": claims})())
    query = torch.randn(1, 1, 20, 16)
    try:
        kernels.attention(query, query, query, normalizer=name)
    except UnavailableError as error:
        said = str(error)
    settings = ops.Settings(name, 0.25, 0.0, True, 0, 65, 65)
    kernels.SCORE_FUNCTIONS += (name,)
    try:
        ops.forward(query, query, query, None, None, ops.Parameters(), settings)
    except Exception as error:  # the interpreter wraps what it meets in an error of its own
        return [said, f"{error} {error.__cause__}"]
    return [said, "it ran"]


def model():
    """A model on the kernels beside what it gives on the reference, padded on both sides, and a
    decode step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from qbench.attention.transformers import attend

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
    found, ran = [], []
    for implementation in ("reference", "triton"):
        ran.append(attend(built, normalizer="softpick", implementation=implementation))
        with torch.no_grad():
            out = built(ids, attention_mask=padding, position_ids=positions, use_cache=True)
            step = built(
                ids[:, :1], past_key_values=out.past_key_values, position_ids=positions[:, -1:] + 1,
                attention_mask=torch.cat([padding, padding[:, :1] | 1], 1),
            )  # fmt: skip
        found.append(torch.cat([out.logits[padding.bool()], step.logits[:, 0]]))
    return [ran, float((found[1] - found[0]).norm() / found[0].norm())]


def compiled_model(padding, positions):
    """A model that was given its attention by plain set_attn_implementation: its logits where there
    are tokens, and a gradient, compiled and not, beside those of the reference: largest error."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import qbench.attention.transformers  # noqa: F401 (makes the names known)

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, vocab_size=31, initializer_range=0.3,
    )  # fmt: skip
    built = LlamaForCausalLM(config)
    ids = torch.randint(0, 31, (2, 9))
    given = {"use_cache": False}
    tokens = torch.ones(2, 9, dtype=torch.bool)
    if padding:
        given["attention_mask"] = torch.tensor(padding)
        tokens = given["attention_mask"].bool()
    if positions:
        given["position_ids"] = torch.tensor(positions)
    found = []
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    for name, compiled in (("reference", False), ("triton", False), ("triton", True)):
        built.set_attn_implementation(f"qbench-softpick-{name}")
        built.zero_grad()
        torch._dynamo.reset()
        run = torch.compile(built, fullgraph=True, backend="aot_eager") if compiled else built
        logits = run(ids, **given).logits[tokens]
        logits.square().sum().backward()
        found.append(torch.cat([logits.flatten(), built.model.embed_tokens.weight.grad.flatten()]))
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return max(float((one - found[0]).norm() / found[0].norm()) for one in found[1:])


def operator(normalizer):
    """What torch.compile sees: the operator as torch checks one, and whether its gradients, those
    of every parameter too, are as without the dispatcher."""
    of = Case(normalizer=normalizer, shape=(1, 2, 1, 9, 9, 16), slopes=True)
    *tensors, gradient = inputs(of)
    given = parameters(of)
    sources = [tensor.requires_grad_() for tensor in (*tensors, *given.values())]
    settings = ops.Settings(normalizer, 0.25, 2.0, True, 0, 9, 9)
    arguments = (*tensors, None, None, None, *ops.Parameters(**given), *settings)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.qbench.attention.default, arguments, test_utils=checks)
    direct = ops.apply(*arguments[:6], ops.Parameters(**given), settings)
    outputs = (direct, ops.attention(*arguments)[0])
    found, expected = (torch.autograd.grad(out, sources, gradient) for out in outputs)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def kv_cache_device():
    """Where the kernel of the KV cache is launched, for keys and values on a device."""
    from types import SimpleNamespace

    from qbench.attention import kv_cache

    asked, real = [], ops.on_device
    ops.on_device = lambda device: (asked.append(str(device)), real(device))[1]
    query = torch.randn(1, 1, 20, 16)
    kv_cache.kernel_attention(
        query, kv_cache.Sources(query, query, query, query), positions=torch.arange(20)[None],
        cache=SimpleNamespace(keep_first=0, keep_recent=4, key_group=1), normalizer="softmax",
    )  # fmt: skip
    ops.on_device = real
    return asked


def kv_cache(group):
    import kv_cache_interpreted

    return list(getattr(kv_cache_interpreted, group)())


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert set(NORMALIZERS) >= {one.normalizer for one in QUICK}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        torch.manual_seed(0)
        print("answer", json.dumps(globals()[name](*arguments)), flush=True)
