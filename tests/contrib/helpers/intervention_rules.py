"""Groups without success, and rules for every intervention."""

from dataclasses import replace

import torch
from secret_env import SecretSequenceEnv

from robopolicy.text.rollouts.collector import INTERVENTIONS
from robopolicy.text.rollouts.protocols import Task

SETTINGS = {"graded_hints": {"warmup": 0}}


def make(name: str):
    """An intervention without warmup."""
    return INTERVENTIONS[name](**SETTINGS.get(name, {}))


def failing(env: SecretSequenceEnv, key: int = 0, size: int = 4, nats: float = -4.0):
    """A group without success: the correct symbols are rare without a hint."""
    env.know(key, nats)
    return env.rollout([Task(key, budget=size)] * size)


def with_rewards(group, *rewards):
    """The group with replaced rewards."""
    return [replace(trajectory, reward=reward) for trajectory, reward in zip(group, rewards, strict=True)]


def check_leaves_solved_groups_alone(name: str) -> None:
    """Mixed groups trigger only `self_correct`; solved groups trigger only `drop` and `sample_buffer`."""
    part = make(name)
    mixed, solved = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4)
    assert part.applies(mixed) == (name == "self_correct")
    assert part.applies(solved) == (name in ("drop", "sample_buffer"))


def check_memory_resumes(env: SecretSequenceEnv, name: str) -> None:
    """The memory of an intervention is restored."""
    first, second = make(name), make(name)
    group = failing(env)
    first.observe([with_rewards(group, 1.0, 0.0, 0.0, 0.0)])
    second.load_state_dict(first.state_dict())
    if first.applies(torch.zeros(4)):
        original, restored = (part.apply(group, SecretSequenceEnv(env.layout, seed=3)) for part in (first, second))
        assert [a.source for a in original] == [a.source for a in restored]
        assert all(
            torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(original, restored, strict=True)
        )
