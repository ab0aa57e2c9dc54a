"""Text datasets: one JSON object per line (.jsonl) or the rows of a .parquet file, with these columns.

    prompts         prompt, answer; verify: exact | number | math (exact); split: train | test (by a hash of the prompt)
    demonstrations  prompt, completion; or messages: user and assistant alternate
    pairs           prompt, chosen, rejected
    offline         prompt, completion, reward; or messages, and rewards: one per assistant message

A file of prompts is a task, `prompts/FILE`, or `prompts/FILE:BYTES` for messages of at most BYTES bytes (default 1024).
Other columns are ignored. Errors name the file, row and column.
"""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy.text.task import SingleTurn, TextTask, check_fits, check_text, is_held_out
from robopolicy.text.verify import ANSWER_EXTRACTORS, VERIFIERS, parsed_answer

MAX_PROMPT_BYTES = 4096  # of tasks from files
DEFAULT_COMPLETION_BYTES, MAX_COMPLETION_BYTES = 1024, 1 << 16  # size of messages without BYTES, and largest BYTES


@dataclass(frozen=True)
class WrittenConversation:
    """A conversation of a dataset with its rewards."""

    messages: list[str]  # user and assistant alternate
    rewards: list[float]  # one per assistant message
    group: int  # group id: the row of a pair, the prompt of a log
    location: str  # file and row

    @property
    def reward(self) -> float:
        """Sum of the rewards."""
        return sum(self.rewards)


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl or .parquet file.

    Raises:
        UserError: The file is missing, empty, damaged or of another type.
    """
    file = Path(path)
    if file.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{file} must end with .jsonl or .parquet.")
    try:
        if file.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(file).to_pylist()
        else:
            lines = file.read_text(encoding="utf-8").split("\n")  # texts may contain other line endings
            rows = [_json(line, file, number) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}.") from error
    if not rows:
        raise UserError(f"{file} has no rows.")
    return rows


def read_demonstrations(path: str) -> list[WrittenConversation]:
    """Read solved conversations; only the last message of each is rewarded."""
    written: list[WrittenConversation] = []
    for number, row in enumerate(read_rows(path), 1):
        messages = _messages(row, where := f"{path} row {number}")
        written.append(WrittenConversation(messages, [0.0] * (len(messages) // 2 - 1) + [1.0], number, where))
    return written


def read_pairs(path: str) -> list[WrittenConversation]:
    """Read two conversations per row: the chosen completion with reward 1, the rejected one with 0."""
    written: list[WrittenConversation] = []
    for number, row in enumerate(read_rows(path), 1):
        where = f"{path} row {number}"
        prompt, chosen, rejected = (_text(row, key, where) for key in ("prompt", "chosen", "rejected"))
        if chosen == rejected:
            raise UserError(f"{where}: 'chosen' and 'rejected' are equal; remove the row.")
        pair = (chosen, 1.0), (rejected, 0.0)
        written += [WrittenConversation([prompt, text], [reward], number, where) for text, reward in pair]
    return written


def read_offline(path: str) -> list[WrittenConversation]:
    """Read completions with rewards; completions of one prompt form a group."""
    groups: dict[str, int] = {}
    written: list[WrittenConversation] = []
    for number, row in enumerate(read_rows(path), 1):
        where = f"{path} row {number}"
        messages = _messages(row, where)
        rewards = [row.get("reward")] if row.get("messages") is None else row.get("rewards")
        if not isinstance(rewards, list) or 2 * len(rewards) != len(messages):
            raise UserError(f"{where}: 'rewards' must be {len(messages) // 2} numbers, one for each assistant message.")
        numbers = [_reward(reward, where) for reward in rewards]
        written.append(WrittenConversation(messages, numbers, groups.setdefault(messages[0], len(groups)), where))
    return written


READERS: dict[str, Callable[[str], list[WrittenConversation]]] = {
    "demonstrations": read_demonstrations,
    "pairs": read_pairs,
    "offline": read_offline,
}
"""`data` of a recipe -> reader of its file."""


class PromptTask(TextTask):
    """The prompts of a file as a task; seed s is row s modulo the number of rows, of the file or of one side."""

    prompt_bytes = MAX_PROMPT_BYTES

    def __init__(self, name: str) -> None:
        """Read the file of a name FILE or FILE:BYTES; raise a UserError if the size or the file is invalid."""
        self.name = f"prompts/{name}"
        match = re.fullmatch(r"(.+\.(?:jsonl|parquet)):([^/]*)", name)
        path, size = (name, str(DEFAULT_COMPLETION_BYTES)) if match is None else match.groups()
        if not re.fullmatch(r"\d{1,9}", size) or not 1 <= int(size) <= MAX_COMPLETION_BYTES:
            raise UserError(f"BYTES of prompts/{path}:BYTES must be 1 to {MAX_COMPLETION_BYTES}, got '{size}'.")
        self.completion_bytes = int(size)
        rows = [(row, f"{path} row {number}") for number, row in enumerate(read_rows(path), 1)]
        self._rows = [_prompt(*row) for row in rows]
        sides: dict[str, bool] = {}  # prompt -> whether it is held out
        for (prompt, *_), row in zip(self._rows, rows, strict=True):
            held_out = _is_test(prompt, *row)
            if sides.setdefault(prompt, held_out) != held_out:
                raise UserError(f"{row[1]}: the prompt is in both splits; remove one of the rows.")
        self._sides = {side: [n for n, row in enumerate(self._rows) if sides[row[0]] == side] for side in (False, True)}
        self._held_out = frozenset(self._sides[True])

    def episode(self, seed: int) -> SingleTurn:
        """Return the problem of a row."""
        prompt, answer, verify = self._rows[seed % len(self._rows)]
        verifier, extract = VERIFIERS[verify], ANSWER_EXTRACTORS.get(verify)
        return SingleTurn(prompt, lambda completion: verifier(completion, answer), answer, extract_answer=extract)

    @cached_property
    def held_out_problems(self) -> tuple[int, ...]:
        """Held-out rows with different prompts."""
        return tuple({self._rows[row][0]: row for row in reversed(self._sides[True])}.values())[::-1]

    def is_held_out(self, seed: int) -> bool:
        """Whether the row of a seed is for evaluation only."""
        return seed % len(self._rows) in self._held_out

    def _seed_on_side(self, seed: int, *, held_out: bool) -> int:
        """Return row `seed` modulo the number of rows of the side."""
        rows = self._sides[held_out]
        if not rows:
            side, column = ("held-out", "test") if held_out else ("training", "train")
            raise UserError(
                f"{self.name} has no {side} prompts; add rows, or mark some by a column split with {column}."
            )
        return rows[seed % len(rows)]


def _json(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{file} line {number} is not JSON: {reason}.") from error
    if not isinstance(row, dict):
        raise UserError(f"{file} line {number} must be an object, found {type(row).__name__}.")
    return row


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        found = "it is missing" if key not in row else f"found {value!r}"
        raise UserError(f"{where}: '{key}' must be a text, {found}; columns: {', '.join(map(str, row))}.")
    check_text(value, f"{where}: '{key}'")
    return value


def _messages(row: dict[str, Any], where: str) -> list[str]:
    messages = row.get("messages")
    if messages is None:
        return [_text(row, key, where) for key in ("prompt", "completion")]
    texts = isinstance(messages, list) and all(isinstance(text, str) for text in messages)
    if not texts or not messages or len(messages) % 2:
        raise UserError(
            f"{where}: 'messages' must be texts that alternate between user and assistant and end with the assistant."
        )
    for number, text in enumerate(messages, 1):
        check_text(text, f"{where}: message {number}")
    return messages


def _reward(value: Any, where: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UserError(f"{where}: 'reward' must be a finite number, found {reprlib.repr(value)}.")


def _prompt(row: dict[str, Any], where: str) -> tuple[str, str, str]:
    verify = row.get("verify") or "exact"
    if not isinstance(verify, str) or verify not in VERIFIERS:
        raise UserError(f"{where}: 'verify' must be one of {', '.join(VERIFIERS)}, found {verify!r}.")
    prompt = _text(row, "prompt", where)
    check_fits(prompt, MAX_PROMPT_BYTES, f"{where}: 'prompt'")
    answer = _text(row, "answer", where)
    if verify == "math" and not parsed_answer(answer):
        raise UserError(f"{where}: 'answer' is no expression that math-verify can read, {reprlib.repr(answer)}.")
    return prompt, answer, verify


def _is_test(prompt: str, row: dict[str, Any], where: str) -> bool:
    split = row.get("split")
    if split not in (None, "train", "test"):
        raise UserError(f"{where}: 'split' must be train or test, found {split!r}.")
    return is_held_out(prompt) if split is None else split == "test"
