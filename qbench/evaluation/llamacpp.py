"""Run a GGUF file by llama.cpp, and score with it.

Token ids come from the original's tokenizer, so that nothing is lost on the way: llama.cpp gives
full logits of the very tokens that the unquantized model scores. Requests run one after another;
what a request has in common with the one before is kept in llama.cpp's KV cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from qbench.errors import CheckpointError, EvaluationError, UnavailableError
from qbench.evaluation.llama_library import (
    FLASH_ATTN_DISABLED,
    GGML_TYPE_F32,
    LOG_LEVEL_ERROR,
    VERSION,
    LogCallback,
    load_library,
)
from qbench.evaluation.scoring.generate import Prompt, add_noise, generate
from qbench.evaluation.scoring.hflm import pinned_hflm, report
from qbench.evaluation.scoring.hidden_states import LMHead
from qbench.evaluation.scoring.logits import (
    LogitsPart,
    LogLikelihood,
    Observer,
    Projection,
)
from qbench.evaluation.scoring.requests import Request, Scored
from qbench.evaluation.scoring.scorer import Counts, Scorer
from qbench.evaluation.settings import ScoringSettings
from qbench.progress import Advance
from qbench.records import ScoringReport

BATCH = 512  # tokens of one call of llama.cpp, whose logits are in memory at once
MIXED_TOLERANCE = 0.2  # relative, of logits: llama.cpp rounds inputs of products to 8 bits


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, which computes on the CPU.

    ``context``: the most tokens of a request. ``shell``: the original's transformers model without
    weights, from which lm-eval takes settings.
    """

    def __init__(self, path: Path, *, context: int, shell: Any) -> None:
        self._library = library = load_library()
        self.shell = shell
        _silence(library)
        library.llama_backend_init()
        model_settings = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(path).encode(), model_settings)
        if not self._model:
            why = f" ({_errors[0]})" if _errors else ""
            raise UnavailableError(f"{path}: llama.cpp of xllamacpp {VERSION} cannot load it{why}")
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, BATCH, BATCH
        # as unquantized keys and values are elsewhere; float16 is its default
        settings.type_k = settings.type_v = GGML_TYPE_F32
        settings.flash_attn_type = FLASH_ATTN_DISABLED
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise UnavailableError(f"{path}: llama.cpp cannot take a context of {context} tokens")
        vocabulary = library.llama_model_get_vocab(self._model)
        self.vocabulary = int(library.llama_vocab_n_tokens(vocabulary))
        expected = shell.config.get_text_config().vocab_size
        if self.vocabulary != expected:
            raise CheckpointError(
                f"{path}: {self.vocabulary} tokens, and the original has {expected}: it is not a "
                "copy of it"
            )
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        weakref.finalize(self, _free, library, self._batch, self._context, self._model)
        self._kept: list[int] = []  # tokens whose keys and values are in the cache

    def scorer(self, tokenizer: Any, settings: ScoringSettings, **observed: Any) -> LlamaCppScorer:
        """Return an lm-eval language model over this model."""
        return LlamaCppScorer(self, tokenizer, settings, **observed)

    def logits(self, tokens: Sequence[int], first: int) -> Iterator[Tensor]:
        """Yield the logits after each of ``tokens`` from index ``first`` on, in parts float32
        [n, vocabulary]; a part is overwritten by the next one."""
        reused = 0
        for ours, theirs in zip(self._kept, tokens, strict=False):
            if ours != theirs or reused == first:
                break
            reused += 1
        memory = self._library.llama_get_memory(self._context)
        if not self._library.llama_memory_seq_rm(memory, -1, reused, -1):
            self._library.llama_memory_clear(memory, True)  # of layers that keep a state alone
            reused = 0
        self._kept = list(tokens[:reused])
        for start in range(reused, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self._decode(part, start, first)
            self._kept += part
            if (rows := len(part) - max(0, first - start)) > 0:
                yield self._rows(rows)

    def _decode(self, part: Sequence[int], start: int, first: int) -> None:
        batch = self._batch
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = start + i >= first
        if code := self._library.llama_decode(self._context, batch):
            self._kept = []
            raise EvaluationError(f"llama.cpp failed on {start + len(part)} tokens (code {code})")

    def _rows(self, count: int) -> Tensor:
        logits = self._library.llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(logits, shape=(count, self.vocabulary)))

    def decode(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        *,
        finished: Callable[[int, list[int]], bool] | None = None,
        longest: int | None = None,
        progress: Advance | None = None,
    ) -> list[list[int]]:
        """Return each prompt's new token ids; arguments as in ``scoring.generate.decode``."""
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
        """Return a line if llama.cpp's logits differ from those of ``dequantized``, a transformers
        model with the file's weights; else an empty list."""
        with torch.no_grad():
            expected = dequantized(input_ids=probe, use_cache=False).logits.float().cpu()
        logits = torch.stack(
            [torch.cat([p.clone() for p in self.logits(row, 0)]) for row in probe.tolist()]
        )
        off = float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        if off <= MIXED_TOLERANCE:
            return []
        return [
            f"llama.cpp's logits lie {off:.2g} of their size off those of the file's own weights: "
            "it computes another model than the original's class, or its converter reordered "
            "weights in a way that qbench does not undo"
        ]


