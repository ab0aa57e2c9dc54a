"""A text task and the policy that answers it, as the `World` of the sampling side (`samplers/protocols.py`).

An attempt is one row (`talk.py` has its fields); a unit is a turn. `Task.payload` is the episode seed.

Metrics of an attempt are `length` in tokens, `brevity` (the share of its budget that it has left), `concise` (that of
successes, 0 of others), `turns`, `success`, `cut`, `fault`, `helped`, `calls` of tools if any, and the task's own
measures as means over its turns (`format`: the share of messages that have the form of an answer; then also
`malformed`, the rest). With a judge there is `judge`: how sure it is that the messages are right, or the verdict where
the task does not ask.

A completion that cannot be judged gives an attempt without decisions whose reward is no number, and which the sampling
side therefore leaves out; `guard` names the prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.plugins import Registry
from robopolicy.policies.base import DecisionOutput
from robopolicy.text.conversation import COLUMNS, Talk, rows_of
from robopolicy.text.engines import Engine
from robopolicy.text.generation import Generation
from robopolicy.text.policy import TextPolicy
from robopolicy.text.reward_runner import Guard
from robopolicy.text.rollouts.protocols import Attempt, Task
from robopolicy.text.rollouts.trajectories import stack
from robopolicy.text.task import Episode, Inquiry, TextTask, Turn, shortened


class TextWorld:
    """Plays a text task with a policy.

    What else a recipe asks for (hints, repairs, ...) are functions of `abilities`, made of the methods below.
    """

    abilities: ClassVar[Registry[Callable[..., Any]]] = Registry("abilities", {})  # name -> function(env, ...)

    def __init__(
        self,
        policy: TextPolicy,
        task: TextTask,
        generator: torch.Generator,
        *,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """Play `task` with `policy`, which draws from `generator`, under `limits`: see `TextPolicy.write`."""
        self.policy, self.task = policy, task
        self.limits: dict[str, Any] = dict(limits or {})  # guide and top_p, allowed
        self.guard = Guard(task.seconds)
        self.generator = generator
        self.deterministic = False  # take the likeliest tokens
        self.version = 0  # of the weights, noted with every attempt
        self.engine: Engine | None = None  # writes in place of the policy, with weights of that version
        self.judge: Callable[[Sequence[Inquiry]], list[float]] | None = None  # grades what is said
        self.generated = 0  # tokens so far
        self._prompts: dict[str, list[int]] = {}  # tokens of those that were asked for, several times in a group
        self.played: list[Attempt] = []  # since whoever reports on them has cleared it

    def play(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Attempt]:
        """Attempt every task once; a unit is a turn."""
        self._prompts.clear()
        talks = [self.start(task) for task in tasks]
        for _ in range(self.task.max_turns if units is None else units):
            running = [talk for talk in talks if not talk.done and len(talk.said) < self.task.max_turns]
            if not running:
                break
            written = self.generate(running)
            said = [self.read_message(talk, tokens) for talk, tokens in zip(running, written, strict=True)]
            self.guard.prepare(self.task, [talk.episode for talk in running], said)
            asked = [(talk.episode, text, int(talk.task.payload)) for talk, text in zip(running, said, strict=True)]
            for talk, text, turn in zip(running, said, self.guard.steps(asked), strict=True):
                self.observe(talk, text, turn)
        attempts = self.attempts_of(talks)
        self.played += attempts
        return attempts

    def renew(self, version: int) -> None:
        """Hear that the policy has other weights now."""
        if self.engine is not None and version != self.version:
            self.engine.load(self.policy)
        self.version = version

    def batch(self, attempts: Sequence[Attempt]) -> Decisions:
        """Rows of all attempts."""
        decisions = self.policy.decided(with_choices(stack(attempts)), self.generator)
        return decisions.with_fields(domain=torch.zeros_like(decisions.require("group")))

    def branch(self, attempt: Attempt, unit: int) -> Task:
        """The task that goes on after `unit` turns of the attempt."""
        return self.resume(attempt, attempt.record.starts[unit])

    def resume(self, attempt: Attempt, column: int) -> Task:
        """The task that goes on before a column of the attempt's row, maybe in the middle of a message."""
        return replace(attempt.task, prefix=prefix_of(attempt.record, column))

    def generate(self, talks: Sequence[Talk]) -> list[list[int]]:
        """Tokens of the next message of every conversation, with which it is extended."""
        heat = torch.tensor([talk.task.temperature for talk in talks])
        made = self._write(talks, [talk.prompt + talk.columns["tokens"] for talk in talks], heat)
        self.generated += int(made.mask.sum())
        scores = {name: getattr(made, name).tolist() for name in ("order", "logp", "entropy")}
        cut, written = made.cut.tolist(), made.completions()
        for place, (talk, tokens) in enumerate(zip(talks, written, strict=True)):
            count = len(tokens)
            support = () if made.support is None else made.support[place, :count].cpu().unbind()
            talk.add(tokens, support=support, **{name: values[place][:count] for name, values in scores.items()})
            talk.cut |= cut[place]
        return written

    def _write(self, talks: Sequence[Talk], seen: Sequence[Sequence[int]], temperature: Tensor) -> Generation:
        """The next messages of conversations of which these tokens were seen."""
        if self.engine is not None:
            return self.engine.write(seen, self.generator, temperature=temperature)
        settings: dict[str, Any] = {"temperature": temperature, "deterministic": self.deterministic}
        if "allowed" in self.limits:
            settings["begun"] = [self.policy.tokenizer.decode(talk.begun) for talk in talks]
        return self.policy.write(seen, self.generator, **settings, **self.limits)

    def solution(self, task: Task) -> list[str] | None:
        """Messages of the policy that solve the task; None where the task does not know any."""
        return self.task.episode(int(task.payload)).demonstration()

    def prompt_tokens(self, task: Task, episode: Episode) -> list[int]:
        """Tokens of the first message, behind what the context tells."""
        told = task.context["text"] if isinstance(task.context, Mapping) else ""
        text = f"({told}){episode.prompt}" if told else episode.prompt
        if text not in self._prompts:
            tokens = self._prompts[text] = self.policy.tokenizer.prompt([text])
            what = f"Prompt {task.payload} of {self.task.name}"
            self.policy.check_fits(len(tokens), self.policy.budget, what)
        return self._prompts[text]

    def start(self, task: Task) -> Talk:
        """A conversation at its prompt, or behind the prefix of the task."""
        episode = self.task.pose(int(task.payload))
        talk = Talk(task, episode, self.prompt_tokens(task, episode))
        if task.prefix is not None:
            talk.columns = {name: list(task.prefix[name]) for name in COLUMNS}
            talk.begun, talk.starts, talk.paid = (list(task.prefix[name]) for name in ("begun", "starts", "paid"))
            talk.earlier = task.prefix["earlier"]
            for message in task.prefix["said"]:
                talk.said.append(message)
                talk.hear(episode.step(message))
        return talk

    def append(self, talk: Talk, message: str, own: bool = False) -> None:
        """Let a demonstration say a message."""
        tokens = self.policy.message(message)
        talk.add(tokens, self.policy.order(len(tokens), self.generator) if own else ())
        text = self.read_message(talk, tokens)
        self.observe(talk, text, self.guard.step(talk.episode, text, int(talk.task.payload)))

    def read_message(self, talk: Talk, tokens: Sequence[int]) -> str:
        """The message that ends with these tokens, as the episode gets it."""
        return shortened(self.policy.read([*talk.begun, *tokens]), self.task.completion_bytes)

    def observe(self, talk: Talk, message: str, turn: Turn | None) -> None:
        """Write down what the episode replies to a message."""
        talk.said.append(message)
        talk.begun = []
        talk.paid.append(0.0 if turn is None else turn.reward)
        if turn is None:
            talk.fault = talk.done = True
            return
        talk.hear(turn)
        talk.success |= turn.success
        talk.done = turn.done
        if not turn.done and len(talk.said) < self.task.max_turns:
            talk.add(self.policy.tokenizer.reply(turn.reply))
        talk.starts.append(len(talk.columns["tokens"]))

    def attempt_of(self, talk: Talk) -> Attempt:
        """`attempts_of` of one conversation."""
        return self.attempts_of([talk])[0]

    def attempts_of(self, talks: Sequence[Talk]) -> list[Attempt]:
        """Conversations as they stand, with rows, rewards and metrics."""
        vocabulary = self.policy.vocabulary if self.limits else None
        rows = rows_of(talks, self.policy.tokenizer.eos, ordered="order" in self.policy.recorded, vocabulary=vocabulary)
        most = self.policy.budget * self.task.max_turns
        return [
            Attempt(
                talk.task,
                decisions,
                reward=math.nan if talk.fault else talk.reward,
                metrics=talk.measured(most) | grades,
                version=self.version,
                finished=talk.done or len(talk.said) >= self.task.max_turns,
                record=talk,
            )
            for talk, decisions, grades in zip(talks, rows, self._grades(talks), strict=True)
        ]

    def _grades(self, talks: Sequence[Talk]) -> list[dict[str, float]]:
        """What the judge says of conversations, where there is one."""
        if self.judge is None:
            return [{} for _ in talks]
        asked = [self.task.inquiry(int(talk.task.payload), talk.said) if talk.said else None for talk in talks]
        found = iter(self.judge([one for one in asked if one is not None]))
        return [{"judge": talk.reward if one is None else next(found)} for talk, one in zip(talks, asked, strict=True)]


