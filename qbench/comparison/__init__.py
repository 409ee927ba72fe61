"""Records side by side: scores, effects with error bars, changes. No torch."""
