"""Define the command line: a module per kind of command; ``app`` lists the commands."""
