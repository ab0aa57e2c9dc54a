"""Messages beside the observations: functions of what is seen that change nothing else, and a constant one nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robopolicy.contrib.skills_agents.message import MESSAGES, message_function
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.registry import WrapperSpec


def told(kind: str = "", num_envs: int = 3) -> VectorSim:
    wrappers = (WrapperSpec("message", {"kind": kind}),) if kind else ()
    return make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped", wrappers=wrappers))


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_contract_holds(kind: str) -> None:
    assert check_simulator(told(kind), lambda count: told(kind, count)) == []


@pytest.mark.parametrize("kind", MESSAGES)
def test_nothing_but_the_message_is_new(kind: str) -> None:
    plain, sim = told(), told(kind)
    assert torch.equal(plain.reset(0)["state"], sim.reset(0)["state"])
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        action = torch.rand(3, 2, generator=generator) * 2 - 1
        ours, theirs = sim.step(action), plain.step(action)
        for name in ("reward", "terminated", "truncated"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        for one, other in ((ours.obs, theirs.obs), (ours.final_obs, theirs.final_obs)):
            assert torch.equal(one["state"], other["state"])
            said = one[f"message.{kind}"]
            assert torch.equal(said, message_function(kind, 6, 2, torch.device("cpu"))(one["state"]))
            assert said.shape == (3, 2) and said.abs().max() <= 2 * math.pi


def test_near_observations_get_unlike_messages_at_a_high_frequency_alone() -> None:
    state = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    change = {}
    for kind in MESSAGES:
        speak = message_function(kind, 6, 2, torch.device("cpu"))
        change[kind] = float((speak(state) - speak(state + 0.03)).abs().mean())
    assert change["constant"] == 0 and change["random"] < 0.3 < 3.0 < change["high_frequency"]


def test_a_constant_message_leaves_learning_unchanged() -> None:
    """Lu et al. 2022: weights on zeros get no gradient, so both policies take the same steps."""
    torch.manual_seed(0)
    settings = GaussianConfig(hidden=(16,), normalization="identity")
    plain = GaussianPolicy(settings, PolicySpec({"state": (6,)}, action_dim=2))
    probed = GaussianPolicy(settings, PolicySpec({"message.constant": (2,), "state": (6,)}, action_dim=2))
    for one, other in zip(probed.parameters(), plain.parameters(), strict=True):
        one.data[..., -other.shape[-1] :] = other.data  # messages come first
    learners = [(policy, torch.optim.Adam(policy.parameters(), lr=1e-2)) for policy in (plain, probed)]
    for _ in range(5):
        state, chunk = torch.randn(32, 1, 6), torch.randn(32, 1, 2)
        for policy, optimizer in learners:
            optimizer.zero_grad()
            loss, _ = policy.imitation_loss({"state": state, "message.constant": torch.zeros(32, 1, 2)}, chunk)
            loss.mean().backward()
            optimizer.step()
    for one, other in zip(probed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one[..., -other.shape[-1] :], other)


def test_a_policy_is_evaluated_with_the_messages_it_was_trained_with() -> None:
    seen: dict[str, tuple[int, ...]] = {"state": (6,), "message.random": (4,)}
    options = observation_options([seen])
    assert options == {"wrappers": (WrapperSpec("message", {"kind": "random", "size": 4}),)}
    shown: Tensor = make_sim("toy/point_mass", SimOptions(num_envs=1, **options)).reset(0)["message.random"]
    assert shown.shape == (1, 4)
    with pytest.raises(
        UserError, match="'message' with different options, kind=random, size=4 and kind=constant, size=4"
    ):
        observation_options([seen, {"message.constant": (4,)}])


def test_messages_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UserError, match=r"Unknown message 'randm'.*'random'"):
        told("randm")
    with pytest.raises(UserError, match=r"message\.size must be at least 1"):
        WrapperSpec("message", {"size": 0})
