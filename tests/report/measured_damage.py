"""Damage as a record has it, of one task."""

from __future__ import annotations

from qbench.records import Damage

ABOUT = {"stderr": 0.01, "documents": 120}
DAMAGE = Damage.model_validate(
    {
        "tasks": {
            "arc_easy": {
                "distributions": {
                    "tokens": 4321,
                    "kl": {"mean": 0.0421, "median": 0.02, "p90": 0.1, "p99": 0.61, "p99_9": 1.0,
                           "largest": 2.0},
                    "top1_agreement": 0.913,
                    "target_change": {"value": -0.1, **ABOUT},
                },
                "flips": {"acc": {"documents": 120, "right_to_wrong": 7, "wrong_to_right": 4}},
                "correct_answer": {"value": -0.0312, **ABOUT},
            }
        }
    }
)  # fmt: skip
