"""Environment of a text task and the policy that responds, as a `RolloutEnv` (`rollouts/protocols.py`).

A trajectory is one row (`conversation.py` lists its fields); a unit is a turn. `Task.payload` is the episode seed.

Metrics of a trajectory are `length` in tokens, `brevity` (the fraction of its budget that is left), `concise` (brevity
of successes, 0 for others), `turns`, `success`, `truncated`, `reward_failed`, `assisted`, `calls` of tools if any, and
the task's own metrics as means over its turns (`format`: the fraction of well-formed messages; then also `malformed`,
the rest). With a judge, `judge` is the probability that it approves the messages, or the reward of the task where there
is no judge prompt.

A completion without a valid reward yields a trajectory without decisions whose reward is NaN; the collector leaves it
out, and `reward_runner` reports its prompt.
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
from robopolicy.text.conversation import COLUMNS, Conversation, conversation_rows
from robopolicy.text.engines import Engine
from robopolicy.text.generation import Generation
from robopolicy.text.policy import TextPolicy
from robopolicy.text.reward_runner import RewardRunner
from robopolicy.text.rollouts.protocols import Task, Trajectory
from robopolicy.text.rollouts.trajectories import stack
from robopolicy.text.task import JudgePrompt, TextEpisode, TextTask, Turn, truncate


class TextEnv:
    """Environment of a text task with a policy.

    Further capabilities that recipes need (hints, repairs, ...) are functions of `capabilities`, built on these
    methods.
    """

    capabilities: ClassVar[Registry[Callable[..., Any]]] = Registry("capabilities", {})  # name -> function(env, ...)

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
        self.reward_runner = RewardRunner(task.reward_timeout)
        self.generator = generator
        self.deterministic = False  # take the likeliest tokens
        self.version = 0  # of the weights, stored with every trajectory
        self.engine: Engine | None = None  # generates instead of the policy, with weights of that version
        self.judge: Callable[[Sequence[JudgePrompt]], list[float]] | None = None  # grades responses
        self.generated = 0  # tokens so far
        self._prompts: dict[str, list[int]] = {}  # tokens of prompts, shared in a group
        self.completed: list[Trajectory] = []  # since the last report

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Roll out every task once; a unit is a turn."""
        self._prompts.clear()
        conversations = [self.start_conversation(task) for task in tasks]
        for _ in range(self.task.max_turns if units is None else units):
            running = [
                conversation
                for conversation in conversations
                if not conversation.done and len(conversation.responses) < self.task.max_turns
            ]
            if not running:
                break
            written = self.generate(running)
            responses = [
                self.read_message(conversation, tokens) for conversation, tokens in zip(running, written, strict=True)
            ]
            self.reward_runner.prepare(self.task, [conversation.episode for conversation in running], responses)
            requests = [
                (conversation.episode, text, int(conversation.task.payload))
                for conversation, text in zip(running, responses, strict=True)
            ]
            for conversation, text, turn in zip(running, responses, self.reward_runner.steps(requests), strict=True):
                self.record_turn(conversation, text, turn)
        trajectories = self.trajectories_of(conversations)
        self.completed += trajectories
        return trajectories

    def set_version(self, version: int) -> None:
        """Set the version of the policy's weights."""
        if self.engine is not None and version != self.version:
            self.engine.load(self.policy)
        self.version = version

    def batch(self, trajectories: Sequence[Trajectory]) -> Decisions:
        """Rows of all trajectories."""
        decisions = self.policy.attach_likelihood(with_chosen_tokens(stack(trajectories)), self.generator)
        return decisions.with_fields(domain=torch.zeros_like(decisions.require("group")))

    def branch(self, trajectory: Trajectory, unit: int) -> Task:
        """The task that continues after `unit` turns of the trajectory."""
        return self.continue_from(trajectory, trajectory.record.turn_starts[unit])

    def continue_from(self, trajectory: Trajectory, column: int) -> Task:
        """The task that continues before a column of the row, possibly inside a message."""
        return replace(trajectory.task, prefix=conversation_prefix(trajectory.record, column))

    def generate(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Generate and append the next response of every conversation; returns its tokens."""
        temperatures = torch.tensor([conversation.task.temperature for conversation in conversations])
        made = self._write(
            conversations,
            [conversation.prompt + conversation.columns["tokens"] for conversation in conversations],
            temperatures,
        )
        self.generated += int(made.mask.sum())
        scores = {name: getattr(made, name).tolist() for name in ("order", "logp", "entropy")}
        truncated, written = made.truncated.tolist(), made.completions()
        for place, (conversation, tokens) in enumerate(zip(conversations, written, strict=True)):
            count = len(tokens)
            support = () if made.support is None else made.support[place, :count].cpu().unbind()
            conversation.append_tokens(
                tokens, support=support, **{name: values[place][:count] for name, values in scores.items()}
            )
            conversation.truncated |= truncated[place]
        return written

    def _write(
        self, conversations: Sequence[Conversation], seen: Sequence[Sequence[int]], temperature: Tensor
    ) -> Generation:
        """Generate the next responses after these tokens."""
        if self.engine is not None:
            return self.engine.generate(seen, self.generator, temperature=temperature)
        settings: dict[str, Any] = {"temperature": temperature, "deterministic": self.deterministic}
        if "allowed" in self.limits:
            settings["prefill"] = [self.policy.tokenizer.decode(conversation.prefill) for conversation in conversations]
        return self.policy.generate(seen, self.generator, **settings, **self.limits)

    def solution(self, task: Task) -> list[str] | None:
        """Responses that solve the task; None without a known solution."""
        return self.task.episode(int(task.payload)).demonstration()

    def prompt_tokens(self, task: Task, episode: TextEpisode) -> list[int]:
        """Tokens of the first message, after the text of the context."""
        hint = task.context["text"] if isinstance(task.context, Mapping) else ""
        text = f"({hint}){episode.prompt}" if hint else episode.prompt
        if text not in self._prompts:
            tokens = self._prompts[text] = self.policy.tokenizer.prompt([text])
            what = f"Prompt {task.payload} of {self.task.name}"
            self.policy.check_fits(len(tokens), self.policy.budget, what)
        return self._prompts[text]

    def start_conversation(self, task: Task) -> Conversation:
        """A conversation at its prompt, or after the prefix of the task."""
        episode = self.task.reset(int(task.payload))
        conversation = Conversation(task, episode, self.prompt_tokens(task, episode))
        if task.prefix is not None:
            conversation.columns = {name: list(task.prefix[name]) for name in COLUMNS}
            conversation.prefill, conversation.turn_starts, conversation.turn_rewards = (
                list(task.prefix[name]) for name in ("prefill", "turn_starts", "turn_rewards")
            )
            conversation.prior_tokens = task.prefix["prior_tokens"]
            for message in task.prefix["responses"]:
                conversation.responses.append(message)
                conversation.add_turn(episode.step(message))
        return conversation

    def append_message(self, conversation: Conversation, message: str, own: bool = False) -> None:
        """Append a message of a demonstration."""
        tokens = self.policy.encode_message(message)
        conversation.append_tokens(tokens, self.policy.generation_order(len(tokens), self.generator) if own else ())
        text = self.read_message(conversation, tokens)
        self.record_turn(
            conversation, text, self.reward_runner.step(conversation.episode, text, int(conversation.task.payload))
        )

    def read_message(self, conversation: Conversation, tokens: Sequence[int]) -> str:
        """The message that ends with these tokens, as the episode receives it."""
        return truncate(self.policy.decode_message([*conversation.prefill, *tokens]), self.task.completion_bytes)

    def record_turn(self, conversation: Conversation, message: str, turn: Turn | None) -> None:
        """Record the result of a response."""
        conversation.responses.append(message)
        conversation.prefill = []
        conversation.turn_rewards.append(0.0 if turn is None else turn.reward)
        if turn is None:
            conversation.reward_failed = conversation.done = True
            return
        conversation.add_turn(turn)
        conversation.success |= turn.success
        conversation.done = turn.done
        if not turn.done and len(conversation.responses) < self.task.max_turns:
            conversation.append_tokens(self.policy.tokenizer.reply(turn.reply))
        conversation.turn_starts.append(len(conversation.columns["tokens"]))

    def trajectory_of(self, conversation: Conversation) -> Trajectory:
        """`trajectories_of` of one conversation."""
        return self.trajectories_of([conversation])[0]

    def trajectories_of(self, conversations: Sequence[Conversation]) -> list[Trajectory]:
        """Trajectories of conversations, with rows, rewards and metrics."""
        vocabulary = self.policy.vocabulary if self.limits else None
        rows = conversation_rows(
            conversations, self.policy.tokenizer.eos, ordered="order" in self.policy.score_fields, vocabulary=vocabulary
        )
        most = self.policy.budget * self.task.max_turns
        return [
            Trajectory(
                conversation.task,
                decisions,
                reward=math.nan if conversation.reward_failed else conversation.reward,
                metrics=conversation.rollout_metrics(most) | grades,
                version=self.version,
                finished=conversation.done or len(conversation.responses) >= self.task.max_turns,
                record=conversation,
            )
            for conversation, decisions, grades in zip(
                conversations, rows, self._judge_scores(conversations), strict=True
            )
        ]

    def _judge_scores(self, conversations: Sequence[Conversation]) -> list[dict[str, float]]:
        """Scores of the judge, if there is one."""
        if self.judge is None:
            return [{} for _ in conversations]
        requests = [
            self.task.judge_prompt(int(conversation.task.payload), conversation.responses)
            if conversation.responses
            else None
            for conversation in conversations
        ]
        found = iter(self.judge([one for one in requests if one is not None]))
        return [
            {"judge": conversation.reward if one is None else next(found)}
            for conversation, one in zip(conversations, requests, strict=True)
        ]


def with_chosen_tokens(decisions: Decisions) -> Decisions:
    """With `extra["chosen"]` (N, T): the token of each decision, which `tokens` has behind a prompt."""
    tokens, width = decisions.extra["tokens"], decisions.shape[1]
    place = decisions.extra["start"][:, None] + torch.arange(width, device=tokens.device)
    chosen = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    return decisions.with_fields(extra={**decisions.extra, "chosen": chosen.masked_fill(~decisions.valid(), 0)})


def score(policy: TextPolicy, decisions: Decisions, **settings: Any) -> DecisionOutput:
    """Scores of the rows of a text batch under the current parameters, differentiable.

    `settings` are further arguments of `policy.score`.
    """
    names = (*policy.score_fields, *({"support"} & decisions.extra.keys()))
    extra: dict[str, Any] = {name: decisions.extra[name].to(policy.device) for name in names}
    return policy.score(mask=decisions.valid().to(policy.device), **extra, **settings)


def conversation_prefix(conversation: Conversation, column: int) -> dict[str, Any]:
    """Beginning of a conversation up to a column, as `Task.prefix` of this environment."""
    unit = bisect_right(conversation.turn_starts, column) - 1
    prefix: dict[str, Any] = {name: values[:column] for name, values in conversation.columns.items()}
    prefix |= {
        "responses": conversation.responses[:unit],
        "turn_rewards": conversation.turn_rewards[:unit],
        "turn_starts": conversation.turn_starts[: unit + 1],
    }
    prefix |= {
        "prefill": prefix["tokens"][conversation.turn_starts[unit] :],
        "assisted": conversation.assisted,
        "prior_tokens": conversation.prior_tokens,
    }
    return prefix
