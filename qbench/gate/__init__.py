"""The CI gate: baselines, the check against them, the verdict as files. No torch."""
