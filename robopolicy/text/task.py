"""Text tasks: an episode starts with a prompt, takes completions and returns a verifiable reward."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError

KEY = "text"  # of the observation
TURN = "\x1e"  # ASCII record separator between messages
FORMAT = "format"  # metric: 1 for well-formed messages
SUBGOAL = "subgoal"  # metric: 1 for messages that announce a subgoal
HELD_OUT = 8  # one problem in eight is held out
MAX_DRAWS = 1000  # draws of a problem of one side of the split
SCANNED = 4096  # seeds among which a task with few problems has all of them
FIRST_DRAWS, FEW_REPEAT = 64, 0.9  # a task has many held-out problems if 90 % of the first 64 are different
ADVANTAGE = "advantage"  # metric of a critic: improvement by a message, may be negative


def pack(texts: Sequence[str], width: int) -> Tensor:
    """Encode texts as `(N, width)` float32, padded with zeros; longer texts are truncated."""
    rows = torch.zeros(len(texts), width)
    for row, text in zip(rows, texts, strict=True):
        data = text.encode("utf-8", errors="replace")[:width]
        if data:
            row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).float()
    return rows


def unpack(rows: Tensor) -> list[str]:
    """Decode `(N, width)` of any number type, the inverse of `pack`; invalid UTF-8 is dropped."""
    data = rows.to("cpu").round().clamp(0, 255).to(torch.uint8)
    return [bytes(row.tolist()).split(b"\0", 1)[0].decode("utf-8", errors="ignore") for row in data]


def find_invalid(text: str) -> str:
    """Describe the first invalid character of a text; empty if there is none."""
    for mark, meaning in (("\0", "ends a text"), (TURN, "separates messages")):
        if mark in text:
            return f"U+{ord(mark):04X} as character {text.index(mark) + 1}, which {meaning}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} as character {error.start + 1}, half of a surrogate pair"
    return ""


def check_text(text: str, what: str) -> None:
    """Raise a UserError if the text contains an invalid character; `what` names the text."""
    if found := find_invalid(text):
        raise UserError(f"{what} contains {found}; remove it.")


def check_fits(text: str, width: int, what: str) -> None:
    """Raise a UserError if the text contains an invalid character or exceeds `width` bytes, the limit of `pack`."""
    check_text(text, what)
    size = len(text.encode("utf-8", errors="replace"))
    if size > width:
        raise UserError(f"{what} has {size} bytes, but at most {width} are possible; shorten it.")


def messages(text: str) -> list[str]:
    """Split a conversation into messages, the user's first."""
    return text.split(TURN)


def truncate(text: str, width: int) -> str:
    """Return the text after `pack` and `unpack`."""
    return text.encode("utf-8", errors="replace")[:width].split(b"\0", 1)[0].decode("utf-8", errors="ignore")


def is_held_out(content: str) -> bool:
    """Whether a problem is for evaluation only, by a hash of its content that is equal on every machine."""
    return int.from_bytes(hashlib.sha256(content.encode("utf-8", errors="replace")).digest()[:8]) % HELD_OUT == 0


@dataclass(frozen=True)
class Turn:
    """Result of a completion."""

    reward: float
    success: bool = False
    done: bool = True
    reply: str = ""  # next observation, if the episode continues
    calls: int | None = None  # tool calls of the completion; None: the task has no tools
    answer: str | None = None  # answer extracted from the message; None: the whole message
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # further metrics by name, e.g. "format"

    def numbers(self) -> list[float]:
        """Return all values that must be finite."""
        return [self.reward, float(self.calls or 0), *self.metrics.values()]


@dataclass(frozen=True)
class JudgePrompt:
    """Prompt for a judge of responses, with the two possible verdicts."""

    prompt: str
    approve: str
    reject: str


class TextEpisode(ABC):
    """One problem, possibly over several turns."""

    prompt: str  # the first message

    @abstractmethod
    def step(self, completion: str) -> Turn:
        """Step with a response of the policy."""

    def demonstration(self) -> list[str] | None:
        """Return the remaining messages of a solution, one per turn; None without a known solution."""
        return None


