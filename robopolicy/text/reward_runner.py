"""Execution of reward functions, which may raise, hang or return invalid numbers.

A hanging call is abandoned in its thread, which Python cannot stop; run code written by a model in a
`robopolicy.contrib.programs.sandbox.runner.Sandbox`, which can stop it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from robopolicy.errors import UserError
from robopolicy.text.task import TextEpisode, TextTask, Turn, find_invalid
from robopolicy.worker_thread import CallTimeout, WorkerThread

MAX_HUNG_CALLS = 8  # number of hanging threads above which a run fails


@dataclass(frozen=True)
class RewardError:
    """A failed call of the reward function."""

    key: int  # prompt id (episode seed)
    kind: str  # raised | timed out | not finite | not readable
    message: str

    def __str__(self) -> str:
        return f"prompt {self.key}: the reward {self.kind} ({self.message})"


class RewardRunner:
    """Sequential execution of calls on a second thread, each with a time limit [s]."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reward_errors: list[RewardError] = []  # since the last `pop_errors`
        self._hung_calls = 0
        self._worker: WorkerThread | None = None

    def step(self, episode: TextEpisode, completion: str, key: int) -> Turn | None:
        """Step the episode and return the turn, or None with a new entry in `reward_errors`."""
        return self.steps([(episode, completion, key)])[0]

    def steps(self, requests: Sequence[tuple[TextEpisode, str, int]]) -> list[Turn | None]:
        """Run `step` for different episodes in sequence; raise a UserError if too many calls hang."""
        turns: list[Turn | None] = []
        while len(turns) < len(requests):  # once, and again after every hanging call
            for episode, completion, _ in requests[len(turns) :]:
                self._send(partial(episode.step, completion))
            for _, _, key in requests[len(turns) :]:
                turns.append(self._receive_turn(key))
                if self._worker is None:  # the calls after a hanging call are sent again
                    break
        return turns

    def _receive_turn(self, key: int) -> Turn | None:
        """Return the next turn if it is valid."""
        try:
            turn = self._receive(self.seconds)
        except TimeoutError:
            if self._hung_calls > MAX_HUNG_CALLS:
                raise UserError(f"{self._hung_calls} calls of the reward function hang; fix the task.") from None
            return self._record_error(key, "timed out", f"no result within {self.seconds:g} s")
        except Exception as error:
            return self._record_error(key, "raised", f"{type(error).__name__}: {error}")
        if not isinstance(turn, Turn):
            return self._record_error(key, "raised", f"expected a Turn, got {type(turn).__name__}")
        if not all(map(math.isfinite, turn.numbers())):
            return self._record_error(key, "not finite", f"it is {turn.reward}, with {dict(turn.metrics)}")
        if found := find_invalid(turn.reply):
            return self._record_error(key, "not readable", f"its reply contains {found}")
        return turn

    def prepare(self, task: TextTask, episodes: Sequence[TextEpisode], completions: Sequence[str]) -> None:
        """Let the task process all messages together; `step` reports errors."""
        if type(task).prepare is TextTask.prepare or not episodes:
            return
        with suppress(Exception):
            self._send(lambda: task.prepare(episodes, completions))
            self._receive(self.seconds * len(episodes))

    def pop_errors(self) -> list[RewardError]:
        """Return and clear the errors since the last call."""
        reward_errors, self.reward_errors = self.reward_errors, []
        return reward_errors

    def close(self) -> None:
        """Stop the thread."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _record_error(self, key: int, kind: str, message: str) -> None:
        self.reward_errors.append(RewardError(key, kind, message.splitlines()[0] if message else kind))

    def _send(self, call: Callable[[], Any]) -> None:
        if self._worker is None:
            self._worker = WorkerThread("reward")
        self._worker.send(call)

    def _receive(self, seconds: float) -> Any:
        """Return the result of the next call, or raise its exception.

        Raises:
            TimeoutError: The call takes too long. Its thread is abandoned, and later calls are dropped.
        """
        assert self._worker is not None
        try:
            return self._worker.receive(seconds)
        except CallTimeout:
            self._hung_calls += 1
            self.close()
            raise
