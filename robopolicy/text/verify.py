"""Verifiers of responses, `(completion, answer) -> reward` in [0, 1], and extraction of the answer, by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from robopolicy.optional import require

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def exact(completion: str, answer: str) -> float:
    """Return 1 if both texts are equal except for surrounding whitespace."""
    return float(completion.strip() == answer.strip())


def number(completion: str, answer: str) -> float:
    """Return 1 if the last numbers of completion and answer are equal."""
    found, target = _last_number(completion), _last_number(answer)
    return float(found is not None and target is not None and abs(found - target) <= 1e-9 * max(1.0, abs(target)))


def mathematics(completion: str, answer: str) -> float:
    """Return 1 if `math-verify` finds both expressions equal; LaTeX is supported."""
    library = _math_verify()
    gold = library.parse(answer, parsing_timeout=None)
    found = library.parse(completion, parsing_timeout=None)
    return float(library.verify(gold, found, timeout_seconds=None))


def stated_number(completion: str) -> str | None:
    """Return the last number of the completion."""
    found = _last_number(completion)
    return None if found is None else repr(found)


def stated_expression(completion: str) -> str | None:
    """Return the expression that `math-verify` finds in the completion."""
    found = _math_verify().parse(completion, parsing_timeout=None)
    return str(found[0]) if found else None


def _math_verify() -> Any:
    """Return the library without the log records about its time limit, which we disable: it needs the main thread."""
    library = require("math_verify", "text")
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").addFilter(_is_relevant)
    return library


def _is_relevant(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    top, _, bottom = numbers[-1].replace(",", "").partition("/")
    return float(top) / float(bottom) if bottom and float(bottom) else float(top)


VERIFIERS: dict[str, Callable[[str, str], float]] = {"exact": exact, "number": number, "math": mathematics}
ANSWER_EXTRACTORS: dict[str, Callable[[str], str | None]] = {"number": stated_number, "math": stated_expression}
"""Answer extractors by verifier."""