class SingleTurn(TextEpisode):
    """One turn: a prompt, an answer and a function that verifies it."""

    def __init__(
        self,
        prompt: str,
        verify: Callable[[str], float],
        answer: str | None = None,
        well_formed: Callable[[str], bool] | None = None,
        extract_answer: Callable[[str], str | None] | None = None,
        **metrics: Callable[[str], float],
    ) -> None:
        """Describe the problem.

        Args:
            prompt: The prompt.
            verify: Reward of a completion; 1 is a success.
            answer: A correct completion, if known.
            well_formed: Whether a completion is well-formed; None: unknown.
            extract_answer: Canonical answer of a completion; None: the whole completion.
            **metrics: Further metrics of a completion, e.g. `progress`.
        """
        self.prompt = prompt
        self._verify, self._answer, self._extract_answer = verify, answer, extract_answer
        self._measures = metrics if well_formed is None else {FORMAT: well_formed, **metrics}

    def step(self, completion: str) -> Turn:
        """Verify the answer."""
        reward = float(self._verify(completion))
        metrics = {name: float(measure(completion)) for name, measure in self._measures.items()}
        answer = None if self._extract_answer is None else self._extract_answer(completion)
        return Turn(reward, success=reward >= 1.0, answer=answer, metrics=metrics)

    def demonstration(self) -> list[str] | None:
        """Return the correct answer."""
        return None if self._answer is None else [self._answer]


class TextTask(ABC):
    """A family of problems, one per seed.

    The content of a problem decides whether it is for training or held out for evaluation, so that the two sets are
    disjoint whatever the seeds.
    """

    name: str  # registered task id
    prompt_bytes: int  # maximum size of the observation, a conversation
    completion_bytes: int  # maximum size of a message of the policy
    max_turns: int = 1  # maximum turns of an episode
    reward_timeout: float = 2.0  # time limit of the reward of one completion [s]
    summary_prompt: str = " note:"  # request for a summary that replaces the history
    response_pattern: str = ""  # regular expression of well-formed messages; empty: none
    hidden_state: ClassVar[bool] = False  # whether problems with equal contents differ, e.g. by a scene

    @abstractmethod
    def episode(self, seed: int) -> TextEpisode:
        """Return a new episode of the problem of a seed."""

    def reset(self, seed: int) -> TextEpisode:
        """Return `episode(seed)`.

        Raises:
            UserError: The prompt is too long or contains an invalid character.
        """
        episode = self.episode(seed)
        check_fits(episode.prompt, self.prompt_bytes, f"Prompt {seed} of {self.name}")
        return episode

    def is_held_out(self, seed: int) -> bool:
        """Whether the problem of a seed is for evaluation only: a function of its content."""
        return is_held_out(self.content(seed))

    def content(self, seed: int) -> str:
        """Return the content of a problem, equal for prompts that ask the same in another form; here, the prompt."""
        return self.episode(seed).prompt

    @cached_property
    def held_out_problems(self) -> tuple[int, ...]:
        """Seeds of the held-out problems of a task with few of them, each content once; empty: they hardly repeat."""
        found: dict[str, int] = {}
        draws = 0
        for seed in range(0 if self.hidden_state else SCANNED):
            content = self.content(seed)
            if is_held_out(content):
                draws += 1
                found.setdefault(content, seed)
                if draws == FIRST_DRAWS and len(found) > FEW_REPEAT * draws:
                    return ()
        return tuple(found.values())

    def training_seed(self, seed: int) -> int:
        """Return the seed of a training problem, the first of a fixed series that starts with `seed`."""
        return self._seed_on_side(seed, held_out=False)

    def held_out_seed(self, seed: int) -> int:
        """Return the seed of a held-out problem: of few, the one with number `seed`, else the first of a series."""
        few = self.held_out_problems
        return few[seed % len(few)] if few else self._seed_on_side(seed, held_out=True)

    def _seed_on_side(self, seed: int, *, held_out: bool) -> int:
        for draw in range(MAX_DRAWS):
            candidate = _redrawn(seed, draw) if draw else seed
            if self.is_held_out(candidate) == held_out:
                return candidate
        raise UserError(f"{MAX_DRAWS} draws of {self.name} have no {'held-out' if held_out else 'training'} problem.")

    def category(self, seed: int) -> int | None:
        """Return the category of the problem, for curricula; None: no categories."""
        return None

    def difficulty(self, seed: int) -> float | None:
        """Return the difficulty of the problem, larger is harder; None: unknown."""
        return None

    def paraphrase(self, seed: int, how: str) -> int | None:
        """Return the seed of another problem with the same answer, "simpler" or "varied"; None: there is none."""
        return None

    def judge_prompt(self, seed: int, responses: Sequence[str]) -> JudgePrompt | None:
        """Return a prompt for a judge of the responses; None: the reward of the task is used."""
        return None

    def prepare(self, episodes: Sequence[TextEpisode], completions: Sequence[str]) -> None:
        """Compute the results of all next messages together, for tasks with a simulator; optional."""

    def close(self) -> None:
        """Free the resources of the task; it can be used again."""


def _redrawn(seed: int, draw: int) -> int:
    """Return another seed, below 2**40."""
    return int(np.random.SeedSequence((seed, draw)).generate_state(1, np.uint64)[0]) >> 24
