"""Run cells: their order, worker processes, progress, clusters."""
