"""Network building blocks."""
