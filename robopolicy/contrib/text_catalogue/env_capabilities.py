"""Capabilities of a text environment: hints, prefixes, demonstrations, repairs and summaries.

`TextEnv.capabilities` finds these functions by name (`robopolicy.text.rollouts.protocols.require_capability`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from robopolicy.errors import UserError
from robopolicy.text.conversation import COLUMNS, Conversation
from robopolicy.text.rollouts.protocols import TEACHER, Task, Trajectory
from robopolicy.text.text_env import TextEnv, conversation_prefix, score


def hint(env: TextEnv, task: Task, kind: str, share: float) -> Task | None:
    """Add a share of the solution before the prompt; None without a solution."""
    solution = env.solution(task)
    if solution is None:
        return None
    return replace(task, context={"kind": kind, "share": share, "text": _share(" ".join(solution), share)})


def start_from_solution(env: TextEnv, task: Task, share: float) -> Task | None:
    """Start after a share of the solution; None without a solution."""
    solution = env.solution(task)
    if solution is None:
        return None
    conversation = env.start_conversation(replace(task, prefix=None))
    turns = share * len(solution)
    for message in solution[: int(turns)]:
        env.append_message(conversation, message)
    rest = "" if conversation.done else _share(solution[int(turns)], turns % 1.0)
    conversation.prefill = env.policy.tokenizer.encode(rest)
    conversation.append_tokens(conversation.prefill)
    if conversation.done:
        return task
    given = conversation_prefix(conversation, len(conversation.columns["tokens"]))
    return replace(
        task, prefix={**given, "turn_rewards": [0.0] * len(conversation.responses), "assisted": True}
    )  # without reward


def teach(env: TextEnv, task: Task, count: int) -> list[Trajectory]:
    """Return up to `count` solutions, at most the one of the task, as trajectories of source `TEACHER`.

    Their tokens have log-probability 0: the teacher is deterministic, so the ratio is the probability of the policy.
    """
    solution = env.solution(task)
    if solution is None:
        return []
    conversation = env.start_conversation(replace(task, prefix=None))
    for message in solution:
        env.append_message(conversation, message, own=True)
    return [replace(env.trajectory_of(conversation), source=TEACHER)][:count]


def final_message(env: TextEnv, task: Task) -> Trajectory | None:
    """Append the last message of the solution, the only decisions of the trajectory; None without a solution."""
    conversation = env.start_conversation(task)
    solution = conversation.episode.demonstration()
    if not solution:
        return None
    conversation.columns["own"] = [False] * len(conversation.columns["own"])
    conversation.calls = None
    conversation.metrics.clear()  # of earlier messages: rows with and without metrics cannot be concatenated
    tokens = env.policy.encode_message(solution[-1])
    conversation.append_tokens(tokens, env.policy.generation_order(len(tokens), env.generator))
    return replace(env.trajectory_of(conversation), source=TEACHER)


@torch.no_grad()
def rescore(env: TextEnv, trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[Trajectory]:
    """Assign the tokens to other tasks: `logp_old` under these tasks, `logp_behaviour` as sampled."""
    result: list[Trajectory] = []
    for trajectory, task in zip(trajectories, tasks, strict=True):
        old, prompt = trajectory.decisions, env.prompt_tokens(task, env.task.reset(int(task.payload)))
        written = old.extra["tokens"][0, int(old.extra["start"]) :].tolist()
        extra = {**old.extra, "tokens": torch.tensor([prompt + written]), "start": torch.tensor([len(prompt)])}
        logp = score(env.policy, old.with_fields(extra=extra)).logp
        decisions = old.with_fields(logp_old=logp.cpu(), logp_behaviour=old.logp_old, extra=extra)
        result.append(replace(trajectory, task=task, decisions=decisions))
    return result


def rewrite(env: TextEnv, task: Task, how: str) -> Task:
    """Return another problem with the same answer, "simpler" or "varied", with its own key.

    Raises:
        UserError: The task cannot paraphrase its problems.
    """
    seed = env.task.paraphrase(int(task.payload), how)
    if seed is None:
        raise UserError(f"Task {env.task.name} cannot paraphrase its problems; choose another recipe or task.")
    return replace(task, key=seed, payload=seed, prefix=None, context=None)


def repair(env: TextEnv, trajectory: Trajectory) -> Task:
    """Add the failed messages before the prompt of the problem."""
    conversation: Conversation = trajectory.record
    return replace(trajectory.task, prefix=None, context={"kind": "repair", "text": " ".join(conversation.responses)})


def summarize(env: TextEnv, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, Task]]:
    """Generate summaries for the prompts of continuations, instead of the next responses.

    In the row of its window, a summary belongs to the next turn. The windows are removed from `completed`, because
    their continuations complete them.
    """
    summed = set(map(id, trajectories))
    env.completed = [trajectory for trajectory in env.completed if id(trajectory) not in summed]
    conversations: list[Conversation] = [trajectory.record for trajectory in trajectories]
    for conversation in conversations:
        conversation.append_tokens(env.policy.tokenizer.reply(env.task.summary_prompt))
    tasks: list[Task] = []
    for conversation, note in zip(conversations, env.generate(conversations), strict=True):
        unseen: dict[str, Any] = {name: [] for name in COLUMNS} | {
            "prefill": [],
            "turn_starts": [0] * (len(conversation.responses) + 1),
        }
        unseen["prior_tokens"] = conversation.prior_tokens + sum(conversation.columns["own"])
        prefix = conversation_prefix(conversation, len(conversation.columns["tokens"])) | unseen
        context = {"kind": "summary", "text": env.read_message(conversation, note)}
        tasks.append(replace(conversation.task, prefix=prefix, context=context))
    return list(zip(env.trajectories_of(conversations), tasks, strict=True))


def _share(text: str, share: float) -> str:
    return text[: round(share * len(text))]
