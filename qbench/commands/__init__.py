"""The commands of ``qbench``, a module for each of: running, results, analysis, benchmarks."""
