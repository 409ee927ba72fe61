"""The CI gate: make a baseline, compare results with it, write the verdict. Imports no torch."""
