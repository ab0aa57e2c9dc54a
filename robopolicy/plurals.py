"""Numbers with their nouns in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return e.g. `1 episode` or `3 episodes`, for nouns with a regular plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
