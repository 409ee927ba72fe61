"""Text for people: numbers as papers print them, Markdown tables, foreign names made harmless."""
