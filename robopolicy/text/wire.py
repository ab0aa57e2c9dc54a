"""Texts as tensors: what a text simulator shows and takes is UTF-8 bytes, as a robot's are SI units.

The tokenizer lives inside the policy, like every normaliser, so tasks, checkpoints and evaluation know none. A
conversation is one text whose messages, from the user and the policy in turn, are separated by `TURN`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robopolicy.errors import UserError

TURN = "\x1e"  # ASCII record separator
KEY = "text"  # of the observation


def pack(texts: Sequence[str], width: int) -> Tensor:
    """Texts as `(N, width)` float32, filled up with zeros; what does not fit is cut at the end."""
    rows = torch.zeros(len(texts), width)
    for row, text in zip(rows, texts, strict=True):
        data = text.encode("utf-8", errors="replace")[:width]
        if data:
            row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).float()
    return rows


def unpack(rows: Tensor) -> list[str]:
    """Inverse of `pack`, for `(N, width)` of any number type; broken UTF-8 is left out."""
    data = rows.to("cpu").round().clamp(0, 255).to(torch.uint8)
    return [bytes(row.tolist()).split(b"\0", 1)[0].decode("utf-8", errors="ignore") for row in data]


def flaw(text: str) -> str:
    """What a text holds that it may not, as it would end there or become another one; empty where there is nothing."""
    for mark, meaning in (("\0", "ends a text"), (TURN, "separates messages")):
        if mark in text:
            return f"U+{ord(mark):04X} as character {text.index(mark) + 1}, which {meaning}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} as character {error.start + 1}, half of a surrogate pair"
    return ""


def check_text(text: str, what: str) -> None:
    """Refuse a text with a `flaw`.

    Raises:
        UserError: It has one.
    """
    if found := flaw(text):
        raise UserError(f"{what} holds {found}; take it out.")


def check_fits(text: str, width: int, what: str) -> None:
    """Refuse a text that `pack` would cut: a prompt without its end asks something else.

    Raises:
        UserError: It is too long, or has a `flaw`.
    """
    check_text(text, what)
    size = len(text.encode("utf-8", errors="replace"))
    if size > width:
        raise UserError(f"{what} has {size} bytes, but there is room for {width}; shorten it.")


def messages(text: str) -> list[str]:
    """Messages of a conversation, the user's first."""
    return text.split(TURN)


def shortened(text: str, width: int) -> str:
    """The text as it is after `pack` and `unpack`."""
    return text.encode("utf-8", errors="replace")[:width].split(b"\0", 1)[0].decode("utf-8", errors="ignore")
