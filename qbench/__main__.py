"""The command, ``qbench`` or ``python -m qbench``: Ctrl-C while it starts is one line too."""

from __future__ import annotations

import atexit
import gc
import sys

from qbench.machine.clock import mark
from qbench.machine.interrupt import CODE, STOPPED, settle_interrupts


def main() -> None:
    mark("command begins")
    # Python's last act is to look for garbage in all that was ever imported: half a second.
    atexit.register(gc.freeze)
    settle_interrupts()
    try:
        from qbench.cli.app import main as command

        command()
    except KeyboardInterrupt:  # before, or after, a command is in charge of it
        print(STOPPED, file=sys.stderr)
        sys.exit(CODE)


if __name__ == "__main__":
    main()
