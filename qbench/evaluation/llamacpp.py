"""Run a GGUF file by llama.cpp, and score with it.

Token ids come from the original's tokenizer, so that nothing is lost on the way: llama.cpp gives
full logits of the very tokens that the unquantized model scores. Requests run one after another;
what a request has in common with the one before is kept in llama.cpp's KV cache.

The wheel of ``xllamacpp`` exports llama.cpp's C interface. The structures below are those of this
very build (llama.h of b11549), so its version is pinned: another build lays them out differently.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from importlib import metadata, util
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from torch import Tensor
from torch.nn import functional

from qbench.errors import CheckpointError, EvaluationError, UnavailableError, first_line
from qbench.evaluation.scoring.batching import Scored
from qbench.evaluation.scoring.forward import (
    LMHead,
    LogitsPart,
    LogLikelihood,
    Observer,
    Projection,
)
from qbench.evaluation.scoring.generate import Prompt, add_noise, generate
from qbench.evaluation.scoring.scorer import Counts, Scorer, Work, pinned_hflm
from qbench.evaluation.settings import ScoringSettings
from qbench.progress import Advance
from qbench.records import ScoringReport

VERSION = "2026.10.11549"
INSTALL = "pip install -e '.[llamacpp]'"
GGML_TYPE_F32 = 0
FLASH_ATTN_DISABLED = 0
LOG_LEVEL_ERROR = 4
LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class ModelParams(ctypes.Structure):
    """``struct llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
        ("split_mode", c_int32), ("load_mode", c_int32), ("lazy_mode", c_int32),
        ("main_gpu", c_int32), ("tensor_split", c_void_p), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p),
        ("vocab_only", c_bool), ("check_tensors", c_bool), ("use_extra_bufts", c_bool),
        ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    )  # fmt: skip


class ContextParams(ctypes.Structure):
    """``struct llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32), ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32), ("n_threads", c_int32), ("n_threads_batch", c_int32),
        ("ctx_type", c_int32), ("rope_scaling_type", c_int32), ("pooling_type", c_int32),
        ("attention_type", c_int32), ("flash_attn_type", c_int32), ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float), ("yarn_ext_factor", c_float), ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float), ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float), ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32), ("type_v", c_int32), ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("embeddings", c_bool),
        ("offload_kqv", c_bool), ("no_perf", c_bool), ("op_offload", c_bool), ("swa_full", c_bool),
        ("kv_unified", c_bool), ("samplers", c_void_p), ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )  # fmt: skip


class Batch(ctypes.Structure):
    """``struct llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)), ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(ctypes.c_int8)),
    )  # fmt: skip


SIGNATURES = {  # result, then arguments
    "llama_backend_init": (None,),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_free": (None, c_void_p),
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, Batch),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_log_set": (None, LogCallback, c_void_p),
    "ggml_quantize_chunk": (
        c_size_t, ctypes.c_int, c_void_p, c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
        c_void_p,
    ),
}  # fmt: skip


@functools.cache
def load_library() -> Any:
    """Return llama.cpp's library, a ``ctypes.CDLL`` whose functions have types. Raises
    UnavailableError if the wheel is missing or of another version."""
    package = util.find_spec("xllamacpp")
    if package is None or package.origin is None:
        raise UnavailableError(f"llama.cpp's package xllamacpp is not installed: {INSTALL}")
    if (installed := metadata.version("xllamacpp")) != VERSION:
        raise UnavailableError(
            f"xllamacpp {installed} is installed, but qbench needs exactly {VERSION} ({INSTALL})"
        )
    (path,) = Path(package.origin).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


