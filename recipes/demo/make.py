"""Make the demo's text again: its tasks' data, its calibration text, and what to train on.

    python recipes/demo/make.py                             # tasks and calibration, here
    python recipes/demo/make.py --text training/demo.jsonl  # the training text alone

The files come out byte for byte the same on every machine and Python version. A pair is trained on
the text with recipes/train/pair-1m.yaml, which says how.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import held_out_triples, make_data, make_training, write_data

HERE = Path(__file__).parent


def main() -> None:
    """Read the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=100_000, help="training documents")
    parser.add_argument("--text", type=Path, help="write the training text here, as JSON Lines")
    parser.add_argument("--out", type=Path, default=HERE, help="of tasks (this folder)")
    options = parser.parse_args()

    world, evaluation, calibration = make_data(options.seed)
    if options.text is None:
        write_data(options.out, evaluation, calibration)
        return
    texts = make_training(world, options.seed, held_out_triples(evaluation), options.documents)
    options.text.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    options.text.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
