"""Documents without a usable answer, which lm-eval would count as wrongly answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qbench.errors import DataError
from qbench.evaluation.documents import listed

if TYPE_CHECKING:
    from qbench.evaluation.tasks import LoadedTask


INDEXES = ("label", "gold")  # usual names of the field that says which choice is right
ANSWERS = (*INDEXES, "answerKey", "answer")  # and of those that say it in words
CHECKED = "_qbench_checked"  # the limits within which all documents of a task have answers


def check_labels(task: LoadedTask, limit: int | None = None) -> None:
    """Raises DataError where one of the first ``limit`` documents of ``task`` has no right answer:
    a label that is missing, hidden (−1) or names none of the choices.

    Tasks with a ``process_results`` of their own judge by their own rules and are only checked
    for targets that cannot be made at all.
    """
    from qbench.evaluation.scoring.overhead import less_overhead

    inner = task.task
    if limit in getattr(inner, CHECKED, ()):
        return
    problems = []
    with less_overhead():
        documents = listed(inner.eval_docs)[:limit]
        for number, document in enumerate(documents):
            if (problem := _problem(inner, document)) is not None:
                problems.append((number, problem))
    if problems:
        number, problem = problems[0]
        more = f" ({len(problems)} of {len(documents)} documents are like it)"
        raise DataError(
            f"{task.name}: {task.location(number)}: {problem}{more if len(problems) > 1 else ''}; "
            "correct it, leave the document out, or use a split whose answers are public"
        )
    setattr(inner, CHECKED, {*getattr(inner, CHECKED, ()), limit})


def _problem(inner: Any, document: dict[str, Any]) -> str | None:
    try:
        target = (inner.doc_to_text if inner.multiple_input else inner.doc_to_target)(document)
        if inner.OUTPUT_TYPE != "multiple_choice":
            return "there is no target text" if _missing(target, document) else None
        choices = inner.doc_to_choice(document)
    except Exception as error:  # of a definition's own template or function
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"its answer cannot be found ({type(error).__name__}: {reason[0]})"
    if callable(inner.config.process_results):
        return None
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return f"its choices are {choices!r:.80}, not texts"
    # A definition's function may make an answer of anything: `first if label == 0 else second`.
    for name in ANSWERS:
        if name in document and _hidden(document[name], index=name in INDEXES):
            return f"{name} {document[name]!r} is no answer"
    golds = target if isinstance(target, list) and target else [target]
    for gold in golds:
        if not _names(gold, choices):
            return (
                f"label {gold!r:.80} names none of its {len(choices)} choices "
                f"(0 to {len(choices) - 1}, or the text of one)"
            )
    return None


def _names(gold: Any, choices: list[str]) -> bool:
    """Whether ``gold`` is the index of a choice, or its text."""
    if isinstance(gold, str):
        return gold in choices
    if isinstance(gold, float):  # a column of whole numbers with one that is missing
        return gold.is_integer() and 0 <= gold < len(choices)
    return isinstance(gold, int) and 0 <= gold < len(choices)


def _hidden(label: Any, *, index: bool) -> bool:
    """What data sets write where an answer is missing or kept from the public."""
    if index and isinstance(label, int | float):
        return label < 0 or label != int(label)
    return label is None or label == ""


def _missing(target: Any, document: dict[str, Any]) -> bool:
    """None, an empty list, or what a template makes of a field that is null."""
    if target is None or target == []:
        return True
    rendered_null = isinstance(target, str) and target.strip() == "None"
    return rendered_null and any(value is None for value in document.values())