BATCH = 512  # tokens of one call of llama.cpp, whose logits are in memory at once
MIXED_TOLERANCE = 0.2  # relative, of logits: llama.cpp rounds inputs of products to 8 bits


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, which computes on the CPU. ``context``: the most tokens of a
    request. ``shell``: the original's transformers model without weights, from which lm-eval takes
    settings. Raises UnavailableError if llama.cpp cannot load the file, CheckpointError if its
    vocabulary is not the original's."""

    def __init__(self, path: Path, *, context: int, shell: Any) -> None:
        self._library = library = load_library()
        self.shell = shell
        _silence(library)
        library.llama_backend_init()
        model_settings = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(path).encode(), model_settings)
        if not self._model:
            why = f" ({_errors[0]})" if _errors else ""
            raise UnavailableError(
                f"{path}: llama.cpp of xllamacpp {VERSION} cannot load it{why}; make the file again"
            )
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, BATCH, BATCH
        # as unquantized keys and values are elsewhere; float16 is its default
        settings.type_k = settings.type_v = GGML_TYPE_F32
        settings.flash_attn_type = FLASH_ATTN_DISABLED
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise UnavailableError(
                f"{path}: llama.cpp refuses a context of {context} tokens; lower "
                "evaluation.max_length"
            )
        vocabulary = library.llama_model_get_vocab(self._model)
        self.vocabulary = int(library.llama_vocab_n_tokens(vocabulary))
        expected = shell.config.get_text_config().vocab_size
        if self.vocabulary != expected:
            raise CheckpointError(
                f"{path}: the file has {self.vocabulary} tokens and the original {expected}: it is "
                "no copy of this model; name the model that it was made from under checkpoints"
            )
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        weakref.finalize(self, _free, library, self._batch, self._context, self._model)
        self._kept: list[int] = []  # tokens whose keys and values are in the cache

    def scorer(self, tokenizer: Any, settings: ScoringSettings, **observed: Any) -> LlamaCppScorer:
        """Return an lm-eval language model over this model. ``observed``: ``progress`` and
        ``observer`` of LlamaCppScorer."""
        return LlamaCppScorer(self, tokenizer, settings, **observed)

    def logits(self, tokens: Sequence[int], first: int) -> Iterator[Tensor]:
        """Yield the logits after each of ``tokens`` from index ``first`` on, in parts float32 [n,
        vocabulary]; a part is overwritten by the next one. The beginning shared with the last call
        is not computed again. Raises EvaluationError if llama.cpp fails."""
        reused = 0
        for ours, theirs in zip(self._kept, tokens, strict=False):
            if ours != theirs or reused == first:
                break
            reused += 1
        memory = self._library.llama_get_memory(self._context)
        if not self._library.llama_memory_seq_rm(memory, -1, reused, -1):
            self._library.llama_memory_clear(memory, True)  # for layers that keep only a state
            reused = 0
        self._kept = list(tokens[:reused])
        for start in range(reused, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, start + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = start + i >= first
            if code := self._library.llama_decode(self._context, batch):
                self._kept = []
                tokens_read = start + len(part)
                raise EvaluationError(
                    f"llama.cpp failed on {tokens_read} tokens (code {code}); if memory is short, "
                    "lower evaluation.max_length"
                )
            self._kept += part
            if (rows := len(part) - max(0, first - start)) > 0:
                shape = (rows, self.vocabulary)
                array = self._library.llama_get_logits(self._context)
                yield torch.from_numpy(np.ctypeslib.as_array(array, shape=shape))

    def decode(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        *,
        finished: Callable[[int, list[int]], bool] | None = None,
        longest: int | None = None,
        progress: Advance | None = None,
    ) -> list[list[int]]:
        """Return each prompt's new token ids. Arguments are those of ``scoring.generate.decode``,
        but an answer also ends once prompt and answer have ``longest`` tokens."""
        answers: list[list[int]] = []
        for index, prompt in enumerate(prompts):
            tokens, answer = list(prompt.ids), []
            while len(answer) < prompt.limit and (longest is None or len(tokens) < longest):
                (last,) = self.logits(tokens, len(tokens) - 1)
                if prompt.temperature:
                    drawn = torch.tensor([prompt.seed]), torch.tensor([len(tokens) - 1])
                    last = add_noise(last[-1:], *drawn, torch.tensor([prompt.temperature]))
                answer.append(int(last[-1].argmax()))
                tokens.append(answer[-1])
                if finished is not None and finished(index, answer):
                    break
            answers.append(answer)
            if progress is not None:
                progress(index + 1, len(prompts))
        return answers

    def disagreement(self, dequantized: Any, probe: Tensor) -> list[str]:
        """Return a list with one line if llama.cpp's logits on token ids ``probe`` [B, T] differ
        from those of ``dequantized``, a transformers model with the file's weights; else an empty
        list. They differ if the median over tokens of their relative difference is above
        ``MIXED_TOLERANCE``."""
        with torch.no_grad():
            expected = dequantized(input_ids=probe, use_cache=False).logits.float().cpu()
        logits = torch.stack(
            [torch.cat([p.clone() for p in self.logits(row, 0)]) for row in probe.tolist()]
        )
        off = float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        if off <= MIXED_TOLERANCE:
            return []
        return [
            f"llama.cpp's logits differ by {off:.2g} of their size from those of the file's "
            "weights: it computes another model than the original's class, or its converter "
            "reordered weights in a way that qbench does not undo"
        ]


def _free(library: Any, batch: Any, context: Any, model: Any) -> None:
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)


