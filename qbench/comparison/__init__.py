"""Records side by side: scores, effects with error bars, changes, noise floors. No torch."""
