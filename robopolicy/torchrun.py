"""Environment variables of `torchrun`, read without torch."""

from __future__ import annotations

import os

from robopolicy.errors import UserError


def process_count() -> int:
    """Number of processes of this run, 1 without `torchrun`; a value that is no number raises a UserError."""
    return _number("WORLD_SIZE", least=1) if os.environ.get("WORLD_SIZE", "").strip() else 1


def check_rank() -> None:
    """Raise a UserError if the rank of this process is not below the number of processes, which would wait for ever."""
    if _number("RANK", least=0) >= process_count():
        raise UserError(f"RANK must be below WORLD_SIZE={process_count()}; start the run by torchrun.")


def _number(name: str, *, least: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise UserError(f"{name} must be a number of at least {least}, got '{text}'; start the run by torchrun.")
    return int(text)
