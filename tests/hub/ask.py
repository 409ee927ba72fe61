"""What planning asks of the hub, without the rest of planning: for a process of its own."""

import sys

from qbench.machine import settle

settle()  # as the command does, before the libraries are imported

from qbench import hub  # noqa: E402
from qbench.checkpoints import find  # noqa: E402
from qbench.errors import QbenchError  # noqa: E402


def main(kind: str, name: str, detail: str) -> None:
    try:
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
