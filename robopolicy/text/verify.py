"""Verifiers of responses, `(completion, answer) -> reward` in [0, 1], and extraction of the answer, by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from robopolicy.optional import require

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
NUMBER = re.compile(rf"((?:(?<![\w.)\]])[-+])?{DIGITS})(?:/({DIGITS}))?")  # a sign after an operand is an operator
MINUS = "\N{MINUS SIGN}"
TOLERANCE = 1e-9  # of numbers that are no integers; relative below 1


def exact(completion: str, answer: str) -> float:
    """Return 1 if both texts are equal except for surrounding whitespace."""
    return float(completion.strip() == answer.strip())


def number(completion: str, answer: str) -> float:
    """Return 1 if the last numbers of completion and answer are equal: `1,000`, `-0.5`, `.5`, `2e3` or `1/2`."""
    found, target = _last_number(completion), _last_number(answer)
    if found is None or target is None:
        return 0.0
    whole = found.denominator == target.denominator == 1
    return float(found == target or (not whole and abs(found - target) <= TOLERANCE * min(1, abs(target))))


def mathematics(completion: str, answer: str) -> float:
    """Return 1 if `math-verify` finds both expressions equal; the whole answer is LaTeX, with or without `$`."""
    library = _math_verify()
    found = library.parse(completion, parsing_timeout=None)
    return float(library.verify(list(parsed_answer(answer)), found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def parsed_answer(answer: str) -> tuple[Any, ...]:
    """Return what `math-verify` reads in an answer; empty if it is no expression."""
    marked = "$" in answer or "\\boxed" in answer
    return tuple(_math_verify().parse(answer if marked else f"${answer}$", parsing_timeout=None))


def stated_number(completion: str) -> str | None:
    """Return the last number of the completion."""
    found = _last_number(completion)
    return None if found is None else str(found)


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


def _last_number(text: str) -> Fraction | None:
    numbers = NUMBER.findall(text.replace(MINUS, "-"))
    if not numbers:
        return None
    top, bottom = (part.replace(",", "") for part in numbers[-1])
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):  # thousands of digits, or x/0
        return None


VERIFIERS: dict[str, Callable[[str, str], float]] = {"exact": exact, "number": number, "math": mathematics}
ANSWER_EXTRACTORS: dict[str, Callable[[str], str | None]] = {"number": stated_number, "math": stated_expression}
"""Answer extractors by verifier."""
