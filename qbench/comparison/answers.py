"""Compare answers: KL divergence along the unquantized model's, by position and class of token, and
how a cell's own answers differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qbench.records import ANSWERS, PROMPT

if TYPE_CHECKING:
    import pandas as pd

    from qbench.records import Record
    from qbench.store import Store

# Bins of tokens by position in the answer, which is counted from 1, and their first from 0
POSITIONS = {"1": 0, "2–16": 1, "17–64": 16, "65–256": 64, "257–": 256}
FEWEST_PROMPTS = 5  # that a class must occur in to be called the one that is hurt most
# Tokens of chat templates, as the usual tokenizers write them.
TEMPLATE = re.compile(
    r"<\|.*\|>|</?(s|eos|bos|pad|think|tool_call|tool_response|(start|end)_of_turn)>"
    r"|\[/?(INST|TOOL_CALLS|AVAILABLE_TOOLS)\]"
)
KEY = re.compile(r'"[^"\n]*"\s*:')  # of a JSON object
CODE = re.compile(r"```.*?(```|\Z)", re.DOTALL)
CLASSES = ("first token", "end", "template", "JSON", "code", "digits", "rest")


@dataclass(frozen=True, slots=True)
class TokenMeans:
    """Hold means over the tokens of a class or of a range of positions; ``prompts`` have any."""

    tokens: int
    prompts: int
    kl: float  # nats per token
    agrees: float  # share of tokens at which both models' likeliest token is the same


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDamage:
    """Hold what quantization changed in the answers of one cell. ``tokens`` are those of the
    unquantized model's answers. ``identical`` is the share of prompts with the same answer,
    ``agreed`` the median number of tokens before the cell's own answer differs, ``other_prompts``
    the number of prompts that its chat template renders differently."""

    tokens: TokenMeans
    by_position: Mapping[str, TokenMeans]
    by_class: Mapping[str, TokenMeans]
    identical: float
    agreed: float
    other_prompts: int

    @property
    def hurt_most(self) -> tuple[str, float] | None:
        """Return (class, ratio): the class of tokens with the largest KL divergence, and how many
        times the mean of all tokens it is. None if nothing is lost or classes are too rare."""
        common = {n: c.kl for n, c in self.by_class.items() if c.prompts >= FEWEST_PROMPTS}
        if not common or self.tokens.kl <= 0:
            return None
        name = max(common, key=lambda name: common[name])
        return name, common[name] / self.tokens.kl


def answer_damage(store: Store, record: Record, before: Record) -> AnswerDamage | None:
    """Return what quantization changed in the answers of the cell ``record`` against its
    unquantized cell ``before``; None if the cell has not read the unquantized answers. Raises
    ResultsError if a table is damaged."""
    table, prompts = split_prompts(store.answers(record))
    if table["kl"].isna().any() or table.empty:
        return None
    _, base_prompts = split_prompts(store.answers(before))
    outcomes, base_outcomes = (  # a row per prompt, a column per metric
        table[table["task"] == ANSWERS].pivot(index="document", columns="metric", values="value")
        for table in map(store.outcomes, (record, before))
    )
    same = (outcomes["agreed_tokens"] == outcomes["length"]) & (
        outcomes["length"] == base_outcomes["length"]
    )
    places = np.searchsorted([*POSITIONS.values()], table["position"], side="right") - 1
    return AnswerDamage(
        tokens=_means(table),
        by_position=_means_by(table, np.array([*POSITIONS])[places], [*POSITIONS]),
        by_class=_means_by(table, np.array(token_classes(table)), CLASSES),
        identical=float(same.mean()),
        agreed=float(outcomes["agreed_tokens"].median()),
        other_prompts=int((prompts.to_numpy() != base_prompts.to_numpy()).sum()),
    )


def split_prompts(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Split the answers' ``table`` of a cell: return its rows of tokens, and a series with the text
    of each prompt, indexed by document."""
    prompts = table[table["position"] == PROMPT].drop_duplicates("document")
    tokens = table[table["position"] != PROMPT].reset_index(drop=True)
    return tokens, prompts.set_index("document")["text"]


def _means(tokens: pd.DataFrame) -> TokenMeans:
    """Return the means over the rows of ``tokens``."""
    kl, agrees = float(tokens["kl"].mean()), float(tokens["agrees"].mean())
    return TokenMeans(len(tokens), tokens["document"].nunique(), kl, agrees)


def _means_by(
    tokens: pd.DataFrame, names: np.ndarray, order: Sequence[str]
) -> dict[str, TokenMeans]:
    """Return the means by ``names`` (one per row of ``tokens``), in the order ``order``."""
    groups = dict(list(tokens.groupby(names)))
    return {name: _means(groups[name]) for name in order if name in groups}


def token_classes(tokens: pd.DataFrame) -> list[str]:
    """Return the class, one of ``CLASSES``, of each token of a table of answers without its
    prompts; the rows of an answer must lie together and in order."""
    groups = tokens.groupby(["document", "sample"], sort=False)["text"]
    return [name for _, texts in groups for name in classes(list(texts))]


def classes(texts: Sequence[str]) -> list[str]:
    """Return the class of each token of one answer, one of ``CLASSES``, from the tokens' texts."""
    text = "".join(texts)
    ends = np.cumsum([len(token) for token in texts])
    keys = [match.span() for match in KEY.finditer(text)]
    fences = [match.span() for match in CODE.finditer(text)]
    json = (0, 0)
    if keys:
        opening = [text.rfind(bracket, 0, keys[0][0]) for bracket in "{["]
        closing = max(text.rfind(bracket) for bracket in "}]")
        json = (max(opening), closing + 1 if closing > keys[-1][1] else len(text))
    names = []
    for index, (token, end) in enumerate(zip(texts, ends, strict=True)):
        start, plain = end - len(token), token.strip()
        within = [low <= start and end <= high for low, high in (json, *fences)]
        in_key = any(start < high and end > low for low, high in keys)
        if index == 0:
            name = "first token"
        elif TEMPLATE.fullmatch(plain):
            name = "end" if index == len(texts) - 1 else "template"
        elif in_key or (within[0] and plain and not plain.strip('{}[],:"')):
            name = "JSON"
        elif any(within[1:]):
            name = "code"
        elif any(character.isdigit() for character in token):
            name = "digits"
        else:
            name = "rest"
        names.append(name)
    return names
