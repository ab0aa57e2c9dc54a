"""Text tasks: an episode starts with a prompt, takes completions and returns a verifiable reward."""

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
    """Texts as `(N, width)` float32, padded with zeros; longer texts are truncated."""
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
    """Description of the first invalid character of a text; empty where there is none."""
    for mark, meaning in (("\0", "ends a text"), (TURN, "separates messages")):
        if mark in text:
            return f"U+{ord(mark):04X} as character {text.index(mark) + 1}, which {meaning}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} as character {error.start + 1}, half of a surrogate pair"
    return ""


def check_text(text: str, what: str) -> None:
    """Refuse a text with an invalid character.

    Raises:
        UserError: It has one.
    """
    if found := find_invalid(text):
        raise UserError(f"{what} holds {found}; take it out.")


def check_fits(text: str, width: int, what: str) -> None:
    """Refuse a text that `pack` would truncate: a prompt without its end is a different prompt.

    Raises:
        UserError: It is too long, or has an invalid character.
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


FORMAT = "format"  # metric of the form: 1 where a message is well-formed
SUBGOAL = "subgoal"  # metric of messages that announce a subgoal
ADVANTAGE = "advantage"  # metric of a critic: improvement by a message, negative if it did harm


@dataclass(frozen=True)
class Turn:
    """Result of a completion."""

    reward: float
    success: bool = False
    done: bool = True
    reply: str = ""  # next observation, where the episode continues
    calls: int | None = None  # tool calls of the completion; None: the task has no tools
    answer: str | None = None  # answer extracted from the message; None: the whole message
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # further metrics by name, e.g. "format"

    def numbers(self) -> list[float]:
        """All that has to be finite."""
        return [self.reward, float(self.calls or 0), *self.metrics.values()]


@dataclass(frozen=True)
class JudgePrompt:
    """Prompt for a judge of responses, with the two possible verdicts."""

    prompt: str
    approve: str  # message that approves
    reject: str


class TextEpisode(ABC):
    """One problem, possibly over several turns."""

    prompt: str  # the first message

    @abstractmethod
    def step(self, completion: str) -> Turn:
        """Step with a response of the policy."""

    def demonstration(self) -> list[str] | None:
        """Remaining messages of a solution, one per turn; None without a known solution."""
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
            verify: Completion to reward; 1 is a success.
            answer: A right completion, where one is known.
            well_formed: Whether a completion has the form of an answer, right or wrong; None: unknown.
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
    max_turns: int = 1  # maximum turns of an episode
    reward_timeout: float = 2.0  # time limit of the reward of one completion [s]
    summary_prompt: str = " note:"  # requests a summary that replaces the history
    response_pattern: str = ""  # regular expression of well-formed messages; empty: none

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
        """Category of the problem, for curricula; None: no categories."""
        return None

    def difficulty(self, seed: int) -> float | None:
        """Difficulty of the problem, larger is harder; None: unknown."""
        return None

    def paraphrase(self, seed: int, how: str) -> int | None:
        """Seed of another problem with the same answer, "simpler" or "varied"; None: there is none."""
        return None

    def judge_prompt(self, seed: int, responses: Sequence[str]) -> JudgePrompt | None:
        """Prompt for a judge of the responses to the problem; None: the reward of the task is used."""
        return None

    def prepare(self, episodes: Sequence[TextEpisode], completions: Sequence[str]) -> None:  # noqa: B027 - optional
        """Prepare for the next messages of the episodes.

        A task with a simulator can compute the results of all messages here at once; others do nothing.
        """

    def close(self) -> None:  # noqa: B027 - most tasks hold no resources
        """Free the resources of the task; it can be used again."""
