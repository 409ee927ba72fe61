"""Where and how cells run: the grid, executors, the work of a cell, progress."""
