"""The demo's language: pages, stories and questions about the world, in simple English.

Every function draws from the ``random.Random`` it is given and from nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from facts import RELATIONS
from world import Entity, World, possible_values

CHOICES = 4

_SPOTS = (
    "in the barn", "under the bridge", "behind the mill", "in the well", "on the roof",
    "in the oven", "under the bed", "in the boat", "behind the old stone wall", "on the shelf",
    "in the church", "under the big oak tree", "in the garden", "on the cart", "in the cellar",
    "beside the frozen pond", "in the attic", "under the stairs of the inn", "in the stable",
    "at the far end of the field",
)  # fmt: skip
_THINGS = (
    "hammer", "candle", "basket", "letter", "blanket", "coin", "broom", "saw", "kettle", "pot",
    "rope", "ladder", "shovel", "bottle", "button", "ball", "pillow", "needle", "jug", "spade",
    "chair", "crown", "wheel", "doll",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "golden")
_BEASTS = ("goat", "dog", "cat", "hen", "duck", "goose", "fox", "pony", "pig", "donkey", "mole",
           "snail", "sheep", "dove", "hedgehog", "parrot")  # fmt: skip
_WARES = (
    "a loaf of bread", "two eggs", "a new pair of shoes", "salt", "a bag of flour", "wool",
    "a very small mirror", "seeds for the garden", "a cake", "lamp oil", "six yards of linen",
    "a comb", "nails", "a picture of the sea in a frame", "ink", "a cheese", "honey", "soap",
    "a rope as long as a street", "paper",
)  # fmt: skip
_WEATHER = (
    "It was a cold morning.", "It had rained all night.", "The sun was hot that day.",
    "It was the day of the feast.", "Snow lay on the ground.", "The wind blew from the sea.",
    "It was late in the summer.", "Nobody had slept well.", "The leaves were turning yellow.",
    "It was an ordinary day.", "The bells had just rung.", "Fog covered the valley.",
)  # fmt: skip
_ASIDES = (
    "Nobody else was there.", "Then it began to rain.", "A bird sang.", "They talked for a while.",
    "After that it was quiet.", "An hour went by.", "Everybody laughed.", "The clock struck four.",
    "It was time for tea.", "Far away a dog barked.", "Soon it was evening.", "They were tired.",
)  # fmt: skip
_EVENTS = (
    "{a} put the {t} {s}.", "{a} left the {t} {s}.", "{a} hid the {t} {s}.",
    "{a} gave the {t} to {b}.", "{a} sold the {t} to {b}.", "{a} lent a {t} to {b}.",
    "{a} painted the {t} {c}.", "{a} bought {w}.", "{a} came with a {k}.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question with its answer and three wrong ones; ``passage`` is empty where it is recall."""

    passage: str
    question: str
    answer: str
    wrong: tuple[str, ...]


def recall_question(
    world: World, rng: random.Random, entity: Entity, relation_name: str
) -> Question:
    """A question about a fact of the world, to be answered from memory."""
    relation = next(r for r in RELATIONS[entity.kind] if r.name == relation_name)
    answer = entity.facts[relation.name]
    others = [v for v in possible_values(world, relation) if v not in (answer, entity.name)]
    return Question(
        passage="",
        question=rng.choice(relation.questions).format(n=entity.name),
        answer=answer,
        wrong=tuple(rng.sample(others, CHOICES - 1)),
    )


def reading_questions(world: World, rng: random.Random) -> list[Question]:
    """Three or four questions on one fresh passage, which alone holds the answers."""
    return rng.choice((_placed, _carried, _given, _bought))(world, rng)


def story(world: World, rng: random.Random) -> str:
    """A short story whose last word follows from what comes before; no full stop at its end."""
    return rng.choice(_STORIES)(world, rng)


def retelling(world: World, rng: random.Random) -> str:
    """Events, and the same events told again in another order: all that comes after a
    sentence's first words was said before. A model learns to look back from little else."""
    count = rng.randint(3, 6)
    names = [p.name for p in world.draw_people(rng, 2 * count)]
    things, others = rng.sample(_THINGS, count), names[count:]
    told = []
    for name, thing, other in zip(names, things, others, strict=False):
        event = rng.choice(_EVENTS).format(
            a=name,
            b=other,
            t=thing,
            s=rng.choice(_SPOTS),
            c=rng.choice(_COLOURS),
            w=rng.choice(_WARES),
            k=rng.choice(_BEASTS),
        )
        told.append(event)
    again = rng.sample(told, count)
    teller, listener = (p.name for p in world.draw_people(rng, 2))
    return f"{' '.join(told)}\n{teller} told {listener} all of it. {' '.join(again)}"


