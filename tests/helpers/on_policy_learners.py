"""Actor-critic learners of the point mass by name, and checks for all of them."""

from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.critics.value import ValueConfig
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SMALL = {"num_steps": 16, "epochs": 2, "batch_size": 64}


def algorithm(name: str, seed: int = 0, updates: int = 20, **overrides: Any) -> Any:
    """A learner with a Gaussian policy that uses running statistics."""
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), PolicySpec({"state": (6,)}, 2))
    config = ALGORITHMS[name].config_class(**(SMALL | overrides))
    return make_algorithm(name, config, policy, total_updates=updates)


def check_moves_statistics_when_the_epochs_are_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics are constant during the epochs and change after them."""
    learner = algorithm(name)
    statistics = lambda: [b.clone() for net in (learner.policy, *learner.critics().values()) for b in net.buffers()]  # noqa: E731
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    before, original, seen = statistics(), learner.loss, []

    def spy(rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(statistics())
        return original(rows, log_stats=log_stats)

    monkeypatch.setattr(learner, "loss", spy)
    learner.update(tools.sampler_for(learner).collect(learner.act))
    assert len(seen) == 8 and all(same(before, during) for during in seen)
    assert not same(before, statistics())


def check_takes_the_statistics_of_the_policy(name: str) -> None:
    """A critic with the normalisation of the policy has the policy's statistics."""
    policy = GaussianPolicy(GaussianConfig(normalization="minmax"), PolicySpec({"state": (2,)}, 2))
    policy.fit_normalizer({"state": {"min": [0.0, -2.0], "max": [4.0, 0.0]}})
    make = lambda mode: make_algorithm(  # noqa: E731
        name, ALGORITHMS[name].config_class(critic=ValueConfig(normalization=mode)), policy, total_updates=9
    )
    learner: Any = make("minmax")
    for critic in learner.critics().values():
        assert critic.encoder.normalizer.offset.tolist() == [2.0, -1.0]
        assert critic.encoder.normalizer.scale.tolist() == [2.0, 1.0] and bool(critic.encoder.normalizer.fitted)
    with pytest.raises(UserError, match=r"algorithm\.critic\.normalization=running"):
        make("meanstd")

    running = algorithm(name)
    running.policy.update_stats({"state": 3.0 + torch.randn(64, 1, 6)})
    learner = make_algorithm(name, running.config, running.policy, total_updates=9)
    for critic in learner.critics().values():
        assert torch.equal(critic.encoder.normalizer.mean, running.policy.encoder.normalizer.mean)
        assert float(critic.encoder.normalizer.count) == 64
