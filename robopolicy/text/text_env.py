"""Text task with a policy as a `RolloutEnv` (`rollouts/protocols.py`).

A trajectory is one row (`conversation.py` lists its fields); a unit is a turn. `Task.payload` is the episode seed.

Metrics of a trajectory are `length` in tokens, `brevity` (unused fraction of its budget), `concise` (brevity of
successes, 0 for others), `turns`, `success`, `truncated`, `reward_failed`, `assisted`, `calls` of tools if any, and the
metrics of the task as means over its turns (`format`: fraction of well-formed messages; `malformed`: 1 - `format`).
With a judge, `judge` is the probability that it approves the messages, or the reward of the task without a judge
prompt.

A completion without a valid reward yields a trajectory without decisions and with reward NaN; the collector drops it,
and `reward_runner` reports its prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

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
    """Text task with a policy; `capabilities` adds functions for recipes (hints, repairs, ...)."""

    capabilities: ClassVar[Registry[Callable[..., Any]]] = Registry("capabilities", {})  # name -> function(env, ...)

    def __init__(
        self, policy: TextPolicy, task: TextTask, generator: torch.Generator, *, limits: Mapping[str, Any] | None = None
    ) -> None:
        """Create the environment; `limits` are arguments of `TextPolicy.generate` that restrict the tokens."""
        self.policy, self.task = policy, task
        self.limits: dict[str, Any] = dict(limits or {})  # guide and top_p, or allowed
        self.reward_runner = RewardRunner(task.reward_timeout)
        self.generator = generator
        self.deterministic = False  # choose the likeliest tokens
        self.version = 0  # of the weights, stored with every trajectory
        self.engine: Engine | None = None  # generates instead of the policy, with the weights of `version`
        self.judge: Callable[[Sequence[JudgePrompt]], list[float]] | None = None  # probabilities of approval
        self.generated = 0  # total number of tokens
        self._prompts: dict[str, list[int]] = {}  # cached tokens of prompts
        self.completed: list[Trajectory] = []  # since the last report

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Roll out every task once; a unit is a turn."""
        self._prompts.clear()
        conversations = [self.start_conversation(task) for task in tasks]
        for _ in range(self.task.max_turns if units is None else units):
            running = [one for one in conversations if not one.done and len(one.responses) < self.task.max_turns]
            if not running:
                break
            generated = zip(running, self.generate(running), strict=True)
            responses = [self.read_message(conversation, tokens) for conversation, tokens in generated]
            self.reward_runner.prepare(self.task, [one.episode for one in running], responses)
            requests = [
                (one.episode, text, int(one.task.payload)) for one, text in zip(running, responses, strict=True)
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
        """Return the rows of all trajectories."""
        decisions = self.policy.attach_likelihood(with_chosen_tokens(stack(trajectories)), self.generator)
        return decisions.with_fields(domain=torch.zeros_like(decisions.require("group")))

    def branch(self, trajectory: Trajectory, unit: int) -> Task:
        """Return the task that continues after `unit` turns of the trajectory."""
        return self.continue_from(trajectory, trajectory.record.turn_starts[unit])

    def continue_from(self, trajectory: Trajectory, column: int) -> Task:
        """Return the task that continues before a column of the row, possibly inside a message."""
        return replace(trajectory.task, prefix=conversation_prefix(trajectory.record, column))

    def generate(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Generate and append the next response of every conversation; return its tokens."""
        result = self._generate(conversations).to_cpu()
        self.generated += int(result.mask.sum())
        scores = {name: getattr(result, name).tolist() for name in ("order", "logp", "entropy")}
        truncated, completions = result.truncated.tolist(), result.completions()
        for row, (conversation, tokens) in enumerate(zip(conversations, completions, strict=True)):
            count = len(tokens)
            support = () if result.support is None else result.support[row, :count].unbind()
            values = {name: rows[row][:count] for name, rows in scores.items()}
            conversation.append_tokens(tokens, support=support, **values)
            conversation.truncated |= truncated[row]
        return completions

    def _generate(self, conversations: Sequence[Conversation]) -> Generation:
        prompts = [one.prompt + one.columns["tokens"] for one in conversations]
        temperature = torch.tensor([one.task.temperature for one in conversations])
        if self.engine is not None:
            return self.engine.generate(prompts, self.generator, temperature=temperature)
        settings: dict[str, Any] = {"temperature": temperature, "deterministic": self.deterministic}
        if "allowed" in self.limits:
            settings["prefill"] = [self.policy.tokenizer.decode(one.prefill) for one in conversations]
        return self.policy.generate(prompts, self.generator, **settings, **self.limits)

    def solution(self, task: Task) -> list[str] | None:
        """Return responses that solve the task; None without a known solution."""
        return self.task.episode(int(task.payload)).demonstration()

    def prompt_tokens(self, task: Task, episode: TextEpisode) -> list[int]:
        """Tokenize the text of the context and the first message."""
        hint = task.context["text"] if isinstance(task.context, Mapping) else ""
        text = f"({hint}){episode.prompt}" if hint else episode.prompt
        if text not in self._prompts:
            tokens = self._prompts[text] = self.policy.tokenizer.prompt([text])
            self.policy.check_fits(len(tokens), self.policy.budget, f"Prompt {task.payload} of {self.task.name}")
        return self._prompts[text]

    def start_conversation(self, task: Task) -> Conversation:
        """Start a conversation at its prompt, or after the prefix of the task."""
        episode = self.task.reset(int(task.payload))
        conversation = Conversation(task, episode, self.prompt_tokens(task, episode))
        if task.prefix is not None:
            conversation.columns = {name: list(task.prefix[name]) for name in COLUMNS}
            for name in ("prefill", "turn_starts", "turn_rewards"):
                setattr(conversation, name, list(task.prefix[name]))
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
        turn = self.reward_runner.step(conversation.episode, text, int(conversation.task.payload))
        self.record_turn(conversation, text, turn)

    def read_message(self, conversation: Conversation, tokens: Sequence[int]) -> str:
        """Decode the message that ends with these tokens, truncated to the size that the episode accepts."""
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
        """Convert one conversation, see `trajectories_of`."""
        return self.trajectories_of([conversation])[0]

    def trajectories_of(self, conversations: Sequence[Conversation]) -> list[Trajectory]:
        """Convert conversations to trajectories with rows, rewards and metrics."""
        vocabulary = self.policy.vocabulary if self.limits else None
        rows = conversation_rows(
            conversations, self.policy.tokenizer.eos, ordered="order" in self.policy.score_fields, vocabulary=vocabulary
        )
        budget = self.policy.budget * self.task.max_turns
        return [
            Trajectory(
                one.task,
                decisions,
                reward=math.nan if one.reward_failed else one.reward,
                metrics=one.rollout_metrics(budget) | scores,
                version=self.version,
                finished=one.done or len(one.responses) >= self.task.max_turns,
                record=one,
            )
            for one, decisions, scores in zip(conversations, rows, self._judge_scores(conversations), strict=True)
        ]

    def _judge_scores(self, conversations: Sequence[Conversation]) -> list[dict[str, float]]:
        if self.judge is None:
            return [{} for _ in conversations]
        prompts = [
            self.task.judge_prompt(int(one.task.payload), one.responses) if one.responses else None
            for one in conversations
        ]
        scores = iter(self.judge([prompt for prompt in prompts if prompt is not None]))
        pairs = zip(conversations, prompts, strict=True)
        return [{"judge": one.reward if prompt is None else next(scores)} for one, prompt in pairs]


def with_chosen_tokens(decisions: Decisions) -> Decisions:
    """Add `extra["chosen"]` (N, T), the token of each decision."""
    tokens, width = decisions.extra["tokens"], decisions.shape[1]
    index = decisions.extra["start"][:, None] + torch.arange(width, device=tokens.device)
    chosen = tokens.gather(1, index.clamp(max=tokens.shape[1] - 1))
    return decisions.with_fields(extra={**decisions.extra, "chosen": chosen.masked_fill(~decisions.valid(), 0)})


def score(policy: TextPolicy, decisions: Decisions, **settings: Any) -> DecisionOutput:
    """Score the rows of a text batch under the current parameters; `settings` are arguments of `policy.score`."""
    names = (*policy.score_fields, *({"support"} & decisions.extra.keys()))
    extra: dict[str, Any] = {name: decisions.extra[name].to(policy.device) for name in names}
    return policy.score(mask=decisions.valid().to(policy.device), **extra, **settings)


def conversation_prefix(conversation: Conversation, column: int) -> dict[str, Any]:
    """Return the beginning of a conversation up to a column as `Task.prefix` of this environment."""
    unit = bisect_right(conversation.turn_starts, column) - 1
    prefix: dict[str, Any] = {name: values[:column] for name, values in conversation.columns.items()}
    return prefix | {
        "responses": conversation.responses[:unit],
        "turn_rewards": conversation.turn_rewards[:unit],
        "turn_starts": conversation.turn_starts[: unit + 1],
        "prefill": prefix["tokens"][conversation.turn_starts[unit] :],
        "assisted": conversation.assisted,
        "prior_tokens": conversation.prior_tokens,
    }
