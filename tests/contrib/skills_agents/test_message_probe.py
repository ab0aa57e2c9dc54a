"""Tests of message observations: functions of the state that change nothing else; constant ones have no effect."""

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


def make_message_sim(kind: str = "", num_envs: int = 3) -> VectorSim:
    wrappers = (WrapperSpec("message", {"kind": kind}),) if kind else ()
    return make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped", wrappers=wrappers))


@pytest.mark.parametrize("kind", MESSAGES)
def test_message_wrappers_meet_the_simulator_contract(kind: str) -> None:
    assert check_simulator(make_message_sim(kind), lambda count: make_message_sim(kind, count)) == []


@pytest.mark.parametrize("kind", MESSAGES)
def test_message_wrapper_adds_only_the_message_observation(kind: str) -> None:
    plain, sim = make_message_sim(), make_message_sim(kind)
    assert torch.equal(plain.reset(0)["state"], sim.reset(0)["state"])
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        action = torch.rand(3, 2, generator=generator) * 2 - 1
        wrapped_step, plain_step = sim.step(action), plain.step(action)
        for name in ("reward", "terminated", "truncated"):
            assert torch.equal(getattr(wrapped_step, name), getattr(plain_step, name))
        for one, other in ((wrapped_step.obs, plain_step.obs), (wrapped_step.final_obs, plain_step.final_obs)):
            assert torch.equal(one["state"], other["state"])
            observed = one[f"message.{kind}"]
            assert torch.equal(observed, message_function(kind, 6, 2, torch.device("cpu"))(one["state"]))
            assert observed.shape == (3, 2) and observed.abs().max() <= 2 * math.pi


def test_only_high_frequency_messages_differ_for_near_observations() -> None:
    state = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    change = {}
    for kind in MESSAGES:
        encode = message_function(kind, 6, 2, torch.device("cpu"))
        change[kind] = float((encode(state) - encode(state + 0.03)).abs().mean())
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


def test_invalid_messages_are_refused() -> None:
    with pytest.raises(UserError, match=r"Unknown message 'randm'.*'random'"):
        make_message_sim("randm")
    with pytest.raises(UserError, match=r"message\.size must be at least 1"):
        WrapperSpec("message", {"size": 0})
