"""``python -m qbench``."""

from qbench.cli import main

main()
