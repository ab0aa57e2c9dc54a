"""A conversation in progress, and its conversion to a row of decisions.

A row is one token sequence of the prompt, the responses of the policy and the observations of the environment; the
policy decided the tokens in the mask. A unit is a turn, whose reward is at the last token of its response. Fields of
`Decisions.extra`:

    tokens (N, L) int64     the whole conversation, zeros after its end
    chosen (N, T) int64     the token of each decision; of batches
    start (N,) int64        index of the first column of the decisions in `tokens`
    temperature (N,)        sampling temperature of the tokens
    truncated (N,) bool     a response reached the budget before it ended
    order (N, T) int64      generation order of masked diffusion (`contrib/text_diffusion`)
    observation, action (N, T) int64    hash of the last observation before a response, and of the response
    answer, signature (N,) int64        hash of the last answer, and of all responses
    structural (N, T) bool              ends of responses
    first_event (N,) int64, gate (N, T) bool    tasks with tools: column of the first response with a call, -1 without
                            one, and first tokens of responses, which choose between tools and answers
    subgoal, switch (N, T) bool     tasks that mark responses with subgoals: their decisions
    blamed_unit (N,) int64  tasks that grade the advantage of responses: the first of the worst, -1 if none is below 0
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

COLUMNS = ("tokens", "own", "logp", "entropy", "order", "unit", "support")  # one entry per token behind the prompt
NEUTRAL_CONTEXTS = ("instruction", "mode", "summary")  # kinds of contexts without information on the solution


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
    turn_rewards: list[float] = field(default_factory=list[float])  # reward of each turn
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
        """Append tokens that the policy sampled in this order, or, without an order, given tokens."""
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
        """Of all turns."""
        return sum(self.turn_rewards)

    def rewards(self) -> list[float]:
        """Reward of every column: the reward of a turn is at its last token of the policy."""
        ends = {unit: place for place, unit in enumerate(self.columns["unit"]) if self.columns["own"][place]}
        at = {ends[unit]: reward for unit, reward in enumerate(self.turn_rewards) if unit in ends}
        return [at.get(place, 0.0) for place in range(len(self.columns["unit"]))]

    @property
    def assisted(self) -> bool:
        """Whether the task came with a hint, a failure or a prefix; `NEUTRAL_CONTEXTS` do not count."""
        context: Mapping[str, Any] = self.task.context or {}
        began = self.task.prefix is not None and bool(self.task.prefix["assisted"])
        return began or context.get("kind", "mode") not in NEUTRAL_CONTEXTS

    def rollout_metrics(self, most: int) -> dict[str, float]:
        """Metrics of the trajectory, whose budget is `most` tokens."""
        length = float(self.prior_tokens + sum(self.columns["own"]))
        found = {"length": length, "brevity": max(1.0 - length / most, 0.0), "turns": float(len(self.responses))}
        found |= {name: float(getattr(self, name)) for name in ("success", "truncated", "reward_failed", "assisted")}
        found["concise"] = found["brevity"] * found["success"]
        found |= {name: fmean(values) for name, values in self.metrics.items()}
        if FORMAT in found:
            found["malformed"] = 1.0 - found[FORMAT]
        return found if self.calls is None else found | {"calls": float(self.calls)}

    def first_event(self) -> int:
        """Column of the response with the first call, -1 without one."""
        columns = zip(self.columns["unit"], self.columns["own"], strict=True)
        return next((place for place, (unit, own) in enumerate(columns) if own and unit == self.first_call), -1)

    def blamed_turn(self) -> int:
        """Index of the first response with the lowest advantage, -1 where none is below 0."""
        worst = min(self.metrics[ADVANTAGE])
        return self.metrics[ADVANTAGE].index(worst) if worst < 0 else -1

    def turn_openings(self) -> list[bool]:
        """Whether each column is the first token of a response."""
        begins = set(self.turn_starts[: len(self.responses)])
        return [own and place in begins for place, own in enumerate(self.columns["own"])]


def conversation_rows(
    conversations: Sequence[Conversation], eos: int, *, ordered: bool, vocabulary: int | None
) -> list[Decisions]:
    """A row `(1, T)` per conversation; see the module docstring.

    Args:
        conversations: Conversations of any length.
        eos: Token that ends messages.
        ordered: Whether the rows have the generation order of tokens.
        vocabulary: Vocabulary size, for rows with the support of every token; None: without.
    """

    def row(name: str) -> list[list[Any]]:
        return [conversation.columns[name] for conversation in conversations]

    own = _each(
        [
            [mine and not conversation.reward_failed for mine in conversation.columns["own"]]
            for conversation in conversations
        ],
        torch.bool,
    )
    ends = _each([[token == eos for token in tokens] for tokens in row("tokens")], torch.bool)
    observations = [
        [_number(conversation.episode.prompt), *map(_number, conversation.observations)]
        for conversation in conversations
    ]
    responses = [
        [*map(_number, conversation.responses), 0] for conversation in conversations
    ]  # no response follows the last one
    columns = {
        "tokens": _each(
            [conversation.prompt + conversation.columns["tokens"] for conversation in conversations], torch.int64
        ),
        "structural": [end & mine for end, mine in zip(ends, own, strict=True)],
        "observation": _each(_of_units(observations, row("unit")), torch.int64),
        "action": _each(_of_units(responses, row("unit")), torch.int64),
    }
    if ordered:
        columns["order"] = _each(row("order"), torch.int64)
    once = {
        "start": torch.tensor([len(conversation.prompt) for conversation in conversations]),
        "temperature": torch.tensor([conversation.task.temperature for conversation in conversations]),
        "truncated": torch.tensor([conversation.truncated for conversation in conversations]),
        "answer": torch.tensor(
            [_number(conversation.answer or "".join(conversation.responses[-1:])) for conversation in conversations]
        ),
        "signature": torch.tensor([_number("\0".join(conversation.responses)) for conversation in conversations]),
    }
    columns |= {name: list(values.split(1)) for name, values in once.items()}
    logp, entropy = (_each(row(name), torch.float32) for name in ("logp", "entropy"))
    reward = _each([conversation.rewards() for conversation in conversations], torch.float32)
    unit = _each(row("unit"), torch.int64)
    rows: list[Decisions] = []
    for place, conversation in enumerate(conversations):
        extra = {name: values[place] for name, values in columns.items()}
        if conversation.calls is not None:
            turn_openings = torch.tensor([conversation.turn_openings()], dtype=torch.bool)
            extra |= {"first_event": torch.tensor([conversation.first_event()]), "gate": own[place] & turn_openings}
        if SUBGOAL in conversation.metrics:
            grades = [*conversation.metrics[SUBGOAL], 0.0]  # a last response without a valid reward has none
            announced = torch.tensor([[grades[number] > 0 for number in conversation.columns["unit"]]])
            extra |= dict.fromkeys(("subgoal", "switch"), own[place] & announced)
        if ADVANTAGE in conversation.metrics:
            extra["blamed_unit"] = torch.tensor([conversation.blamed_turn()])
        if vocabulary is not None:
            everything = torch.ones(vocabulary, dtype=torch.bool)
            support = [everything if among is None else among for among in conversation.columns["support"]]
            extra["support"] = torch.stack(support)[None]
        fields = {"mask": own, "reward": reward, "entropy": entropy, "unit": unit}
        rows.append(Decisions(logp[place], **{name: values[place] for name, values in fields.items()}, extra=extra))
    return rows


def _each(rows: Sequence[Sequence[Any]], kind: torch.dtype) -> list[Tensor]:
    """A tensor `(1, L)` per row; made at once, as many small ones take long."""
    flat = torch.tensor([value for row in rows for value in row], dtype=kind)
    return [part[None] for part in flat.split([len(row) for row in rows])]


def _of_units(numbers: Sequence[Sequence[int]], units: Sequence[Sequence[int]]) -> list[list[int]]:
    """The number of each column's unit."""
    return [[row[unit] for unit in places] for row, places in zip(numbers, units, strict=True)]


def _number(text: str) -> int:
    """Hash of a text, equal on every machine."""
    return zlib.crc32(text.strip().encode())
