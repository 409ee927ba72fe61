"""What one document's requests said. Records do not keep the text: it is made again from the recipe
and its data, where those are what was scored."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from qbench.errors import DataError
from qbench.evaluation import passkey
from qbench.evaluation.planned import PlannedTask
from qbench.evaluation.settings import FEWSHOT_SEED, ScoringSettings
from qbench.evaluation.tasks import LoadedTask, load_task
from qbench.record import Record

Requests = tuple[tuple[str, ...], ...]  # of each request its texts: context and continuation


def asked(
    record: Record, planned: Sequence[PlannedTask], document: int, task: str | None = None
) -> dict[str, Requests]:
    """By task, the requests of ``document``. Left out are tasks that have no such document, and
    passkey retrieval, whose prompts are made for a tokenizer.

    Raises DataError where recipe and data ask something else than the record's cell was asked.
    """
    found = {}
    for one in planned:
        if one.name not in record.documents or task not in (None, one.name):
            continue
        if one.output_type == passkey.KIND:
            continue
        loaded = load_task(one)
        if loaded.digest != record.documents[one.name]:
            raise DataError(
                f"{one.name}: this recipe and its data ask something else than {record.cell} was "
                "asked; name those that it was run with"
            )
        if document < loaded.documents:
            found[one.name] = _requests(loaded, record, document)
    return found


def _requests(loaded: LoadedTask, record: Record, document: int) -> Requests:
    """Built by lm-eval as for a model: it draws with its own seeds, and before the task does."""
    from qbench.evaluation.evaluate import evaluate
    from qbench.evaluation.scoring.asked import Known, Nobody

    scoring = record.key_parts.get("scoring") or {}
    settings = ScoringSettings(
        mode="exact",
        max_length=1,
        batch_size=1,
        window_batch_size=1,
        limit=document + 1,  # from the first on: a generator that goes on draws the examples
        seed=scoring.get("seed", 0),
        fewshot_seed=scoring.get("fewshot_seed", FEWSHOT_SEED),
    )
    with suppress(Known):
        evaluate(Nobody(), loaded, settings)
    return tuple(
        tuple(text for text in one.args if isinstance(text, str))
        for one in loaded.task.instances
        if one.doc_id == document
    )
