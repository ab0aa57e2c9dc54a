"""Capabilities of a text environment besides rollouts: hints, prefixes, demonstrations, repairs and summaries.

`TextWorld.abilities` finds these functions by name (`robopolicy.text.rollouts.protocols.able`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from robopolicy.errors import UserError
from robopolicy.text.conversation import COLUMNS, Talk
from robopolicy.text.rollouts.protocols import TEACHER, Attempt, Task
from robopolicy.text.text_env import TextWorld, prefix_of, score


def hint(env: TextWorld, task: Task, kind: str, share: float) -> Task | None:
    """The task with a share of the solution in front of its prompt; None where there is none."""
    solution = env.solution(task)
    if solution is None:
        return None
    return replace(task, context={"kind": kind, "share": share, "text": _share(" ".join(solution), share)})


def begin(env: TextWorld, task: Task, share: float) -> Task | None:
    """The task with a share of the solution written already; None where there is none."""
    solution = env.solution(task)
    if solution is None:
        return None
    talk = env.start(replace(task, prefix=None))
    turns = share * len(solution)
    for message in solution[: int(turns)]:
        env.append(talk, message)
    rest = "" if talk.done else _share(solution[int(turns)], turns % 1.0)
    talk.begun = env.policy.tokenizer.encode(rest)
    talk.add(talk.begun)
    if talk.done:
        return task
    given = prefix_of(talk, len(talk.columns["tokens"]))
    return replace(task, prefix={**given, "paid": [0.0] * len(talk.said), "helped": True})  # it earns nothing


def teach(env: TextWorld, task: Task, count: int) -> list[Attempt]:
    """Up to `count` solutions, of which there is one: demonstrated tokens with log-probability 0, source `TEACHER`.

    The policy is compared with a certain teacher, so that the ratio is the probability itself.
    """
    solution = env.solution(task)
    if solution is None:
        return []
    talk = env.start(replace(task, prefix=None))
    for message in solution:
        env.append(talk, message, own=True)
    return [replace(env.attempt_of(talk), source=TEACHER)][:count]


def conclude(env: TextWorld, task: Task) -> Attempt | None:
    """The last message of the solution, said here; what came before it is no decision. None: there is none."""
    talk = env.start(task)
    solution = talk.episode.demonstration()
    if not solution:
        return None
    talk.columns["own"] = [False] * len(talk.columns["own"])
    talk.calls = None
    talk.measures.clear()  # of the messages before, if any: rows that some have grades for cannot be joined
    tokens = env.policy.message(solution[-1])
    talk.add(tokens, env.policy.order(len(tokens), env.generator))
    return replace(env.attempt_of(talk), source=TEACHER)


@torch.no_grad()
def rescore(env: TextWorld, attempts: Sequence[Attempt], tasks: Sequence[Task]) -> list[Attempt]:
    """The same tokens as answers to other tasks: `logp_old` under these, `logp_behaviour` as they were drawn."""
    result: list[Attempt] = []
    for attempt, task in zip(attempts, tasks, strict=True):
        old, prompt = attempt.decisions, env.prompt_tokens(task, env.task.pose(int(task.payload)))
        written = old.extra["tokens"][0, int(old.extra["start"]) :].tolist()
        extra = {**old.extra, "tokens": torch.tensor([prompt + written]), "start": torch.tensor([len(prompt)])}
        logp = score(env.policy, old.with_fields(extra=extra)).logp
        decisions = old.with_fields(logp_old=logp.cpu(), logp_behaviour=old.logp_old, extra=extra)
        result.append(replace(attempt, task=task, decisions=decisions))
    return result


def rewrite(env: TextWorld, task: Task, how: str) -> Task:
    """Another problem with the same answer, "simpler" or "varied", under a key of its own.

    Raises:
        UserError: The task cannot restate its problems.
    """
    seed = env.task.restated(int(task.payload), how)
    if seed is None:
        raise UserError(f"Task {env.task.name} cannot restate its problems; choose another recipe or task.")
    return replace(task, key=seed, payload=seed, prefix=None, context=None)


def repair(env: TextWorld, attempt: Attempt) -> Task:
    """The same problem with the failed messages in front of the prompt."""
    talk: Talk = attempt.record
    return replace(attempt.task, prefix=None, context={"kind": "repair", "text": " ".join(talk.said)})


def summarize(env: TextWorld, attempts: Sequence[Attempt]) -> list[tuple[Attempt, Task]]:
    """A note in place of the next message, which the episode does not hear; what goes on sees it in the prompt.

    In the row of its window it is part of the turn before which it was written. What goes on has played the window
    once more when it ends, so the window is not `played` any longer.
    """
    summed = set(map(id, attempts))
    env.played = [attempt for attempt in env.played if id(attempt) not in summed]
    talks: list[Talk] = [attempt.record for attempt in attempts]
    for talk in talks:
        talk.add(env.policy.tokenizer.reply(env.task.recap))
    tasks: list[Task] = []
    for talk, note in zip(talks, env.generate(talks), strict=True):
        unseen: dict[str, Any] = {name: [] for name in COLUMNS} | {
            "begun": [],
            "starts": [0] * (len(talk.said) + 1),
        }
        unseen["earlier"] = talk.earlier + sum(talk.columns["own"])
        prefix = prefix_of(talk, len(talk.columns["tokens"])) | unseen
        context = {"kind": "summary", "text": env.read_message(talk, note)}
        tasks.append(replace(talk.task, prefix=prefix, context=context))
    return list(zip(env.attempts_of(talks), tasks, strict=True))


def _share(text: str, share: float) -> str:
    return text[: round(share * len(text))]