def _free(library: Any, batch: Any, context: Any, model: Any) -> None:
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)


def _silence(library: Any) -> None:
    """llama.cpp prints hundreds of lines for each file: errors are kept, of the last file."""
    global _logger

    def keep(level: int, text: bytes, data: Any) -> None:
        if level == LOG_LEVEL_ERROR:
            _errors.append(text.decode(errors="replace").strip())

    _errors.clear()
    _logger = LogCallback(keep)
    library.llama_log_set(_logger, None)


_logger: Any = None  # kept: the library holds its address alone
_errors: list[str] = []


class LlamaCppScorer(Scorer):
    """An lm-eval language model over llama.cpp: log-likelihoods, rolling windows, greedy answers,
    and full logits for an observer."""

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
        self._rolling = {}
        self._differences, self._exact_tasks, self._generated = [], {}, {}

    def report(self) -> ScoringReport:
        batching = "llama.cpp, one after another"
        return report(
            self.settings,
            self.hflm,
            rolling=self._rolling,
            batching=batching,
            **asdict(self._counts),
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return generate(
            self.hflm, requests,
            progress=self._progress, counts=self._counts, runtime=self.model.decode,
        )  # fmt: skip

    def answer(self, prompts: Sequence[Prompt], ends: Collection[int]) -> list[list[int]]:
        return self.model.decode(
            None, prompts, finished=lambda _, tokens: tokens[-1] in ends,
            longest=self.settings.max_length, progress=self._progress,
        )  # fmt: skip

    def _score(
        self,
        backend: Any,
        requests: Sequence[Request],
        windows: bool,
        counts: Counts,
        observer: Observer | None = None,
    ) -> list[LogLikelihood]:
        answers = []
        for number, request in enumerate(requests):
            answers.append(self._answer(request, observer))
            counts.batches += 1
            counts.tokens += len(request.tokens) - 1
            if self._progress is not None:
                self._progress(number + 1, len(requests))
        return answers

    def _answer(self, request: Request, observer: Observer | None) -> LogLikelihood:
        inputs = request.inputs(self.settings.max_length)
        targets = torch.tensor(request.tokens[-request.scored :])
        total, greedy, done = 0.0, True, 0
        for logits in self.model.logits(inputs, len(inputs) - request.scored):
            count = len(logits)
            target_ids = targets[done : done + count]
            log_probabilities = functional.log_softmax(logits, dim=-1)
            picked = log_probabilities.gather(1, target_ids[:, None])[:, 0]
            total += float(picked.double().sum())
            greedy &= bool((log_probabilities.argmax(-1) == target_ids).all())
            if observer is not None:
                rows = np.arange(count)
                scored = Scored(rows, request.first + done + rows, target_ids.numpy())
                watch = observer.batch(scored, logits[:, :0], Projection())
                if watch is not None:
                    watch(LogitsPart(0, count, logits, log_probabilities))
            done += count
        assert done == request.scored
        return total, greedy
