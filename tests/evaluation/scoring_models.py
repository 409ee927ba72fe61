"""A tiny random Llama, a byte-level tokenizer trained here, and requests of every kind."""

import copy
import functools
import random

import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qbench.attention.transformers import set_attention
from qbench.evaluation import evaluate as of_tasks
from qbench.evaluation.kl_observer import BaselineHiddenStates, BaselineWriter
from qbench.evaluation.scoring import language_model
from qbench.evaluation.settings import ScoringSettings

TEXT = (
    "the cat sat on a mat while seven unbelievable researchers were measuring attention sinks in "
    "quantized language models and nobody answered their question about photosynthesis because "
    "electricity flows through copper wires when magnets rotate inside generators"
)
WORDS = TEXT.split()


@functools.cache
def tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 entries; with ``bos`` it can put <s> before a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([text(seed, 60) for seed in range(40)], trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def text(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def llama(
    seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa", heads: int = 3
) -> LlamaForCausalLM:
    """Random weights, large enough that every layer changes the answer."""
    return copy.deepcopy(_llama(seed, dtype, attention, heads))


@functools.cache
def _llama(seed: int, dtype: torch.dtype, attention: str, heads: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32 * heads,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        initializer_range=0.15,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def choices(documents: int, seed: int = 0, task: str = "choices") -> list[Instance]:
    """Multiple choice: 2 to 5 continuations a context, lengths as they come."""
    draw = random.Random(seed)
    requests = []
    for document in range(documents):
        context = f"Question: {text(seed + document, draw.randrange(3, 40))}\nAnswer:"
        for idx in range(draw.randrange(2, 6)):
            ending = " " + text(1000 + seed + 7 * document + idx, draw.randrange(1, 7))
            requests.append(instance(context, ending, document, idx, task))
    return requests


def request(kind: str, arguments: tuple, document: int, idx: int, task: str) -> Instance:
    return Instance(
        request_type=kind, doc={}, arguments=arguments, idx=idx, metadata=(task, document, 1)
    )


def instance(context: str, ending: str, document: int = 0, idx: int = 0, task: str = "t"):
    return request("loglikelihood", (context, ending), document, idx, task)


def prompt(text: str, document: int = 0, **kwargs) -> Instance:
    """What asks for an answer of four tokens in a line, or as ``kwargs`` say."""
    kwargs = {"until": ["\n"], "max_gen_toks": 4} | kwargs
    return request("generate_until", (text, kwargs), document, 0, "generation")


def pages(words: tuple[int, ...], seed: int = 0) -> list[Instance]:
    texts = [text(seed + i, n) if n else "" for i, n in enumerate(words)]
    return [
        request("loglikelihood_rolling", (page,), i, 0, "pages") for i, page in enumerate(texts)
    ]


def scorer(model, mode, *, bos=False, progress=None, observer=None, samples=None, **changes):
    """A language model in ``mode``; ``changes`` are settings other than these small ones. ``bos``
    None: as the tokenizer does, which adds it. Packs need our attention, so a model that
    attends by torch's is given it."""
    packed = mode == "fast" and changes.get("packed", True)
    if packed and model.config._attn_implementation == "sdpa":
        set_attention(model, normalizer="softmax", implementation="reference")
    return language_model(
        model, tokenizer(bos is not False), settings(mode, add_bos=bos, **changes),
        progress=progress, observer=observer, samples=samples or {},
    )  # fmt: skip


def settings(mode, *, max_length=64, batch_size=4, batch_tokens=300, sample=8, **changes):
    fast = {"batch_tokens": batch_tokens, "sample": sample} if mode == "fast" else {}
    changes = {"window_batch_size": batch_size, **fast, **changes}
    return ScoringSettings(mode=mode, max_length=max_length, batch_size=batch_size, **changes)


def watch(model, observer, requests, mode="exact", **changes):
    return ask(scorer(model, mode, max_length=96, observer=observer, sample=2, **changes), requests)


def ask(lm, requests):
    return getattr(lm, requests[0].request_type)(requests, disable_tqdm=True)


def evaluate(model, task, chosen) -> of_tasks.Outcomes:
    """Scores and tables of one task."""
    of_tasks.ask(model, task, of_tasks.prepare(model, task, chosen))()
    return of_tasks.judge(task, chosen)


def recorded(model, requests, mode="exact") -> BaselineHiddenStates:
    writer = BaselineWriter()
    watch(model, writer, requests, mode)
    return writer.hidden_states()


ENDINGS = " yes", " no", " measuring", " electricity flows"
KINDS: dict[str, list[Instance]] = {
    "multiple choice": choices(17),
    "one-token continuations": [
        instance(text(i, 9), f" {word}", i, k)
        for i in range(5)
        for k, word in enumerate(("the", "cat", "on"))
    ],
    "empty context": [instance("", ending, i) for i, ending in enumerate(ENDINGS)]
    + [instance("", "<s> the cat", 9)],
    "identical requests": [instance(text(3, 8), " the cat sat", 0, k) for k in range(4)],
    "join inside a token": [
        instance("nobody answer", "ed their question about photosynthesis", 0, 0),
        instance("nobody answ", "ered their question about photosynthesis", 0, 1),
        instance("nobod", "y answered because magnets rotate inside a mat", 1, 0),
    ],
    "trailing spaces": [
        instance("the cat sat on  ", "a mat", 0),
        instance("nobody ", "answered", 1),
    ],
    "one input split in two places": [
        instance("the cat sat", " on a mat while", 0, 0),
        instance("the cat sat on a mat", " while", 0, 1),
        instance("the cat sat on", " a mat while", 0, 2),
        instance("the cat sat on a mat", " in", 0, 3),
    ],
    "context longer than max_length": [instance(text(i, 90), " the cat", i) for i in range(3)]
    + [instance("a", " the", 3)],
    "examples before each question": [
        instance(text(0, 9) + "\n" + text(1, 5) + "\n" + context, f" the {word}", i, k)
        for i, context in enumerate(("nobody", "the cat", "the mat"))
        for k, word in enumerate(("cat", "mat sat", "cat on"))
    ],
    "a single request": [instance("a", " the", 0)],
}
