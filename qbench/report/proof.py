"""Tables of what stands behind the scores: divergence, audit, costs, provenance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qbench.comparison.lines import Comparison, judge
from qbench.records import Audit, Damage, Unavailable
from qbench.report.costs import STAGES, bits_per_weight, sound
from qbench.report.table import Cell, DataTable, build, plain
from qbench.store import KEY_DIGITS
from qbench.text import NO_VALUE

NAMED = 4
KL_NOTE = (
    "KL: Kullback–Leibler divergence of the quantized from the unquantized model's next-token "
    "distribution, over the whole vocabulary, in nats a scored token"
)


def divergence(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Task", "Cell", "Mean KL", "Median KL", "KL p99", "Same top token", "Right to wrong",
            "Wrong to right", "Right answer, nats", "Tokens"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        if not isinstance(record.damage, Damage):
            continue
        for task, part in record.damage.tasks.items():
            told = part.distributions
            flips = next(iter(part.flips.values()), None)
            rows.append(
                [
                    Cell(text=task),
                    Cell(text=record.cell),
                    plain(told and told.kl.mean, "{:.4g}"),
                    plain(told and told.kl.median, "{:.4g}"),
                    plain(told and told.kl.p99, "{:.4g}"),
                    plain(told and told.top1_agreement, "{:.1%}"),
                    plain(flips and flips.right_to_wrong, "{:d}"),
                    plain(flips and flips.wrong_to_right, "{:d}"),
                    plain(part.correct_answer and part.correct_answer.value, "{:+.4f}"),
                    plain(told and told.tokens, "{:d}"),
                ]
            )
    if rows:
        caption = (
            f"{KL_NOTE}. Same top token: share of tokens whose likeliest prediction stayed. Right "
            "to wrong, wrong to right: answers that quantization turned. Right answer: change of "
            "its log-likelihood."
        )
        title = "Changed distributions and answers"
        yield build("divergence", "distributions", title, caption, head, rows, keys=2)


def _left_out(found: Audit) -> str:
    """Names of what was not quantized, each with the reason where the record has it."""
    why = found.left_out_because
    return ", ".join(f"{name} ({why[name]})" if name in why else name for name in found.left_out)


def divergence_notes(comparison: Comparison) -> list[str]:
    """Why quantized cells have no divergence, one line a reason."""
    reasons: dict[str, list[str]] = {}
    quantized = [record for record in sound(comparison) if record.quantized]
    for record in quantized:
        if isinstance(record.damage, Damage):
            continue
        reason = (
            record.damage.reason
            if isinstance(record.damage, Unavailable)
            else "it was not asked for (evaluation.damage)"
        )
        reasons.setdefault(reason, []).append(record.cell)
    every = len(quantized)
    return [
        f"No divergence for {'any cell' if len(cells) == every else _some(cells)}: {why}"
        for why, cells in reasons.items()
    ]


def _some(cells: Sequence[str]) -> str:
    shown = ", ".join(cells[:NAMED])
    return shown if len(cells) <= NAMED else f"{shown} and {len(cells) - NAMED} more cells"


def stages(comparison: Comparison) -> Iterator[DataTable]:
    head = [
        "Cell",
        *(f"{stage}, s" for stage in STAGES),
        "Together, s",
        "Peak memory, GiB",
        "Notes",
    ]
    rows = []
    for record in comparison.records.values():
        if not record.stages:
            continue
        seconds = {stage.name: stage.seconds for stage in record.stages}
        rows.append(
            [
                Cell(text=record.cell),
                *(plain(seconds.get(stage), "{:.1f}") for stage in STAGES),
                plain(sum(seconds.values()), "{:.1f}"),
                plain(max(stage.peak_memory_gib for stage in record.stages), "{:.2f}"),
                Cell(text="; ".join(s.detail for s in record.stages if s.detail)),
            ]
        )
    if rows:
        caption = "Wall time of each stage; memory of the largest."
        yield build("stages", "costs", "Time and memory", caption, head, rows, keys=1)


def audit(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Status", "Bits a weight", "Coverage", "Weight error", "Largest in a layer",
            "Levels", "Logits moved", "Left out", "Why"]  # fmt: skip
    rows = []
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        status, reason = judge(record)
        found = record.audit if record else None
        if status == "ok" and found is None and cell.quantized:
            status, reason = "not audited", "nothing shows that it was quantized"
        worst = max(found.modules, key=lambda one: one.weight_error) if _layers(found) else None
        rows.append(
            [
                Cell(text=cell.cell),
                Cell(text=status),
                plain(bits_per_weight(record) if record else None, "{:.2f}"),
                plain(found and found.coverage, "{:.1%}"),
                plain(found and found.weight_error, "{:.4f}"),
                Cell(text=f"{worst.weight_error:.4f}", sort=worst.weight_error, title=worst.name)
                if worst
                else Cell(text=NO_VALUE),
                plain((found and found.levels) or None, "{:d}"),
                plain(found and found.logits_moved, "{:.3g}"),
                Cell(text=_left_out(found) if found else ""),
                Cell(text=reason),
            ]
        )
    caption = (
        "Proof that each cell was quantized as it says, measured before it was scored. Weight "
        "error: ‖W′ − W‖ / ‖W‖. Coverage: share of the weights of all matrices but the embeddings "
        "and the LM head. Levels: most distinct values in a group. Bits: as stored, scales and "
        "zeros counted."
    )
    yield build("audit", "audit", "Audit of every cell", caption, head, rows, keys=1)


def _layers(found: object) -> bool:
    return found is not None and bool(found.modules)


def provenance(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Record", "Normalizer/kernel", "Hardware", "Python", "qbench", "Revision",
            "Finished"]  # fmt: skip
    rows = [
        [
            Cell(text=record.cell),
            Cell(text=record.key[:KEY_DIGITS], title=record.key),
            Cell(text=record.attention),
            Cell(text=f"{record.environment.hardware} ({record.environment.device})"),
            Cell(text=record.environment.python),
            Cell(text=record.environment.qbench),
            Cell(text=(record.environment.git_revision or NO_VALUE)[:10]),
            Cell(text=f"{record.finished:%Y-%m-%d %H:%M}"),
        ]
        for record in comparison.records.values()
    ]
    if rows:
        caption = "Where every record comes from. A record's name is the beginning of its key."
        yield build("provenance", "provenance", "Records", caption, head, rows, keys=1)
