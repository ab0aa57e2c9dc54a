"""TD3+BC on data of mixed quality, and checks that it shares with related algorithms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, flow, gaussian
from mixed_bandit import batches, mixed
from torch import Tensor

from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.td3_bc import TD3BC, TD3BCConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError

COMMON: dict[str, Any] = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05}
SHOWN = mixed(200)


def td3_bc(seed: int = 0, **config: Any) -> TD3BC:
    """A small learner."""
    torch.manual_seed(seed)
    return TD3BC(TD3BCConfig(**(COMMON | config)), gaussian(), total_updates=100)


def drawn(algorithm: TD3BC, count: int = 1) -> Transitions:
    """The last of `count` batches."""
    return batches(algorithm, SHOWN, count)[-1]


def gradient(algorithm: TD3BC, loss: Tensor) -> Tensor:
    """Flat gradient of a loss with respect to the weights of the actor."""
    found = torch.autograd.grad(loss, list(algorithm.policy.actor.parameters()))
    return torch.cat([part.flatten() for part in found])


def check_accepts_only_a_squashed_gaussian_and_sane_settings(make: Callable[..., TD3BC]) -> None:
    """Heads other than a squashed Gaussian and settings without effect are refused."""
    kind = type(make())
    with pytest.raises(UserError, match="squashed"):
        kind(make().config, flow(), total_updates=1)
    for name, value in (("action_l2", 1.0), ("value_reduction", "mean")):
        with pytest.raises(UserError, match=f"{name}={value} has no effect with algorithm={kind.name}, whose loss"):
            make(**{name: value})


def check_a_policy_tau_of_one_removes_the_target_policy(make: Callable[..., TD3BC]) -> None:
    """After a step of the actor, the target policy equals the policy."""
    algorithm = make(policy_tau=1.0, policy_delay=1)
    algorithm.update(drawn(algorithm))
    pairs = zip(algorithm.target_policy.parameters(), algorithm.policy.parameters(), strict=True)
    assert all(torch.equal(target, weights) for target, weights in pairs)


def check_critic_targets_move_only_with_the_actor(algorithm: OffPolicy, data: Transitions) -> None:
    """With a delay of two the target critic keeps its weights in the first critic step and moves in the second."""
    assert algorithm.config.policy_delay == 2
    before = [weights.clone() for weights in algorithm.target_critic.parameters()]
    algorithm.update(data)
    assert all(map(torch.equal, before, algorithm.target_critic.parameters()))
    algorithm.update(data)
    moved = zip(before, algorithm.critic.parameters(), algorithm.target_critic.parameters(), strict=True)
    for old, online, target in moved:
        torch.testing.assert_close(target, old.lerp(online, algorithm.config.tau))
        assert not torch.equal(old, target)
