"""Let a model answer prompts, and read the unquantized model's answers (*trajectories*).

The unquantized cell generates answers, then reads them in packs, so that hidden states are kept of
every answered token as of any task's scored tokens (``kl_observer``). Quantized cells read the same
tokens, which are stored with those hidden states, and generate answers of their own.
A published copy uses the chat template and the end tokens of its own files.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qbench.errors import EvaluationError, first_line
from qbench.evaluation.evaluate import Outcomes, build_requests, response_table, text_response
from qbench.evaluation.scoring.batching import encode_texts, to_requests
from qbench.evaluation.scoring.generate import Prompt
from qbench.metrics import LOG_MEAN, variance_name
from qbench.records import ANSWER_COLUMNS, ANSWERS, OUTCOME_COLUMNS, PROMPT, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qbench.evaluation.evaluate import LoadedTask
    from qbench.evaluation.kl_observer import TaskHiddenStates
    from qbench.evaluation.settings import ScoringSettings

NGRAM = 8  # tokens: a stretch of that length that comes again is a repetition
# Metric → whether more is better, and how documents become the score.
METRICS = {
    "exact_match": (True, "mean"),
    "stops": (True, "mean"),
    "repeats": (False, "mean"),
    "length": (False, LOG_MEAN),
    "kl": (False, LOG_MEAN),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPrompt:
    """Hold the prompt of one answer: number of the ``document`` and of the ``sample``, the prompt
    as ``text`` and token ``ids``, and the right answer ``target``, "" if there is none."""

    document: int
    sample: int
    text: str
    ids: list[int]
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Hold ``scored``, the outcomes of the answers that a cell generated, and the trajectories: the
    token ids of all in one array ``tokens``, with ``lengths`` tokens per prompt."""

    scored: Outcomes
    prompts: list[AnswerPrompt]
    tokens: np.ndarray
    lengths: Sequence[int]

    def table(
        self, divergences: pd.DataFrame | None, texts_of: Callable[[np.ndarray], list[str]]
    ) -> pd.DataFrame:
        """Return a table with the columns ``ANSWER_COLUMNS``: the prompt's row and one per token of
        each answer. ``divergences`` are those of the ``KLObserver``; None if nothing was measured
        (numbers are then NaN). ``texts_of`` gives the texts of token ids [N]."""
        measured = {} if divergences is None else divergences
        starts = np.cumsum([0, *self.lengths])
        parts = []
        for prompt, start, end in zip(self.prompts, starts, starts[1:], strict=False):
            part = pd.DataFrame({"text": [prompt.text, *texts_of(self.tokens[start:end])]})
            part["document"], part["sample"] = prompt.document, prompt.sample
            part["position"] = np.arange(PROMPT, end - start)
            for name in ("kl", "change", "margin", "agrees"):
                values = np.full(len(part), np.nan, dtype=np.float32)
                if name in measured:
                    values[1:] = measured[name].to_numpy()[start:end]
                part[name] = values
            parts.append(part)
        together = pd.concat(parts, ignore_index=True)[list(ANSWER_COLUMNS)]
        coarse = {name: together[name].astype("float16") for name in ("change", "margin")}
        return together.assign(**coarse).astype(dict.fromkeys(coarse, "float32"))


def answer(
    scorer: Any,
    task: LoadedTask,
    settings: ScoringSettings,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    *,
    base: TaskHiddenStates | None,
    read: bool,
) -> Answered:
    """Generate an answer to each prompt of ``task``, up to one of the token ids ``ends`` or
    ``max_new_tokens``. Return their outcomes and the trajectories: the answers of ``base``, hidden
    states of the unquantized cell; if it is None, those just generated. With ``read`` the
    trajectories are also scored, so that the scorer's observer sees them. ``tokenizer`` has the
    chat template; without one, prompts are continued as plain text.

    Raises EvaluationError if a prompt cannot be rendered or is too long.
    """
    assert task.answers is not None
    limit, temperature = task.answers.max_new_tokens, task.answers.temperature
    prompts = _ask(scorer, task, settings, tokenizer)
    requests = []
    for prompt in prompts:
        if len(prompt.ids) + limit > settings.max_length:
            raise EvaluationError(
                f"{ANSWERS}: {task.location(prompt.document)}: the prompt has {len(prompt.ids)} "
                f"tokens, which leaves no room for an answer of {limit} in evaluation.max_length "
                f"{settings.max_length}; lower answers.max_new_tokens, or shorten the prompt"
            )
        seed = np.random.SeedSequence([settings.seed, prompt.document, prompt.sample])
        seed = int(seed.generate_state(1)[0])
        requests.append(Prompt(ids=prompt.ids, limit=limit, temperature=temperature, seed=seed))
    generated = scorer.answer(requests, ends)
    trajectories = generated
    if base is not None:
        assert base.lengths is not None, "files of answers have them"
        starts = np.cumsum(base.lengths.numpy())[:-1]
        trajectories = [part.tolist() for part in np.split(base.token.numpy(), starts)]
    if read:
        read_answers(scorer, prompts, trajectories)
    lengths = [len(tokens) for tokens in trajectories]
    tokens = np.array([token for part in trajectories for token in part])
    followed = None if base is None else trajectories
    scored = _scored(task, prompts, generated, followed, tokenizer, ends)
    return Answered(scored=scored, prompts=prompts, tokens=tokens, lengths=lengths)


