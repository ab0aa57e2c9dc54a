"""What all tests of this folder may ask for."""

from layouts import decisions, shift

__all__ = ["decisions", "shift"]
