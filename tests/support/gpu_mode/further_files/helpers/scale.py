"""The constant."""

FACTOR = 0.75
