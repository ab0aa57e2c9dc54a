"""A text task and the policy that answers it, as the `World` of the sampling side (`samplers/protocols.py`).

An attempt is one row: prompt, messages of the policy and replies of the world as one sequence of tokens, of which the
policy decided those in its mask; a unit is a turn. `Task.payload` is the episode seed. Fields of `Decisions.extra`:

    tokens (N, L) int64     the whole conversation, zeros behind its end
    start (N,) int64        place of the first column of the decisions in `tokens`
    temperature (N,)        the tokens were drawn with
    cut (N,) bool           a message reached the budget before it ended
    order (N, T) int64      of masked diffusion (`diffusion.py`)

A completion that cannot be judged gives an attempt without decisions whose reward is no number, and which the sampling
side therefore leaves out; `guard` names the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.samplers.attempts import stack
from robopolicy.samplers.protocols import TEACHER, Attempt, Task
from robopolicy.text.engines import Engine
from robopolicy.text.generation import Generation
from robopolicy.text.guard import Guard
from robopolicy.text.policy import TextPolicy
from robopolicy.text.task import Episode, TextTask
from robopolicy.text.wire import shortened

COLUMNS = ("tokens", "own", "logp", "entropy", "order", "unit")  # of what follows the prompt, one entry per token


@dataclass
class Talk:
    """A conversation under way."""

    task: Task
    episode: Episode
    prompt: list[int]
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    said: list[str] = field(default_factory=list)  # finished messages of the policy
    begun: list[int] = field(default_factory=list)  # tokens of a message that was given in part
    reward: float = 0.0
    success: bool = False
    done: bool = False
    cut: bool = False
    fault: bool = False

    def add(self, tokens: Sequence[int], order: Sequence[int] = (), **scores: Sequence[float]) -> None:
        """Append tokens that the policy chose in this order, or, without one, that the world or a solution gave."""
        self.columns["tokens"] += tokens
        self.columns["own"] += [bool(order)] * len(tokens)
        self.columns["order"] += order or [0] * len(tokens)
        for name in ("logp", "entropy"):
            self.columns[name] += scores.get(name, [0.0] * len(tokens))
        self.columns["unit"] += [len(self.said)] * len(tokens)


class TextWorld:
    """Plays a text task with a policy; hints, begins, teaches, branches, rescores and repairs."""

    def __init__(self, policy: TextPolicy, task: TextTask, generator: torch.Generator) -> None:
        """Play `task` with `policy`, which draws from `generator`."""
        self.policy, self.task = policy, task
        self.guard = Guard(task.seconds)
        self.generator = generator
        self.version = 0  # of the weights, noted with every attempt
        self.engine: Engine | None = None  # writes in place of the policy, with weights of that version
        self.generated = 0  # tokens so far
        self.played: list[Attempt] = []  # since whoever reports on them has cleared it

    def play(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Attempt]:
        """Attempt every task once; a unit is a turn."""
        talks = [self._open(task) for task in tasks]
        for _ in range(self.task.max_turns if units is None else units):
            running = [talk for talk in talks if not talk.done and len(talk.said) < self.task.max_turns]
            if not running:
                break
            heat = torch.tensor([talk.task.temperature for talk in running])
            seen = [talk.prompt + talk.columns["tokens"] for talk in running]
            made = self._write(running, seen, heat)
            self.generated += int(made.mask.sum())
            scores = {name: getattr(made, name).tolist() for name in ("order", "logp", "entropy")}
            cut = made.cut.tolist()
            written = made.completions()
            said = [self._message(talk, tokens) for talk, tokens in zip(running, written, strict=True)]
            self.guard.prepare(self.task, [talk.episode for talk in running], said)
            for place, (talk, tokens) in enumerate(zip(running, written, strict=True)):
                count = len(tokens)
                talk.add(tokens, **{name: values[place][:count] for name, values in scores.items()})
                talk.cut |= cut[place]
                self._answer(talk, said[place])
        attempts = [self._attempt(talk) for talk in talks]
        self.played += attempts
        return attempts

    def renew(self, version: int) -> None:
        """Hear that the policy has other weights now."""
        if self.engine is not None and version != self.version:
            self.engine.load(self.policy)
        self.version = version

    def batch(self, attempts: Sequence[Attempt]) -> Decisions:
        """Rows of all attempts."""
        decisions = self.policy.decided(stack(attempts), self.generator)
        return decisions.with_fields(domain=torch.zeros_like(decisions.need("group")))

    def hint(self, task: Task, kind: str, share: float) -> Task | None:
        """The task with a share of the solution in front of its prompt; None where there is none."""
        solution = self._solution(task)
        if solution is None:
            return None
        return replace(task, context={"kind": kind, "share": share, "text": _share(" ".join(solution), share)})

    def begin(self, task: Task, share: float) -> Task | None:
        """The task with a share of the solution written already; None where there is none."""
        solution = self._solution(task)
        if solution is None:
            return None
        talk = self._open(replace(task, prefix=None))
        turns = share * len(solution)
        for message in solution[: int(turns)]:
            self._hear(talk, message)
        rest = "" if talk.done else _share(solution[int(turns)], turns % 1.0)
        talk.begun = self.policy.tokenizer.encode(rest)
        talk.add(talk.begun)
        return task if talk.done else replace(task, prefix=_prefix(talk))

    def teach(self, task: Task, count: int) -> list[Attempt]:
        """The solution, `count` times: demonstrated tokens with log-probability 0."""
        solution = self._solution(task)
        if solution is None:
            return []
        talk = self._open(replace(task, prefix=None))
        for message in solution:
            self._hear(talk, message, own=True)
        return [replace(self._attempt(talk), source=TEACHER)] * count

    def branch(self, attempt: Attempt, unit: int) -> Task:
        """The task that goes on after `unit` turns of the attempt."""
        talk: Talk = attempt.record
        kept = sum(number < unit for number in talk.columns["unit"])
        prefix = {name: values[:kept] for name, values in talk.columns.items()}
        return replace(attempt.task, prefix={**prefix, "said": talk.said[:unit], "begun": []})

    @torch.no_grad()
    def rescore(self, attempts: Sequence[Attempt], tasks: Sequence[Task]) -> list[Attempt]:
        """The same tokens as answers to other tasks."""
        result: list[Attempt] = []
        for attempt, task in zip(attempts, tasks, strict=True):
            old, prompt = attempt.decisions, self._prompt(task, self.task.episode(int(task.payload)))
            written = old.extra["tokens"][0, int(old.extra["start"]) :].tolist()
            extra = {**old.extra, "tokens": torch.tensor([prompt + written]), "start": torch.tensor([len(prompt)])}
            logp = score(self.policy, old.with_fields(extra=extra)).logp
            decisions = old.with_fields(logp_old=logp.cpu(), logp_behaviour=old.logp_old, extra=extra)
            result.append(replace(attempt, task=task, decisions=decisions))
        return result

    def repair(self, attempt: Attempt) -> Task:
        """The same problem with the failed messages in front of the prompt."""
        talk: Talk = attempt.record
        return replace(attempt.task, prefix=None, context={"kind": "repair", "text": " ".join(talk.said)})

    def _write(self, talks: Sequence[Talk], seen: Sequence[Sequence[int]], temperature: Tensor) -> Generation:
        """The next messages of conversations of which these tokens were seen."""
        return (self.engine or self.policy).write(seen, self.generator, temperature=temperature)

    def _solution(self, task: Task) -> list[str] | None:
        return self.task.episode(int(task.payload)).demonstration()

    def _prompt(self, task: Task, episode: Episode) -> list[int]:
        """Tokens of the first message, behind what the context tells."""
        told = task.context["text"] if isinstance(task.context, Mapping) else ""
        return self.policy.tokenizer.prompt([f"({told}){episode.prompt}" if told else episode.prompt])

    def _open(self, task: Task) -> Talk:
        episode = self.task.episode(int(task.payload))
        talk = Talk(task, episode, self._prompt(task, episode))
        if task.prefix is not None:
            talk.columns = {name: list(task.prefix[name]) for name in COLUMNS}
            talk.begun = list(task.prefix["begun"])
            for message in task.prefix["said"]:
                talk.said.append(message)
                episode.step(message)
        return talk

    def _hear(self, talk: Talk, message: str, own: bool = False) -> None:
        """Let a demonstration say a message."""
        tokens = self.policy.message(message)
        talk.add(tokens, self.policy.order(len(tokens), self.generator) if own else ())
        self._answer(talk, self._message(talk, tokens))

    def _message(self, talk: Talk, tokens: Sequence[int]) -> str:
        """The message that ends with these tokens, as the episode gets it."""
        return shortened(self.policy.read([*talk.begun, *tokens]), self.task.completion_bytes)

    def _answer(self, talk: Talk, message: str) -> None:
        """Hand a message to the episode and write down what it replies."""
        turn = self.guard.step(talk.episode, message, int(talk.task.payload))
        talk.said.append(message)
        talk.begun = []
        if turn is None:
            talk.fault = talk.done = True
            return
        talk.reward += turn.reward
        talk.success |= turn.success
        talk.done = turn.done
        if not turn.done and len(talk.said) < self.task.max_turns:
            talk.add(self.policy.tokenizer.reply(turn.reply))

    def _attempt(self, talk: Talk) -> Attempt:
        columns = talk.columns
        own = torch.tensor([columns["own"]]) & (not talk.fault)
        extra = {
            "tokens": torch.tensor([talk.prompt + columns["tokens"]]),
            "start": torch.tensor([len(talk.prompt)]),
            "temperature": torch.tensor([talk.task.temperature]),
            "cut": torch.tensor([talk.cut]),
        }
        if "order" in self.policy.recorded:
            extra["order"] = torch.tensor([columns["order"]])
        values = {name: torch.tensor([columns[name]]) for name in ("logp", "entropy", "unit")}
        decisions = Decisions(values["logp"], mask=own, entropy=values["entropy"], unit=values["unit"], extra=extra)
        flags = {name: float(getattr(talk, name)) for name in ("success", "cut", "fault")}
        return Attempt(
            talk.task,
            decisions,
            reward=math.nan if talk.fault else talk.reward,
            metrics={"length": float(sum(columns["own"])), "turns": float(len(talk.said)), **flags},
            version=self.version,
            finished=talk.done or len(talk.said) >= self.task.max_turns,
            record=talk,
        )


def score(policy: TextPolicy, decisions: Decisions) -> Any:
    """`DecisionOutput` of the rows of a text batch under the current parameters; differentiable."""
    extra: dict[str, Tensor] = {name: decisions.extra[name].to(policy.device) for name in policy.recorded}
    return policy.score(mask=decisions.valid().to(policy.device), **extra)


def _share(text: str, share: float) -> str:
    return text[: round(share * len(text))]


def _prefix(talk: Talk) -> dict[str, Any]:
    return {**talk.columns, "said": talk.said, "begun": talk.begun}
