"""Fixtures with one batch per layout: every part of the core must treat both layouts in the same way."""

from batches import decisions, shift

__all__ = ["decisions", "shift"]
