"""See where the time of a run went: record it, split its bubbles, compare it with a prediction."""
