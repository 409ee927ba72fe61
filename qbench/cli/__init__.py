"""The command line: one module a kind of command; ``app`` puts them together."""
