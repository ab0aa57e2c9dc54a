"""Tests of mirror symmetry: involutive mirrors, mirrored decisions, and equivariance after training."""

from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from mirrored_learners import MIRROR, check_averages_both_sides, learner
from torch import Tensor

from robopolicy.algorithms.common.symmetry import SymmetryConfig
from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry, SignedPermutation
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.sim.registry import SimOptions, make_sim


def asymmetry(policy: GaussianPolicy, obs: Tensor) -> float:
    """Relative distance between the action for the mirrored observation and the mirrored action."""
    with torch.no_grad():
        image = MIRROR.action(policy.mode({"state": obs}))
        other = policy.mode(MIRROR.mirror_obs({"state": obs}))
    return float((image - other).norm() / image.norm())


def test_reflection_is_an_involution() -> None:
    x = torch.randn(5, 3, 4)
    reflection = SignedPermutation.of([-1, 1, -1, -1], [(0, 3)])
    assert torch.equal(reflection(reflection(x)), x)
    torch.testing.assert_close(reflection(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([-4.0, 2.0, -3.0, -1.0]))
    assert torch.equal(reflection.permute(x), x[..., [3, 1, 2, 0]])
    for order, sign in (((1, 2, 0), (1.0, 1.0, 1.0)), ((1, 0), (1.0, -1.0)), ((0,), (2.0,)), ((0, 1), (1.0,))):
        with pytest.raises(UserError, match="twice"):
            SignedPermutation(order, sign)


def test_mirroring_decisions_twice_is_the_identity() -> None:
    made = learner(symmetry=SymmetryConfig(augment=True))
    sampler = tools.sampler_for(made)
    rows = made.process_rollout(sampler.collect(made.act))
    once = made.symmetry.image(rows)
    again = made.symmetry.image(once)
    assert not torch.equal(once.obs["state"], rows.obs["state"])
    assert torch.equal(again.obs["state"], rows.obs["state"])
    assert torch.equal(again.record["raw"], rows.record["raw"])
    assert torch.equal(once.logp, rows.logp) and torch.equal(once.advantage, rows.advantage)


def test_loss_averages_both_sides_and_kl_uses_the_executed_side() -> None:
    check_averages_both_sides("ppo")


def test_mirrored_ratios_start_at_one_for_a_symmetric_policy() -> None:
    made = learner(symmetry=SymmetryConfig(augment=True))
    with torch.no_grad():
        for p in made.policy.actor.parameters():
            p.zero_()
    rows = made.symmetry.image(made.process_rollout(tools.sampler_for(made).collect(made.act)))
    torch.testing.assert_close(made.policy.decisions(rows.obs, rows.record).logp, rows.logp)


def trained(settings: SymmetryConfig, updates: int = 12, seed: int = 0) -> GaussianPolicy:
    made = learner(seed=seed, num_steps=20, epochs=5, batch_size=320, lr=2e-3, symmetry=settings)
    sampler = tools.sampler_for(made, 32)
    for _ in range(updates):
        made.update(sampler.collect(made.act))
    return made.policy


def test_mirror_training_makes_the_policy_equivariant() -> None:
    obs = make_sim("toy/point_mass", SimOptions(num_envs=200)).reset(5)["state"][:, None]
    plain, augmented, mirrored = (
        asymmetry(trained(settings), obs)
        for settings in (SymmetryConfig(), SymmetryConfig(augment=True), SymmetryConfig(mirror_coef=10.0))
    )
    assert mirrored < 0.1 and augmented < 0.15 and plain > 0.3, (plain, augmented, mirrored)


def test_mixtures_train_on_mirrored_decisions() -> None:
    made = learner(mixture=True, symmetry=SymmetryConfig(augment=True))
    metrics = made.update(tools.sampler_for(made).collect(made.act))
    assert all(torch.tensor(value).isfinite() for value in metrics.values())


def test_a_resumed_run_ends_with_the_same_weights() -> None:
    def make(seed: int = 0) -> Any:
        return learner(seed=seed, symmetry=SymmetryConfig(augment=True, mirror_coef=0.1))

    one, other = tools.resumed(make)
    assert all(torch.equal(a, b) for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True))


def test_invalid_symmetries_are_refused() -> None:
    with pytest.raises(UserError, match="needs a Gaussian"):
        learner(mixture=True, symmetry=SymmetryConfig(mirror_coef=1.0))
    made = learner(symmetry=SymmetryConfig(augment=True))
    with pytest.raises(UserError, match="has no mirror"):
        made.attach_symmetry(None)
    with pytest.raises(UserError, match="has no 'state'"):
        made.attach_symmetry(MirrorSymmetry({"other": SignedPermutation.of([1.0])}, MIRROR.action))
    made.policy.action_normalizer.offset += 1.0
    with pytest.raises(UserError, match="bounds of the actions"):
        made.attach_symmetry(MIRROR)
