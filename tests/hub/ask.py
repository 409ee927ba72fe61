"""What planning asks of the hub, without the rest of planning: for a process of its own."""

import sys
from pathlib import Path

from qbench import hub
from qbench.checkpoints import find
from qbench.errors import QbenchError
from qbench.running.quiet import redirected, terminal


def main(kind: str, name: str, detail: str) -> None:
    try:
        # as the commands plan: what libraries log goes to a file
        with (
            terminal() as screen,
            redirected(Path("ask.log")),
            hub.announcing(lambda line: print(line, file=screen)),
        ):
            if kind == "checkpoint":
                checkpoint = find(name, revision=detail or None)
                found = f"{checkpoint.digest} {checkpoint.folder.name}"
            else:
                found = str(hub.dataset_file(name, detail))
    except QbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