def _silence(library: Any) -> None:
    """Discard what llama.cpp prints, but keep the last errors for messages."""
    global _logger

    def keep(level: int, text: bytes, data: Any) -> None:
        if level == LOG_LEVEL_ERROR:
            _errors.append(text.decode(errors="replace").strip())

    _errors.clear()
    _logger = LogCallback(keep)
    library.llama_log_set(_logger, None)


_logger: Any = None  # kept alive: the library holds only its address
_errors: list[str] = []


class LlamaCppScorer(Scorer):
    """An lm-eval language model over llama.cpp: log-likelihoods, rolling windows, greedy answers,
    and full logits for an observer."""

    _batching = MappingProxyType({"batching": "llama.cpp, one after another"})

    def __init__(
        self,
        model: LlamaCpp,
        tokenizer: Any,
        settings: ScoringSettings,
        *,
        progress: Advance | None = None,
        observer: Observer | None = None,
    ) -> None:
        super(Scorer, self).__init__()
        self.settings, self.model = settings, model
        self.hflm = pinned_hflm(model.shell, tokenizer, settings)
        self.head = LMHead(model.shell)  # for the baseline's logits: llama.cpp's are finished
        self.head.device = torch.device("cpu")
        self._progress, self._observer = progress, observer
        self._embedded, self._counts = model.vocabulary, Counts()
        self.fast = self.exact = None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to lm-eval's requests as texts, cut at their stop strings."""
        return generate(
            self.hflm, requests,
            progress=self._progress, counts=self._counts, runtime=self.model.decode,
        )  # fmt: skip

    def answer(self, prompts: Sequence[Prompt], ends: Collection[int]) -> list[list[int]]:
        """Return the token ids of the answer to each of ``prompts``, up to and with one of
        ``ends``, or up to its limit."""
        return self.model.decode(
            None, prompts, finished=lambda _, tokens: tokens[-1] in ends,
            longest=self.settings.max_length, progress=self._progress,
        )  # fmt: skip

    def _queue(self, work: Work) -> Callable[[], list[LogLikelihood]]:
        answers, requests, counts = [], work.requests, work.counts
        first = 0
        texts = np.split(requests.tokens, requests.starts[1:])
        for number, (ids, scored) in enumerate(zip(texts, requests.scored.tolist(), strict=True)):
            answers.append(self._answer(ids, scored, first, work.observer))
            first += scored
            counts.batches += 1
            counts.tokens += len(ids) - 1
            if work.progress is not None:
                work.progress(number + 1, len(requests))
        return lambda: answers

    def _answer(
        self, ids: np.ndarray, scored: int, first: int, observer: Observer | None
    ) -> LogLikelihood:
        """Return (log-likelihood in nats, whether greedy) of the last tokens of ``ids`` that are
        ``scored``; show the logits to the observer. ``first``: index of the first of these."""
        inputs = ids[-(self.settings.max_length + 1) : -1].tolist()
        targets = torch.tensor(ids[-scored:].tolist())
        total, greedy, done = 0.0, True, 0
        for logits in self.model.logits(inputs, len(inputs) - scored):
            count = len(logits)
            target_ids = targets[done : done + count]
            log_probabilities = functional.log_softmax(logits, dim=-1)
            picked = log_probabilities.gather(1, target_ids[:, None])[:, 0]
            total += float(picked.double().sum())
            greedy &= bool((log_probabilities.argmax(-1) == target_ids).all())
            if observer is not None:
                rows = np.arange(count)
                shown = Scored(rows, first + done + rows, target_ids.numpy())
                watch = observer.batch(observer.prepare(shown), logits[:, :0], Projection())
                if watch is not None:
                    watch(LogitsPart(0, count, logits, log_probabilities))
            done += count
        assert done == scored
        return total, greedy