def portrait(entity: Entity, rng: random.Random, most: int = 99) -> str:
    """A paragraph that tells the facts of a person or place in any order and wording."""
    relations = list(RELATIONS[entity.kind])
    rng.shuffle(relations)
    sentences = []
    for place, relation in enumerate(relations[:most]):
        named = place == 0 or rng.random() < 0.3
        subject = entity.name if named else entity.pronoun
        possessive = f"{entity.name}'s" if named else _POSSESSIVES[entity.pronoun]
        template = rng.choice(relation.statements)
        sentences.append(
            template.format(S=subject, P=possessive, n=entity.name, v=entity.facts[relation.name])
        )
    return " ".join(sentences)


def page(world: World, rng: random.Random) -> str:
    """A page on a place: its portrait, some of its people, and what happened there once."""
    place = rng.choice(world.places)
    residents = [p for p in world.draw_people(rng, 40) if p.facts["home"] == place.name][:2]
    residents = residents or world.draw_people(rng, 1)
    lines = [f"= {place.name} =", portrait(place, rng)]
    for person in residents:
        lines += [f"= {person.name} of {person.facts['home']} =", portrait(person, rng)]
    lines += [f"= A story from {place.name} =", f"{story(world, rng)}."]
    return "\n".join(lines)


def ask(question: Question) -> str:
    """The text before the answer, as the task gives it to the model."""
    passage = f"{question.passage}\n" if question.passage else ""
    return f"{passage}Question: {question.question}\nAnswer:"


_POSSESSIVES = {"She": "Her", "He": "His", "It": "Its"}


def _tell(rng: random.Random, sentences: list[str]) -> str:
    """The sentences with weather before and perhaps an aside among them."""
    told = list(sentences)
    if rng.random() < 0.4:
        told.insert(rng.randrange(1, len(told)), rng.choice(_ASIDES))
    if rng.random() < 0.6:
        told.insert(0, rng.choice(_WEATHER))
    return " ".join(told)


def _ask_all(
    rng: random.Random, passage: str, asked: list[tuple[str, str]], extra: tuple[str, ...]
) -> list[Question]:
    """Questions whose wrong answers are the passage's other answers, filled up from ``extra``."""
    answers = [answer for _, answer in asked]
    questions = []
    for question, answer in rng.sample(asked, len(asked)):
        wrong = [a for a in answers if a != answer]
        rng.shuffle(wrong)
        spare = [e for e in extra if e not in answers]
        wrong = (wrong + rng.sample(spare, CHOICES))[: CHOICES - 1]
        questions.append(
            Question(passage=passage, question=question, answer=answer, wrong=tuple(wrong))
        )
    return questions


def _placed(world: World, rng: random.Random) -> list[Question]:
    count = rng.choice((3, 4))
    people = world.draw_people(rng, count)
    things, spots = rng.sample(_THINGS, count), rng.sample(_SPOTS, count)
    verbs = ("put the {} {}", "left the {} {}", "hid the {} {}")
    sentences = [
        f"{person.name} {rng.choice(verbs).format(thing, spot)}."
        for person, thing, spot in zip(people, things, spots, strict=True)
    ]
    asked = [(f"Where is the {t}?", s) for t, s in zip(things, spots, strict=True)]
    return _ask_all(rng, _tell(rng, sentences), asked, _SPOTS)


def _carried(world: World, rng: random.Random) -> list[Question]:
    people = world.draw_people(rng, 3)
    things, spots = rng.sample(_THINGS, 3), rng.sample(_SPOTS, 3)
    took = [f"{p.name} took the {t}." for p, t in zip(people, things, strict=True)]
    stood = [f"{p.name} waited {s}." for p, s in zip(people, spots, strict=True)]
    rng.shuffle(took)
    rng.shuffle(stood)
    asked = [(f"Where is the {t}?", s) for t, s in zip(things, spots, strict=True)]
    return _ask_all(rng, _tell(rng, took + stood), asked, _SPOTS)


