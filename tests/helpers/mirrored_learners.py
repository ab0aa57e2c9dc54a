"""On-policy learners with mirror-symmetry augmentation, and a check for all of them."""

from typing import Any

import fine_tuning_tools as tools
import pytest
import torch

from robopolicy.algorithms.common.symmetry import SymmetryConfig
from robopolicy.algorithms.ppo import PPO
from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.mirror_symmetry import MirrorSymmetry, SignedPermutation
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.mixture import MixtureConfig, MixturePolicy

MIRROR = MirrorSymmetry({"state": SignedPermutation.of([-1, 1, -1, 1, -1, 1])}, SignedPermutation.of([-1, 1]))
SPEC = PolicySpec({"state": (6,)}, 2)


def learner(name: str = "ppo", seed: int = 0, mixture: bool = False, **overrides: Any) -> Any:
    """A learner with `MIRROR` attached."""
    torch.manual_seed(seed)
    settings = {"num_steps": 16, "epochs": 2, "batch_size": 64} | overrides
    policy: Any = GaussianPolicy(GaussianConfig(), SPEC)
    if mixture:
        policy = MixturePolicy(MixtureConfig(hidden=(16,), action_normalization="identity"), SPEC)
    made = make_algorithm(name, ALGORITHMS[name].config_class(**settings), policy, total_updates=30)
    assert isinstance(made, PPO)
    made.attach_symmetry(MIRROR)
    return made


def check_averages_both_sides(name: str) -> None:
    """The loss is the mean over original and mirrored rows; the KL divergence is over original rows only."""
    made = learner(name, symmetry=SymmetryConfig(augment=True))
    rows = made.process_rollout(tools.sampler_for(made).collect(made.act))
    image = made.symmetry.image(rows)
    both, info = made.minibatch_loss(rows, image, 16, log_stats=True)
    plain, own = made.loss(rows, log_stats=True)
    mirrored, _ = made.loss(image, log_stats=True)
    torch.testing.assert_close(both, (plain + mirrored) / 2)
    assert float(info["approx_kl"]) == float(own["approx_kl"]) == pytest.approx(0, abs=1e-9)
