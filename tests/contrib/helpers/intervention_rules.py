"""Groups without success, and the rules that every intervention obeys."""

from dataclasses import replace

import torch
from secret_env import SecretSequenceEnv

from robopolicy.text.rollouts.collector import INTERVENTIONS
from robopolicy.text.rollouts.protocols import Task

SETTINGS = {"graded_hints": {"warmup": 0}}


def make(name: str):
    """An intervention that does not wait."""
    return INTERVENTIONS[name](**SETTINGS.get(name, {}))


def failing(env: SecretSequenceEnv, key: int = 0, size: int = 4, nats: float = -4.0):
    """A group without success: the right symbols are rare, but a hint brings them back."""
    env.know(key, nats)
    return env.rollout([Task(key, budget=size)] * size)


def with_rewards(group, *rewards):
    """The group with other rewards."""
    return [replace(trajectory, reward=reward) for trajectory, reward in zip(group, rewards, strict=True)]


def check_leaves_solved_groups_alone(name: str) -> None:
    """Mixed groups trigger only repairs, and solved ones only what looks at ties."""
    part = make(name)
    mixed, solved = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4)
    assert part.applies(mixed) == (name == "self_correct")
    assert part.applies(solved) == (name in ("drop", "sample_buffer"))


def check_memory_resumes(env: SecretSequenceEnv, name: str) -> None:
    """What an intervention remembers is restored."""
    first, second = make(name), make(name)
    group = failing(env)
    first.observe([with_rewards(group, 1.0, 0.0, 0.0, 0.0)])
    second.load_state_dict(first.state_dict())
    if first.applies(torch.zeros(4)):
        ours, theirs = (part.apply(group, SecretSequenceEnv(env.layout, seed=3)) for part in (first, second))
        assert [a.source for a in ours] == [a.source for a in theirs]
        assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(ours, theirs, strict=True))