# --- score a column that another runtime computes, through lm-eval's class for that runtime


def external_model(model: str, args: Mapping[str, Any]) -> LM:
    """Return an object of the class that lm-eval registers as ``model``, such as
    ``local-completions``, made with the arguments ``args``. Raises UnavailableError if it cannot be
    made."""
    try:
        return get_model(model).create_from_arg_obj(dict(args))
    except Exception as error:  # whatever its library, its server or its arguments say
        raise UnavailableError(
            f"lm-eval's {model} cannot be started: {first_line(error)}; correct its args in "
            "quantizers, install what it needs, or start its server"
        ) from error


class ExternalScorer(LM):
    """An lm-eval language model that hands requests to another runtime, lm-eval's ``model``."""

    def __init__(self, model: LM, settings: ScoringSettings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self._probed = False

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the runtime's log-likelihoods, after checking once that they are probabilities.
        Raises EvaluationError if they are not, or with the runtime's error."""
        if not self._probed:
            self._require_probabilities()
            self._probed = True
        return self._call("loglikelihood", requests)

    def _require_probabilities(self) -> None:
        """Raise EvaluationError if the runtime's log-likelihoods are not probabilities.

        Those of continuations that exclude each other must sum to at most 1. They do not if a
        server leaves out the generated token: lm-eval's classes then take the prompt's last one for
        it, and drop it. llama-cpp-python's server does.
        """
        instances = [
            Instance(request_type="loglikelihood", doc={}, arguments=("The", f" {letter}"), idx=i)
            for i, letter in enumerate(ascii_lowercase)
        ]
        answers = self._call("loglikelihood", instances)
        total = sum(math.exp(min(value, 1.0)) for value, _ in answers)
        if not total <= 1.01:  # servers round
            raise EvaluationError(
                f"{type(self.model).__name__}.loglikelihood: the probabilities of 26 continuations "
                f"that exclude each other sum to {total:.3g}: the server leaves tokens out of a "
                "prompt's log-probabilities, or lm-eval cannot read its format; score "
                "generate_until tasks only"
            )

    def _call(self, kind: str, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
        """Return the runtime's answers to ``requests``. Raises EvaluationError with its error."""
        try:
            return getattr(self.model, kind)(requests, disable_tqdm=True)
        except (Exception, SystemExit) as error:  # of the runtime, whatever it is
            raise EvaluationError(
                f"lm-eval's {type(self.model).__name__}.{kind} failed ({type(error).__name__}: "
                f"{first_line(error)}); see the log of its server, or lm-eval's documentation"
            ) from error

    loglikelihood_rolling = functools.partialmethod(_call, "loglikelihood_rolling")
    generate_until = functools.partialmethod(_call, "generate_until")

    def report(self, rolling: Iterable[str] = ()) -> ScoringReport:
        """Return a report that only says which class of lm-eval scored; its memory is unknown."""
        return ScoringReport(
            mode="lm-eval",
            softmax_dtype="its own",
            batching=f"by {type(self.model).__name__}",
            peak_memory_gib=0.0,
        )