def _given(world: World, rng: random.Random) -> list[Question]:
    names = [p.name for p in world.draw_people(rng, 6)]
    things = rng.sample(_THINGS, 3)
    triples = list(zip(names[:3], things, names[3:], strict=True))
    verbs = ("gave the {} to {}", "sold the {} to {}", "sent the {} to {}")
    sentences = [f"{a} {rng.choice(verbs).format(t, b)}." for a, t, b in triples]
    asked = [(f"Who has the {t}?", b) for _, t, b in triples]
    return _ask_all(rng, _tell(rng, sentences), asked, tuple(p.name for p in world.people))


def _bought(world: World, rng: random.Random) -> list[Question]:
    names = [p.name for p in world.draw_people(rng, 4)]
    wares = rng.sample(_WARES, 4)
    sentences = [f"{n} bought {w}." for n, w in zip(names, wares, strict=True)]
    asked = [(f"What did {n} buy?", w) for n, w in zip(names, wares, strict=True)]
    start = f"It was market day in {rng.choice(world.places).name}."
    return _ask_all(rng, f"{start} {' '.join(sentences)}", asked, _WARES)


def _story_of_loans(world: World, rng: random.Random) -> str:
    a, b, c, d = (p.name for p in world.draw_people(rng, 4))
    x, y = rng.sample(_THINGS, 2)
    told = [f"{a} lent a {x} to {b}.", f"{c} lent a {y} to {d}."]
    giver, thing, owner = rng.choice(((b, x, a), (d, y, c)))
    rng.shuffle(told)
    return f"{_tell(rng, told)} In the evening {giver} brought the {thing} back to {owner}"


def _story_of_hiding(world: World, rng: random.Random) -> str:
    a, b = (p.name for p in world.draw_people(rng, 2))
    spots = rng.sample([s for s in _SPOTS if " of " not in s], 2)
    things = rng.sample(_THINGS, 2)
    told = [f"{n} hid a {t} {s}." for n, t, s in zip((a, b), things, spots, strict=True)]
    seeker, spot = rng.choice(((a, spots[0]), (b, spots[1])))
    rng.shuffle(told)
    return f"{_tell(rng, told)} The next day {seeker} looked {spot}"


def _story_of_beasts(world: World, rng: random.Random) -> str:
    names = [p.name for p in world.draw_people(rng, 3)]
    beasts = rng.sample(_BEASTS, 3)
    told = [f"{n} came with a {b}." for n, b in zip(names, beasts, strict=True)]
    chosen = rng.randrange(3)
    return f"{_tell(rng, told)} When {names[chosen]} whistled, up jumped the {beasts[chosen]}"


def _story_of_paint(world: World, rng: random.Random) -> str:
    names = [p.name for p in world.draw_people(rng, 2)]
    things, colours = rng.sample(_THINGS, 3), rng.sample(_COLOURS, 3)
    told = [
        f"{rng.choice(names)} painted the {t} {c}." for t, c in zip(things, colours, strict=True)
    ]
    chosen = rng.randrange(3)
    return f"{_tell(rng, told)} A year later the {things[chosen]} was still {colours[chosen]}"


def _story_of_leftovers(world: World, rng: random.Random) -> str:
    (a,) = (p.name for p in world.draw_people(rng, 1))
    things = rng.sample(_THINGS, 4)
    listed = f"{a} had a {things[0]}, a {things[1]}, a {things[2]} and a {things[3]}."
    left = rng.choice(things)
    gone = [t for t in things if t != left]
    rng.shuffle(gone)
    sold = f"{a} sold the {gone[0]}, the {gone[1]} and the {gone[2]}."
    return f"{_tell(rng, [listed, sold])} All that was left was the {left}"


def _story_of_friends(world: World, rng: random.Random) -> str:
    """Ends with a fact of the world, so it must be remembered, not read."""
    (person,) = world.draw_people(rng, 1)
    thing = rng.choice(_THINGS)
    told = [f"{person.name} found a {thing} {rng.choice(_SPOTS)}.", f"It was a fine {thing}."]
    return f"{_tell(rng, told)} {person.name} ran to show it to {person.facts['friend']}"


_STORIES: tuple[Callable[[World, random.Random], str], ...] = (
    _story_of_loans,
    _story_of_hiding,
    _story_of_beasts,
    _story_of_paint,
    _story_of_leftovers,
    _story_of_friends,
)
