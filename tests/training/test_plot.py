"""The curves of a recipe's trainings."""

from qbench.training.log import draw


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
