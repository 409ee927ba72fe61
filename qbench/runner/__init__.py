"""Where and how cells run: the grid, worker processes, progress, clusters."""
