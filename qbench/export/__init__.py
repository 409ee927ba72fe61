"""A results folder in the formats of others: one file a format, each with a ``write``. No torch."""