def with_choices(decisions: Decisions) -> Decisions:
    """With `extra["chosen"]` (N, T): the token of each decision, which `tokens` has behind a prompt."""
    tokens, width = decisions.extra["tokens"], decisions.shape[1]
    place = decisions.extra["start"][:, None] + torch.arange(width, device=tokens.device)
    chosen = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    return decisions.with_fields(extra={**decisions.extra, "chosen": chosen.masked_fill(~decisions.valid(), 0)})


def score(policy: TextPolicy, decisions: Decisions, **settings: Any) -> DecisionOutput:
    """Scores of the rows of a text batch under the current parameters, differentiable.

    `settings` are further arguments of `policy.score`.
    """
    names = (*policy.recorded, *({"support"} & decisions.extra.keys()))
    extra: dict[str, Any] = {name: decisions.extra[name].to(policy.device) for name in names}
    return policy.score(mask=decisions.valid().to(policy.device), **extra, **settings)


def prefix_of(talk: Talk, column: int) -> dict[str, Any]:
    """What a conversation that goes on before a column of `talk` begins with; `Task.prefix` of this world."""
    unit = bisect_right(talk.starts, column) - 1
    prefix: dict[str, Any] = {name: values[:column] for name, values in talk.columns.items()}
    prefix |= {"said": talk.said[:unit], "paid": talk.paid[:unit], "starts": talk.starts[: unit + 1]}
    prefix |= {"begun": prefix["tokens"][talk.starts[unit] :], "helped": talk.helped, "earlier": talk.earlier}
    return prefix
