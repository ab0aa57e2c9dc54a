"""One batch per layout: every part of the core must treat them alike."""

from batches import decisions, shift

__all__ = ["decisions", "shift"]
