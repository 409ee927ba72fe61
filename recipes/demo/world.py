"""A small invented world: people and places, each with facts, all drawn from one seed.

The demo's language speaks of nothing else. Some people are mentioned often and some hardly ever
(Zipf's law), so a trained model knows some facts firmly and some only just: the second kind is
what quantization loses first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from facts import RELATIONS, Relation

PEOPLE = 1_000
UNASKED_RELATIONS = 2  # of each person or place: told in training, never asked there


@dataclass(frozen=True, kw_only=True, slots=True)
class Entity:
    """A person or a place. ``facts`` maps a relation's name to its value."""

    name: str
    kind: str  # "person" or "place"
    pronoun: str  # "She", "He", "It"
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """People, most often mentioned first, and places; ``unasked`` holds (name, relation) pairs."""

    people: tuple[Entity, ...]
    places: tuple[Entity, ...]
    cumulative_weights: tuple[float, ...]  # of mentioning each person
    unasked: frozenset[tuple[str, str]]

    def draw_people(self, rng: random.Random, count: int) -> list[Entity]:
        """``count`` different people, the frequent ones more often."""
        found: list[Entity] = []
        while len(found) < count:
            (person,) = rng.choices(self.people, cum_weights=self.cumulative_weights)
            if person not in found:
                found.append(person)
        return found


_PERSON_STARTS = ("Ba", "Be", "Bri", "Da", "Do", "El", "Fa", "Fe", "Ga", "Gre", "Ha", "I", "Jo",
                  "Ka", "Ke", "Li", "Lu", "Ma", "Mi", "Na", "Ne", "O", "Pa", "Ro", "Sa", "Si",
                  "Ta", "Te", "U", "Vi", "Wa", "Ye", "Zo")  # fmt: skip
_PERSON_MIDDLES = ("", "li", "ro")
_PERSON_ENDS = ("bel", "dan", "dra", "fin", "gar", "la", "len", "lo", "min", "mir", "na", "nel",
                "no", "ra", "rik", "rin", "sa", "sko", "ta", "tan", "thea", "ven", "wyn",
                "zel")  # fmt: skip
_PLACE_NAMES = ("Orm", "Harl", "Tarnby", "Little Tarnby", "Quell", "Upper Quell", "Stenwick",
                "Ashford", "Old Ashford", "Brack", "Dunmere", "Ilsey", "Kelp Bay", "Lorn",
                "Marrow Hill", "Nettlecombe", "Pell", "Ravensty", "Saltcote", "Thorpe under Hill",
                "Umber", "Vane", "Westerloo", "Yarrow Bridge")  # fmt: skip


def make_world(seed: int) -> World:
    """The world of ``seed``: the same on every machine."""
    rng = random.Random(f"world {seed}")
    names = [
        start + middle + end
        for start in _PERSON_STARTS
        for middle in _PERSON_MIDDLES
        for end in _PERSON_ENDS
    ]
    names.remove("Oven")  # a thing in the stories
    names = rng.sample(names, PEOPLE)
    places = tuple(_entity(rng, name, "place", "It", {}) for name in _PLACE_NAMES)
    people = []
    for index, name in enumerate(names):
        friend = rng.choice(names[:index] + names[index + 1 :])
        given = {"home": rng.choice(_PLACE_NAMES), "friend": friend}
        people.append(_entity(rng, name, "person", rng.choice(("She", "He")), given))
    unasked = {
        (entity.name, relation.name)
        for entity in (*people, *places)
        for relation in rng.sample(RELATIONS[entity.kind], UNASKED_RELATIONS)
    }
    weights = accumulate(1 / (rank + 20) for rank in range(len(people)))
    return World(
        people=tuple(people),
        places=places,
        cumulative_weights=tuple(weights),
        unasked=frozenset(unasked),
    )


def possible_values(world: World, relation: Relation) -> list[str]:
    """Every value that some entity has or could have for ``relation``, sorted."""
    if relation.values:
        return sorted(relation.values)
    return sorted({person.facts[relation.name] for person in world.people})


def _entity(
    rng: random.Random, name: str, kind: str, pronoun: str, given: dict[str, str]
) -> Entity:
    facts = {r.name: given.get(r.name) or rng.choice(r.values) for r in RELATIONS[kind]}
    return Entity(name=name, kind=kind, pronoun=pronoun, facts=facts)
