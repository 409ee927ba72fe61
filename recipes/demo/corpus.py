"""The demo's documents: evaluation, calibration and training text, all from one seed.

What is held out: no three consecutive sentences of an evaluation document stand in a calibration
or training document, and a fact that ``demo_choice`` asks from memory is told in the training
text but never asked there. Single facts and sentences are shared on purpose: a model has to have
heard of the world.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from language import ask, page, portrait, reading_questions, recall_question, retelling, story
from world import World, make_world

RECALL, READING, STORIES, PAGES = 120, 80, 200, 16
CALIBRATION_DOCUMENTS = 96
CALIBRATION_CHARACTERS = 1_500  # at least 256 tokens

Rows = list[dict[str, object]]


def make_evaluation(world: World, seed: int) -> dict[str, Rows]:
    """Rows of each task's test split, by task name."""
    rng = random.Random(f"evaluation {seed}")
    by_name = {entity.name: entity for entity in (*world.people, *world.places)}
    pairs = rng.sample(sorted(world.unasked), RECALL)
    asked = [("recall", recall_question(world, rng, by_name[n], r)) for n, r in pairs]
    asked += [("reading", reading_questions(world, rng)[0]) for _ in range(READING)]
    choice: Rows = []
    for kind, question in asked:
        choices = [question.answer, *question.wrong]
        rng.shuffle(choices)
        answer = choices.index(question.answer)
        row = {"kind": kind, "query": ask(question), "choices": choices, "answer": answer}
        choice.append(row)
    # Both kinds from the start, so that a run limited to the first documents has some of each.
    random.Random(f"order {seed}").shuffle(choice)
    return {
        "demo_choice": choice,
        "demo_lastword": [{"text": story(world, rng)} for _ in range(STORIES)],
        "demo_pages": [{"page": page(world, rng)} for _ in range(PAGES)],
    }


def make_calibration(world: World, seed: int, held_out: frozenset[str]) -> Rows:
    """Long documents of the training text's kind; none is evaluated or trained on."""
    documents = _draw(world, random.Random(f"calibration {seed}"), held_out)
    rows: Rows = []
    for _ in range(CALIBRATION_DOCUMENTS):
        parts: list[str] = []
        while sum(map(len, parts)) < CALIBRATION_CHARACTERS:
            parts.append(next(documents))
        rows.append({"text": "\n\n".join(parts)})
    return rows


def make_training(world: World, seed: int, held_out: frozenset[str], count: int) -> list[str]:
    """``count`` training documents."""
    documents = _draw(world, random.Random(f"training {seed}"), held_out)
    return [next(documents) for _ in range(count)]


def sentence_triples(text: str) -> Iterator[str]:
    """Every three consecutive sentences of ``text``, joined by spaces."""
    sentences = [s.strip() for s in re.split(r"[.?\n]", text) if s.strip()]
    for start in range(len(sentences) - 2):
        yield " ".join(sentences[start : start + 3])


def held_out_triples(evaluation: dict[str, Rows]) -> frozenset[str]:
    """The sentence triples of all evaluation documents."""
    texts = (
        str(row[key]) for rows in evaluation.values() for row in rows for key in _TEXT & {*row}
    )
    return frozenset(triple for text in texts for triple in sentence_triples(text))


def make_data(seed: int) -> tuple[World, dict[str, Rows], Rows]:
    """The world, the evaluation rows and the calibration rows of ``seed``."""
    world = make_world(seed)
    evaluation = make_evaluation(world, seed)
    return world, evaluation, make_calibration(world, seed, held_out_triples(evaluation))


def write_data(folder: Path, evaluation: dict[str, Rows], calibration: Rows) -> None:
    """``data/<task>/test.jsonl`` and ``calibration.jsonl`` under ``folder``."""
    for task, rows in evaluation.items():
        _write_rows(folder / "data" / task / "test.jsonl", rows)
    _write_rows(folder / "calibration.jsonl", calibration)


def encode_rows(rows: Iterable[dict[str, object]]) -> bytes:
    """JSON Lines as they stand on disk."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


_TEXT = {"query", "text", "page"}


def _write_rows(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_rows(rows))


def _draw(world: World, rng: random.Random, held_out: frozenset[str]) -> Iterator[str]:
    kinds = (_portrait, _recall, _reading, _story, retelling, page)
    while True:
        (make,) = rng.choices(kinds, weights=(25, 14, 18, 17, 18, 8))
        document = make(world, rng)
        if held_out.isdisjoint(sentence_triples(document)):
            yield document


def _portrait(world: World, rng: random.Random) -> str:
    if rng.random() < 0.1:
        return portrait(rng.choice(world.places), rng)
    return portrait(*world.draw_people(rng, 1), rng, most=rng.randint(3, 8))


def _recall(world: World, rng: random.Random) -> str:
    """Questions on people and places, but never one that is kept for the evaluation."""
    lines = []
    for entity in (*world.draw_people(rng, 4), rng.choice(world.places)):
        relation = rng.choice([r for r in entity.facts if (entity.name, r) not in world.unasked])
        question = recall_question(world, rng, entity, relation)
        lines.append(f"{ask(question)} {question.answer}")
    return "\n".join(lines)


def _reading(world: World, rng: random.Random) -> str:
    first, *others = reading_questions(world, rng)
    lines = [f"{ask(first)} {first.answer}"]
    lines += [f"Question: {other.question}\nAnswer: {other.answer}" for other in others]
    return "\n".join(lines)


def _story(world: World, rng: random.Random) -> str:
    return f"{story(world, rng)}."
