"""A conversation in progress, and its conversion to a row of decisions.

A row is one token sequence of the prompt, the responses of the policy and the observations of the environment; the
policy sampled the tokens in the mask. A unit is a turn, whose reward is at the last token of its response. Fields of
`Decisions.extra`:

    tokens (N, L) int64     the whole conversation, zeros after its end
    chosen (N, T) int64     the token of each decision; only in batches
    start (N,) int64        index of the first column of the decisions in `tokens`
    temperature (N,)        sampling temperature of the tokens
    truncated (N,) bool     a response reached the budget before it ended
    order (N, T) int64      generation order of masked diffusion (`contrib/text_diffusion`)
    observation, action (N, T) int64    hash of the last observation before a response, and of the response
    answer, signature (N,) int64        hash of the last answer, and of all responses
    structural (N, T) bool              ends of responses
    first_event (N,) int64, gate (N, T) bool    tasks with tools: column of the first response with a call (-1 if
                            none), and first tokens of responses, which choose between tools and answers
    subgoal, switch (N, T) bool     tasks that mark responses with subgoals: decisions of these responses
    blamed_unit (N,) int64  tasks that grade the advantage of responses: first response with the lowest advantage, -1
                            if none is below 0
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.task import ADVANTAGE, FORMAT, SUBGOAL, TextEpisode, Turn

COLUMNS = ("tokens", "own", "logp", "entropy", "order", "unit", "support")  # one entry per token after the prompt
NEUTRAL_CONTEXTS = ("instruction", "mode", "summary")  # kinds of context without information about the solution


@dataclass
class Conversation:
    """A conversation in progress."""

    task: Task
    episode: TextEpisode
    prompt: list[int]
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    responses: list[str] = field(default_factory=list)  # finished responses of the policy
    observations: list[str] = field(default_factory=list)  # observations after them
    prior_tokens: int = 0  # tokens of the policy before the summary that this window continues
    turn_starts: list[int] = field(default_factory=lambda: [0])  # first column of each response
    prefill: list[int] = field(default_factory=list)  # given tokens of an unfinished response
    turn_rewards: list[float] = field(default_factory=list[float])
    answer: str | None = None  # answer extracted from the last response, if the task extracts one
    success: bool = False
    done: bool = False
    truncated: bool = False
    reward_failed: bool = False
    calls: int | None = None  # tool calls, if the task has tools
    first_call: int = -1  # index of the response with the first call
    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # values of each turn

    def append_tokens(
        self,
        tokens: Sequence[int],
        order: Sequence[int] = (),
        *,
        support: Sequence[Tensor] = (),
        **scores: Sequence[float],
    ) -> None:
        """Append tokens that the policy sampled in this order, or given tokens if there is no order."""
        self.columns["tokens"] += tokens
        self.columns["own"] += [bool(order)] * len(tokens)
        self.columns["order"] += order or [0] * len(tokens)
        for name in ("logp", "entropy"):
            self.columns[name] += scores.get(name, [0.0] * len(tokens))
        self.columns["unit"] += [len(self.responses)] * len(tokens)
        self.columns["support"] += support or [None] * len(tokens)

    def add_turn(self, turn: Turn) -> None:
        """Record the observation and the metrics after the last response."""
        self.observations.append(turn.reply)
        self.answer = turn.answer
        for name, value in turn.metrics.items():
            self.metrics.setdefault(name, []).append(value)
        if turn.calls is not None:
            self.calls = (self.calls or 0) + turn.calls
            if turn.calls and self.first_call < 0:
                self.first_call = len(self.responses) - 1

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum(self.turn_rewards)

    def rewards(self) -> list[float]:
        """Return the reward of every column: the reward of a turn is at the last token of its response."""
        ends = {unit: place for place, unit in enumerate(self.columns["unit"]) if self.columns["own"][place]}
        at = {ends[unit]: reward for unit, reward in enumerate(self.turn_rewards) if unit in ends}
        return [at.get(place, 0.0) for place in range(len(self.columns["unit"]))]

    @property
    def assisted(self) -> bool:
        """Whether the task has a hint, a failed attempt or an assisted prefix; `NEUTRAL_CONTEXTS` do not count."""
        context: Mapping[str, Any] = self.task.context or {}
        began = self.task.prefix is not None and bool(self.task.prefix["assisted"])
        return began or context.get("kind", "mode") not in NEUTRAL_CONTEXTS

    def rollout_metrics(self, budget: int) -> dict[str, float]:
        """Compute the metrics of the trajectory, whose budget is `budget` tokens."""
        length = float(self.prior_tokens + sum(self.columns["own"]))
        found = {"length": length, "brevity": max(1.0 - length / budget, 0.0), "turns": float(len(self.responses))}
        found |= {name: float(getattr(self, name)) for name in ("success", "truncated", "reward_failed", "assisted")}
        found["concise"] = found["brevity"] * found["success"]
        found |= {name: fmean(values) for name, values in self.metrics.items()}
        if FORMAT in found:
            found["malformed"] = 1.0 - found[FORMAT]
        return found if self.calls is None else found | {"calls": float(self.calls)}

    def first_event(self) -> int:
        """Return the column of the response with the first call, -1 if there is none."""
        columns = zip(self.columns["unit"], self.columns["own"], strict=True)
        return next((place for place, (unit, own) in enumerate(columns) if own and unit == self.first_call), -1)

    def blamed_turn(self) -> int:
        """Return the index of the first response with the lowest advantage, -1 if none is below 0."""
        worst = min(self.metrics[ADVANTAGE])
        return self.metrics[ADVANTAGE].index(worst) if worst < 0 else -1

    def turn_openings(self) -> list[bool]:
        """Return whether each column is the first token of a response."""
        begins = set(self.turn_starts[: len(self.responses)])
        return [own and place in begins for place, own in enumerate(self.columns["own"])]


def conversation_rows(
    conversations: Sequence[Conversation], eos: int, *, ordered: bool, vocabulary: int | None
) -> list[Decisions]:
    """Convert each conversation to a row `(1, T)` with the fields of the module docstring.

    Args:
        conversations: Conversations of any length.
        eos: Token that ends messages.
        ordered: Add the generation order of tokens.
        vocabulary: Vocabulary size, to add the support of every token; None: no support.
    """

    def values_of(name: str) -> list[list[Any]]:
        return [one.columns[name] for one in conversations]

    own = _row_tensors(
        [[sampled and not one.reward_failed for sampled in one.columns["own"]] for one in conversations], torch.bool
    )
    ends = _row_tensors([[token == eos for token in tokens] for tokens in values_of("tokens")], torch.bool)
    observations = [[_hash(one.episode.prompt), *map(_hash, one.observations)] for one in conversations]
    responses = [[*map(_hash, one.responses), 0] for one in conversations]  # no response follows the last one
    units = values_of("unit")
    columns = {
        "tokens": _row_tensors([one.prompt + one.columns["tokens"] for one in conversations], torch.int64),
        "structural": [end & sampled for end, sampled in zip(ends, own, strict=True)],
        "observation": _row_tensors(_per_column(observations, units), torch.int64),
        "action": _row_tensors(_per_column(responses, units), torch.int64),
    }
    if ordered:
        columns["order"] = _row_tensors(values_of("order"), torch.int64)
    per_row = {
        "start": torch.tensor([len(one.prompt) for one in conversations]),
        "temperature": torch.tensor([one.task.temperature for one in conversations]),
        "truncated": torch.tensor([one.truncated for one in conversations]),
        "answer": torch.tensor([_hash(one.answer or "".join(one.responses[-1:])) for one in conversations]),
        "signature": torch.tensor([_hash("\0".join(one.responses)) for one in conversations]),
    }
    columns |= {name: list(values.split(1)) for name, values in per_row.items()}
    logp, entropy = (_row_tensors(values_of(name), torch.float32) for name in ("logp", "entropy"))
    reward = _row_tensors([one.rewards() for one in conversations], torch.float32)
    unit = _row_tensors(units, torch.int64)
    rows: list[Decisions] = []
    for place, conversation in enumerate(conversations):
        extra = {name: values[place] for name, values in columns.items()}
        if conversation.calls is not None:
            turn_openings = torch.tensor([conversation.turn_openings()], dtype=torch.bool)
            extra |= {"first_event": torch.tensor([conversation.first_event()]), "gate": own[place] & turn_openings}
        if SUBGOAL in conversation.metrics:
            grades = [*conversation.metrics[SUBGOAL], 0.0]  # a last response without a valid reward has no grade
            announced = torch.tensor([[grades[number] > 0 for number in conversation.columns["unit"]]])
            extra |= dict.fromkeys(("subgoal", "switch"), own[place] & announced)
        if ADVANTAGE in conversation.metrics:
            extra["blamed_unit"] = torch.tensor([conversation.blamed_turn()])
        if vocabulary is not None:
            full = torch.ones(vocabulary, dtype=torch.bool)
            support = [full if tokens is None else tokens for tokens in conversation.columns["support"]]
            extra["support"] = torch.stack(support)[None]
        fields = {"mask": own, "reward": reward, "entropy": entropy, "unit": unit}
        rows.append(Decisions(logp[place], **{name: values[place] for name, values in fields.items()}, extra=extra))
    return rows


def _row_tensors(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[Tensor]:
    """Create a tensor `(1, L)` per row from a single tensor: many small ones are slow."""
    flat = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return [part[None] for part in flat.split([len(row) for row in rows])]


def _per_column(values: Sequence[Sequence[int]], units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the value of each column's unit."""
    return [[row[unit] for unit in columns] for row, columns in zip(values, units, strict=True)]


def _hash(text: str) -> int:
    """Hash a text; the result is equal on every machine."""
    return zlib.crc32(text.strip().encode())
