"""The command, ``qbench`` or ``python -m qbench``: Ctrl-C while it starts is one line too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from qbench.cli import main as command

        command()
    except KeyboardInterrupt:  # before, or after, a command is in charge of it
        print("stopped; finished cells are kept, run the same command to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
