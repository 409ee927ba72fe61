"""Where and how cells run: the grid, executors, progress, what is known of the machine."""
