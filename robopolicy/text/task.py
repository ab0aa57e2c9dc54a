"""Text tasks: an episode begins with a prompt, takes completions and answers with a reward that can be verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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


def find_invalid(text: str) -> str:
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
    """Refuse a text with a `find_invalid`.

    Raises:
        UserError: It has one.
    """
    if found := find_invalid(text):
        raise UserError(f"{what} holds {found}; take it out.")


def check_fits(text: str, width: int, what: str) -> None:
    """Refuse a text that `pack` would cut: a prompt without its end asks something else.

    Raises:
        UserError: It is too long, or has a `find_invalid`.
    """
    check_text(text, what)
    size = len(text.encode("utf-8", errors="replace"))
    if size > width:
        raise UserError(f"{what} has {size} bytes, but there is room for {width}; shorten it.")


def messages(text: str) -> list[str]:
    """Messages of a conversation, the user's first."""
    return text.split(TURN)


def truncate(text: str, width: int) -> str:
    """The text as it is after `pack` and `unpack`."""
    return text.encode("utf-8", errors="replace")[:width].split(b"\0", 1)[0].decode("utf-8", errors="ignore")


FORMAT = "format"  # name of the grade of form: 1 where a message has the form of an answer
SUBGOAL = "subgoal"  # of the grade that tells messages which announce what the next ones are to reach
ADVANTAGE = "advantage"  # of a critic's grade: how much better than nothing a message was, below 0 if it did harm


@dataclass(frozen=True)
class Turn:
    """What a completion leads to."""

    reward: float
    success: bool = False
    done: bool = True
    reply: str = ""  # the world's next message, where the episode goes on
    calls: int | None = None  # tool calls that the completion made; None: the task has no tools
    answer: str | None = None  # what the message states, where the task reads it out; None: the whole message
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # further grades by name, e.g. "format"

    def numbers(self) -> list[float]:
        """All that has to be finite."""
        return [self.reward, float(self.calls or 0), *self.metrics.values()]


@dataclass(frozen=True)
class JudgePrompt:
    """How to ask somebody whether what was said is right."""

    prompt: str
    approve: str  # message that says so
    reject: str


class TextEpisode(ABC):
    """One problem, possibly over several turns."""

    prompt: str  # the first message

    @abstractmethod
    def step(self, completion: str) -> Turn:
        """Take the policy's message."""

    def demonstration(self) -> list[str] | None:
        """Messages of a solution from here on, one per turn; None where the task knows none."""
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
            prompt: What is asked.
            verify: Completion to reward; 1 is a success.
            answer: A right completion, where one is known.
            formed: Whether a completion has the form of an answer, right or wrong; None: not told.
            states: What a completion states, the same text for the same answer; None: the whole completion.
            **measures: Further grades of a completion, e.g. `progress`.
        """
        self.prompt = prompt
        self._verify, self._answer, self._extract_answer = verify, answer, extract_answer
        self._measures = metrics if well_formed is None else {FORMAT: well_formed, **metrics}

    def step(self, completion: str) -> Turn:
        """Verify the answer."""
        reward = float(self._verify(completion))
        metrics = {name: float(measure(completion)) for name, measure in self._measures.items()}
        stated = None if self._extract_answer is None else self._extract_answer(completion)
        return Turn(reward, success=reward >= 1.0, answer=stated, metrics=metrics)

    def demonstration(self) -> list[str] | None:
        """The right answer."""
        return None if self._answer is None else [self._answer]


class TextTask(ABC):
    """A family of problems, one per seed."""

    name: str  # registered task id
    prompt_bytes: int  # most bytes of a conversation, as the policy sees it
    completion_bytes: int  # most bytes of a message of the policy
    max_turns: int = 1  # after which an episode is cut
    reward_timeout: float = 2.0  # most time to answer one completion
    summary_prompt: str = " note:"  # asks for a summary, where a conversation goes on from one in place of its history
    response_pattern: str = ""  # regular expression of messages that have the form of an answer; empty: there is none

    @abstractmethod
    def episode(self, seed: int) -> TextEpisode:
        """The problem of a seed; the same one every time."""

    def reset(self, seed: int) -> TextEpisode:
        """The problem of a seed.

        Raises:
            UserError: Its prompt cannot be shown as it is.
        """
        episode = self.episode(seed)
        check_fits(episode.prompt, self.prompt_bytes, f"Prompt {seed} of {self.name}")
        return episode

    def category(self, seed: int) -> int | None:
        """Kind of the problem, for curricula; None: the task tells none apart."""
        return None

    def difficulty(self, seed: int) -> float | None:
        """How hard the problem is, larger is harder; None: the task does not say."""
        return None

    def paraphrase(self, seed: int, how: str) -> int | None:
        """Seed of another problem with the same answer, "simpler" or "varied"; None: the task finds none."""
        return None

    def judge_prompt(self, seed: int, responses: Sequence[str]) -> JudgePrompt | None:
        """How to ask a judge about messages `responses` about the problem; None: the verdict of the task stands."""
        return None

    def prepare(self, episodes: Sequence[TextEpisode], completions: Sequence[str]) -> None:  # noqa: B027 - optional
        """Hear which messages the episodes are about to get.

        A task that simulates finds out here for all of them at once what `TextEpisode.step` then tells; others need not.
        """

    def close(self) -> None:  # noqa: B027 - a task that holds nothing has nothing to free
        """Free what the task holds; it can be used again."""
