"""Numbers with their nouns in messages."""

from __future__ import annotations


def counted(number: int | str, noun: str) -> str:
    """Return e.g. `1 episode`, `3 episodes` or, of a formatted number, `2.5 ticks`; nouns have a regular plural."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"