def _ask(
    scorer: Any, task: LoadedTask, settings: ScoringSettings, tokenizer: PreTrainedTokenizerBase
) -> list[AnswerPrompt]:
    """Return a prompt per document and sample, rendered by the chat template and encoded."""
    assert task.answers is not None
    if task.answers.from_task:
        build_requests(task.task, replace(settings, chat=None))
        firsts: dict[int, str] = {}
        for instance in task.task.instances:
            firsts.setdefault(instance.doc_id, instance.args[0])
        conversations = {
            document: ([{"role": "user", "content": text}], "") for document, text in firsts.items()
        }
    else:
        documents = itertools.islice(task.task.eval_docs, settings.limit)
        conversations = {
            number: (json.loads(row["messages"]), row["target"])
            for number, row in enumerate(documents)
        }
    prompts = []
    for document, (messages, target) in conversations.items():
        if settings.chat and settings.chat.system_instruction and messages[0]["role"] != "system":
            system = {"role": "system", "content": settings.chat.system_instruction}
            messages = [system, *messages]
        if tokenizer.chat_template:
            try:
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # whatever a template raises
                raise EvaluationError(
                    f"{ANSWERS}: {task.location(document)}: the chat template cannot render this "
                    f"prompt: {first_line(error)}; correct the template, or leave the prompt out"
                ) from error
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:  # the messages' texts, to be continued
            text = "\n\n".join(message["content"] for message in messages)
            prefix_id = scorer.hflm.prefix_token_id
            (ids,) = encode_texts(tokenizer, [text], add_bos=settings.add_bos, prefix_id=prefix_id)
        prompts += [
            AnswerPrompt(document=document, sample=sample, text=text, ids=ids, target=target)
            for sample in range(task.answers.samples)
        ]
    return prompts


def read_answers(
    scorer: Any, prompts: Sequence[AnswerPrompt], trajectories: Sequence[list[int]]
) -> None:
    """Score ``trajectories``, the token ids of the answer to each of ``prompts``, so that the
    scorer's observer sees every token. Nothing is returned."""
    pairs = zip(prompts, trajectories, strict=True)
    requests = to_requests((prompt.ids, tokens, i) for i, (prompt, tokens) in enumerate(pairs))
    instances = [
        SimpleNamespace(task_name=ANSWERS, doc_id=prompt.document, idx=prompt.sample)
        for prompt in prompts
    ]
    scorer.read(instances, requests)()


def _scored(
    task: LoadedTask,
    prompts: Sequence[AnswerPrompt],
    generated: Sequence[list[int]],
    trajectories: Sequence[list[int]] | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
) -> Outcomes:
    """Return the outcomes of the ``generated`` answers: per prompt the mean over its samples, and
    the variance of that mean if there are several."""
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    rows = []
    for index, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        rows.append(text_response(ANSWERS, prompt.document, prompt.sample, None, text))
        count = len(tokens) - NGRAM + 1
        stretches = {tuple(tokens[i : i + NGRAM]) for i in range(count)}
        metrics = {
            "stops": float(tokens[-1] in ends),
            "repeats": (1 - len(stretches) / count if count > 0 else 0.0),
            "length": float(len(tokens)),
        }
        if prompt.target:
            metrics = {"exact_match": float(_plain(text) == _plain(prompt.target)), **metrics}
        if trajectories is not None:
            both = [tokens, trajectories[index]]
            metrics["agreed_tokens"] = float(len(commonprefix(both)))  # noqa: RUF071  of lists
        for metric, value in metrics.items():
            values[metric, prompt.document].append(value)
    outcomes = []
    for (metric, document), samples in values.items():
        outcomes.append((ANSWERS, document, metric, float(np.mean(samples)), 1.0))
        if len(samples) > 1:
            variance = float(np.var(samples, ddof=1)) / len(samples)
            outcomes.append((ANSWERS, document, variance_name(metric), variance, 1.0))
    table = pd.DataFrame(outcomes, columns=list(OUTCOME_COLUMNS)).astype({"document": "int64"})
    scores, responses = _scores(table, task.label), response_table(rows)
    return Outcomes(outcomes=table, responses=responses, scores=scores)


def with_kl(scored: Outcomes, divergences: pd.DataFrame, label: str) -> Outcomes:
    """Return ``scored`` with the metric ``kl`` added: per prompt the mean over tokens of
    ``divergences``, a table of ``KLObserver``, and the variance of that mean if several answers are
    drawn. ``label``: the task's, for the scores."""
    samples = divergences.groupby(["document", "request"])["kl"].mean()
    prompts = divergences.groupby("document")["kl"].mean()
    spread = samples.groupby("document").sem() ** 2
    parts = {"kl": prompts, variance_name("kl"): spread.dropna()}
    rows = [
        (ANSWERS, document, metric, float(value), 1.0)
        for metric, values in parts.items()
        for document, value in values.items()
    ]
    added = pd.DataFrame(rows, columns=list(OUTCOME_COLUMNS))
    table = pd.concat([scored.outcomes, added], ignore_index=True)
    return replace(scored, outcomes=table, scores=_scores(table, label))


def _scores(outcomes: pd.DataFrame, label: str) -> tuple[Score, ...]:
    """Return the scores of answers: the mean of each metric over prompts."""
    return tuple(
        Score(
            task=ANSWERS,
            label=label,
            metric=metric,
            value=float(column.mean()),
            stderr=float(column.sem()) if len(column) > 1 else None,
            higher_is_better=higher,
            aggregation=aggregation,
            documents=len(column),
        )
        for metric, (higher, aggregation) in METRICS.items()
        if len(column := outcomes["value"][outcomes["metric"] == metric])
    )


def _plain(text: str) -> str:
    """Return ``text`` in lower case, without blanks and punctuation at its ends."""
    return re.sub(r"^\W+|\W+$", "", text.lower())
