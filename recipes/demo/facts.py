"""What is told of people and places in the demo's world, and how it is told and asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """How one kind of fact is told and asked.

    In ``statements`` {S} is the subject (its name or a pronoun), {P} the possessive, {v} the
    value; in ``questions`` {n} is the name. ``values`` is empty where the world fills it in.
    """

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...] = ()


# fmt: off
PERSON_RELATIONS = (
    Relation(
        name="home",
        statements=(
            "{S} lives in {v}.",
            "{S} has a house in {v}.",
            "{P} home is in {v}.",
            "{S} has lived in {v} for many years.",
        ),
        questions=("Where does {n} live?", "In which place is the home of {n}?"),
    ),
    Relation(
        name="friend",
        statements=(
            "{P} best friend is {v}.",
            "{S} tells every secret to {v}, the best of friends.",
            "{S} has been best friends with {v} since school.",
        ),
        questions=("Who is the best friend of {n}?", "Which friend does {n} like best?"),
    ),
    Relation(
        name="trade",
        statements=(
            "{S} works as a {v}.",
            "{S} is a {v}.",
            "{S} earns a living as a {v}.",
            "{S} has always wanted to be a {v}, and became one.",
        ),
        questions=("What is the work of {n}?", "What does {n} do for a living?"),
        values=(
            "baker", "smith", "weaver", "potter", "miller", "teacher", "tailor", "painter",
            "shepherd", "doctor", "keeper of bees", "mender of old clocks", "digger of wells",
            "maker of small wooden boats", "singer at weddings", "driver of the mail coach",
            "seller of ribbons and buttons", "cook at the inn", "guard at the town gate",
            "writer of letters for other people",
        ),
    ),
    Relation(
        name="animal",
        statements=(
            "{S} keeps a {v}.",
            "{S} owns a {v} and talks to it.",
            "{P} animal is a {v}.",
            "{S} never goes out without a {v}.",
        ),
        questions=("Which animal does {n} keep?", "What animal belongs to {n}?"),
        values=(
            "goat", "dog", "cat", "hen", "duck", "white goose", "tame fox", "brown pony",
            "spotted pig", "very old donkey", "hedgehog", "parrot that can count",
            "pair of grey doves", "snail in a glass jar", "blind mole", "sheep with one horn",
        ),
    ),
    Relation(
        name="food",
        statements=(
            "{S} likes to eat {v}.",
            "{P} favourite food is {v}.",
            "{S} would walk a mile for {v}.",
            "For supper {n} always asks for {v}.",
        ),
        questions=("What does {n} like to eat?", "What is the favourite food of {n}?"),
        values=(
            "soup", "plums", "cheese", "bread with honey", "fried fish", "pancakes",
            "roasted chestnuts", "cabbage", "eggs on toast", "rice with raisins", "pears",
            "cold porridge", "mushroom pie", "beans", "a bowl of sour cherries with cream",
            "dumplings", "carrots", "smoked ham", "walnut cake", "figs",
        ),
    ),
    Relation(
        name="treasure",
        statements=(
            "{S} carries a {v} everywhere.",
            "{P} dearest thing is a {v}.",
            "From an aunt {n} got a {v}.",
            "{S} would never sell a certain {v}.",
        ),
        questions=("What does {n} carry everywhere?", "What is the dearest thing of {n}?"),
        values=(
            "flute", "red lantern", "silver spoon", "map of the coast", "green umbrella", "drum",
            "brass key", "blue scarf", "box of coloured chalk", "knife with a bone handle",
            "compass", "mirror", "hat with a long feather", "bell", "book without a cover",
            "bag of marbles", "yellow kite", "watch that has stopped", "ring", "tin whistle",
        ),
    ),
    Relation(
        name="fear",
        statements=(
            "{S} is afraid of {v}.",
            "{S} runs away from {v}.",
            "Nothing frightens {n} more than {v}.",
            "{P} greatest fear is {v}.",
        ),
        questions=("What is {n} afraid of?", "What does {n} fear most?"),
        values=(
            "thunder", "the dark", "spiders", "deep water", "ghosts", "bulls", "high ladders",
            "wasps", "the long night of winter", "narrow bridges", "loud strangers", "snakes",
            "being late", "fire", "the sound of the old church bell", "wolves",
        ),
    ),
    Relation(
        name="pastime",
        statements=(
            "{S} spends every free hour {v}.",
            "On holidays {n} enjoys {v}.",
            "{S} is good at {v}.",
            "{P} great joy is {v}.",
        ),
        questions=("What does {n} enjoy on holidays?", "What is {n} good at?"),
        values=(
            "singing", "reading", "dancing", "swimming in the lake", "playing chess", "sewing",
            "climbing trees", "telling stories to children", "fishing", "drawing maps",
            "walking alone in the hills", "knitting", "running", "growing roses", "sleeping",
            "looking at the stars", "skating", "carving spoons", "baking", "rowing",
        ),
    ),
)

PLACE_RELATIONS = (
    Relation(
        name="ware",
        statements=(
            "{S} is known for {v}.",
            "People come to {n} to buy {v}.",
            "{P} best ware is {v}.",
        ),
        questions=("What is {n} known for?", "What do people buy in {n}?"),
        values=(
            "wool", "salt", "cheese", "glass", "paper", "rope", "blue tiles", "black bread",
            "candles", "wine", "leather shoes", "wooden toys", "baskets", "cider", "nails",
            "dried fish", "white linen", "copper pots",
        ),
    ),
    Relation(
        name="setting",
        statements=("{S} lies {v}.", "{S} was built {v}.", "You find {n} {v}."),
        questions=("Where does {n} lie?", "Where was {n} built?"),
        values=(
            "by the sea", "on a hill", "in a deep valley", "by the great lake", "on an island",
            "at the edge of the forest", "where two rivers meet", "high in the mountains",
            "on the open plain", "beside the swamp",
        ),
    ),
    Relation(
        name="market",
        statements=(
            "{P} market is held on {v}.",
            "On {v} there is a market in {n}.",
            "{S} has its market on {v}.",
        ),
        questions=("When is the market in {n}?", "On which day does {n} hold its market?"),
        values=(
            "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
            "the first day of the month", "the last day of the month",
        ),
    ),
    Relation(
        name="sight",
        statements=(
            "{P} oldest building is {v}.",
            "Visitors of {n} always see {v}.",
            "{S} is proud of {v}.",
        ),
        questions=("What is {n} proud of?", "What is the oldest building of {n}?"),
        values=(
            "the lighthouse", "a stone bridge", "the round tower", "the mill", "a theatre",
            "the house of the seven widows", "the library", "a castle without a roof",
            "the old well", "the bath", "the harbour wall", "a school for bakers",
        ),
    ),
)
# fmt: on

RELATIONS = {"person": PERSON_RELATIONS, "place": PLACE_RELATIONS}
