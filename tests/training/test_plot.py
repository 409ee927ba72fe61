"""The curves of a recipe's trainings."""

from qbench.training.log import plot
from qbench.training.runs import draw


def test_curves_name_each_normalizer_once_with_its_seeds(tmp_path):
    line = {"kind": "step", "step": 5, "loss": 2.0, "grad_norm": 0.6}
    again = line | {"step": 10, "grad_norm": 0.9}
    plot({(n, s): [line, again] for s in (0, 1) for n in ("softmax", "softpick")},
         tmp_path / "curves.svg")  # fmt: skip
    text = (tmp_path / "curves.svg").read_text()
    assert text.count("<!-- softmax, seeds 0, 1 -->") == 1


def test_runs_of_several_commands_are_drawn_together(tmp_path):
    for name in ("softmax-seed0", "softmax-seed2", "my-own-seed1"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "log.jsonl").write_text(
            '{"kind": "step", "step": 5, "tokens": 9, "loss": 2.0, "grad_norm": 0.6, '
            '"learning_rate": 0.1, "tokens_per_s": 1.0, "mfu": null}\n' * 2 + '{"kind": "st'
        )
    text = draw(tmp_path).read_text()
    assert text.count("<!-- softmax, seeds 0, 2 -->") == 1
    assert text.count("<!-- my-own, seed 1 -->") == 1
