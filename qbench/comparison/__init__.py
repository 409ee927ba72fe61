"""Compare the records of a results folder: scores, effects with error bars, changes. No torch."""
