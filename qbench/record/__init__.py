"""What is written to disk of a cell: typed to the bottom. Imports no torch."""

from qbench.record.audit import (
    ActivationAudit,
    Audit,
    HeadsAudit,
    InputAudit,
    KVAudit,
    KVModuleAudit,
    Leak,
    ModuleAudit,
)
from qbench.record.damage import (
    Damage,
    Distributions,
    Divergence,
    Flips,
    Ratio,
    TaskDamage,
    Unavailable,
)
from qbench.record.environment import Environment
from qbench.record.precision import Part, Precision
from qbench.record.record import (
    ANSWER_CHARACTERS,
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
    RESPONSE_DEFAULTS,
    SCHEMA_VERSION,
    Grid,
    GridCell,
    Record,
    Score,
    Stage,
    StoredTable,
)
from qbench.record.scoring import DifferenceFromExact, SampleDifference, ScoringReport
from qbench.record.training import Trained, Training
from qbench.record.written import Digest, Line, Name, TaskName, Written

__all__ = [
    "ANSWER_CHARACTERS",
    "OUTCOME_COLUMNS",
    "RESPONSE_COLUMNS",
    "RESPONSE_DEFAULTS",
    "SCHEMA_VERSION",
    "ActivationAudit",
    "Audit",
    "Damage",
    "DifferenceFromExact",
    "Digest",
    "Distributions",
    "Divergence",
    "Environment",
    "Flips",
    "Grid",
    "GridCell",
    "HeadsAudit",
    "InputAudit",
    "KVAudit",
    "KVModuleAudit",
    "Leak",
    "Line",
    "ModuleAudit",
    "Name",
    "Part",
    "Precision",
    "Ratio",
    "Record",
    "SampleDifference",
    "Score",
    "ScoringReport",
    "Stage",
    "StoredTable",
    "TaskDamage",
    "TaskName",
    "Trained",
    "Training",
    "Unavailable",
    "Written",
]
