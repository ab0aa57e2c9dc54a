"""Verifiers of responses by name, `(completion, answer) -> reward` in [0, 1], and extraction of the answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from robopolicy.optional import require

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def exact(completion: str, answer: str) -> float:
    """The same text but for surrounding space."""
    return float(completion.strip() == answer.strip())


def number(completion: str, answer: str) -> float:
    """The last number of the completion equals that of the answer."""
    found, wanted = _last_number(completion), _last_number(answer)
    return float(found is not None and wanted is not None and abs(found - wanted) <= 1e-9 * max(1.0, abs(wanted)))


def mathematics(completion: str, answer: str) -> float:
    """`math-verify` finds both equal as expressions, LaTeX included."""
    library = _math_verify()
    gold = library.parse(answer, parsing_timeout=None)
    found = library.parse(completion, parsing_timeout=None)
    return float(library.verify(gold, found, timeout_seconds=None))


def stated_number(completion: str) -> str | None:
    """The last number of the completion."""
    found = _last_number(completion)
    return None if found is None else repr(found)


def stated_expression(completion: str) -> str | None:
    """What `math-verify` reads in the completion."""
    found = _math_verify().parse(completion, parsing_timeout=None)
    return str(found[0]) if found else None


def _math_verify() -> Any:
    """The library without its time limit, which needs the main thread; `RewardRunner` has one."""
    library = require("math_verify", "text")
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").addFilter(_of_interest)
    return library


def _of_interest(record: logging.LogRecord) -> bool:
    """Whether a log record is not the message about the disabled time limit, which each call logs."""
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
