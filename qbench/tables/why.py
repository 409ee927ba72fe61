"""What a results folder says on why its models suffer, as Markdown, and beside a paper's."""

from __future__ import annotations

from collections.abc import Sequence

from qbench import published as papers
from qbench.passkey import task_length
from qbench.records import Record
from qbench.tables import along, analyses
from qbench.tables.along import passkey_text
from qbench.tables.analyses import Section, Why, texts
from qbench.tables.beside_damage import beside, over_seeds
from qbench.text import MINUS, NO_VALUE, for_markdown, table

MEASURES = {
    "sink_rate_0.2": "Sink rate %, ε 0.2",
    "sink_rate_0.3": "Sink rate %, ε 0.3",
    "kurtosis": "Kurtosis",
    "min": "Min",
    "max": "Max",
    "sparsity": "Sparsity %",
}


def all_sections(why: Why) -> list[Section]:
    return [*over_seeds(why), *analyses.sections(why), *beside(why), *along.sections(why)]


def markdown(why: Why) -> str:
    """All tables of the folder `analysis`."""
    found = all_sections(why)
    if not why.there:
        found = []
    parts = ["# Analysis"]
    read = [*texts(why.cells), *texts(why.long)]
    parts += ["\n".join(f"- {for_markdown(line)}" for line in read)] if read else []
    parts += [text for section in found for text in as_markdown(section)]
    parts += [for_markdown(problem) for problem in why.problems]
    if len(parts) == 1:
        parts.append("No cell was analyzed.")
    return "\n\n".join(parts) + "\n"


def as_markdown(section: Section) -> list[str]:
    return [
        f"## {section.title}",
        section.note,
        table(section.head, section.rows, align=section.align),
    ]


def beside_paper(why: Why, name: str) -> list[Section]:
    """Tables 4, 5 and 7 as ``--published NAME``'s paper prints them, with ours of the same
    normalizers below. Raises RecipeError for an unknown set."""
    scale = papers.scale(name)
    four = papers.table("softpick-table-04")
    rows = [
        (f"{scale} {row['model']} (paper)", *(_printed(row[column]) for column in MEASURES))
        for row in four.rows
        if row["size"] == scale
    ]
    ours = next((s for s in analyses.sections(why) if s.name == "table-4"), None)
    if ours is not None:
        places = [ours.head.index(title) for title in MEASURES.values()]
        rows += [(row[0], *(row[place] for place in places)) for row in ours.rows]
    told = f"{four.paper}, {four.source}: on 1,000 samples of SlimPajama; sparsity and hidden "
    told += "states on 10 texts (*: zeros of softmax by underflow, as the paper notes). Ours: "
    told += "; ".join(texts(why.cells)) if ours else "none; run `qbench analyze`"
    found = [
        Section(
            name="published-4",
            title="Beside the paper: sinks, hidden states, sparsity",
            note=told + ".",
            head=("Model", *MEASURES.values()),
            rows=tuple(rows),
        )
    ]
    five = _passkey(why.records, scale)
    return [*found, five] if five is not None else found


def _printed(text: str) -> str:
    return text.replace("-", MINUS)


def _passkey(records: Sequence[Record], scale: str) -> Section | None:
    """Table 7, whose first two rows are table 5."""
    seven = papers.table("softpick-table-07")
    if seven.scale != scale:
        return None
    printed = [int(column) for column in seven.columns if column != "model"]
    ours = {
        record.cell: {length: s for s in record.scores if s.metric == "exact_match"
                      and (length := task_length(s.task)) is not None}
        for record in records
    }  # fmt: skip
    ours = {cell: found for cell, found in ours.items() if found}
    lengths = sorted({*printed, *(length for found in ours.values() for length in found)})
    rows = [
        (f"{scale} {row['model']} (paper)", *(row.get(str(n), NO_VALUE) for n in lengths))
        for row in seven.rows
    ]
    rows += [(cell, *(passkey_text(found.get(n)) for n in lengths)) for cell, found in ours.items()]
    told = f"{seven.paper}, tables 5 and 7: per cent of keys retrieved, by tokens of the prompt."
    if not ours:
        told += " Ours: none; put passkey, or passkey_890 and the like, into the recipe's tasks."
    return Section(
        name="published-7",
        title="Beside the paper: passkey retrieval",
        note=told,
        head=("Model", *map(str, lengths)),
        rows=tuple(rows),
    )
