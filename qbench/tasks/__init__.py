"""Tasks that come with qbench, as definitions of lm-eval."""
