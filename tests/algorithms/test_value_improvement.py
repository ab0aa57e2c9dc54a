"""Shared tests of IQL, IDQL, Cal-QL, PA-RL and EXPO: acting, target critics, heads and invalid settings."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, SPEC, STATISTICS, assert_acts_without_dropout, batch, flow, gaussian, two_modes
from torch import Tensor
from value_learners import MAKERS, peak, same, snapshot

from robopolicy.algorithms.expo import EXPOConfig
from robopolicy.algorithms.pa_rl import PARLConfig
from robopolicy.algorithms.registry import make_algorithm
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.autoregressive import AutoregressiveConfig, AutoregressivePolicy
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy

every = pytest.mark.parametrize("name", MAKERS)


@every
def test_acting_gives_reproducible_chunks_without_a_graph(name: str) -> None:
    algorithm = MAKERS[name]()
    data = batch(two_modes(8), peak)
    for draw in (algorithm.act, algorithm.warmup_action):
        sample = draw(data.obs, generator=torch.Generator().manual_seed(0))
        assert sample.chunk.shape == (8, 2, 1) and not sample.chunk.requires_grad
        again = draw(data.obs, generator=torch.Generator().manual_seed(0))
        assert torch.equal(sample.chunk, again.chunk)


@every
def test_the_target_critic_takes_no_gradient(name: str) -> None:
    algorithm = MAKERS[name]()
    algorithm.update(batch(two_modes(64), peak, online=True))
    assert all(p.grad is None and not p.requires_grad for p in algorithm.target_critic.parameters())
    assert all(p.requires_grad for p in algorithm.critic.parameters())


def diffusion() -> DiffusionPolicy:
    policy = DiffusionPolicy(DiffusionConfig(hidden=(32,)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def autoregressive() -> AutoregressivePolicy:
    policy = AutoregressivePolicy(
        AutoregressiveConfig(transformer_width=16, transformer_layers=1, normalization="minmax"), SPEC
    )
    policy.fit_normalizer(STATISTICS)
    return policy


@pytest.mark.parametrize("name", ["iql", "idql", "pa_rl", "pa_rl_iql", "expo"])
@pytest.mark.parametrize("head", [flow, diffusion, autoregressive, gaussian])
def test_update_changes_policy_and_critic_weights_for_every_policy_head(name: str, head: Callable[[], Policy]) -> None:
    policy = head()
    algorithm = MAKERS[name](policy)
    before, critic = snapshot(policy), snapshot(algorithm.critic)
    metrics = algorithm.update(batch(two_modes(64), peak, online=True))
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics
    assert not same(before, policy) and not same(critic, algorithm.critic)


class Mute(Policy):
    """A policy without an imitation loss."""

    name = "mute"
    spec = SPEC

    def act(self, obs: dict[str, Tensor], *, deterministic: bool = False, generator: Any = None) -> Tensor:
        """Return zeros."""
        return torch.zeros(len(obs["state"]), 2, 1)


@pytest.mark.parametrize("name", ["iql", "idql", "pa_rl", "expo"])
def test_policies_that_cannot_imitate_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="imitation_loss"):
        make_algorithm(name, MAKERS[name]().config, Mute(), total_updates=1)


@pytest.mark.parametrize("build", [lambda: PARLConfig(critic_objective="sarsa"), lambda: EXPOConfig(backup="worst")])
def test_bad_settings_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        build()


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "cal_ql"])  # no imitation in cal_ql
def test_dropout_is_active_only_in_imitation_and_critic_losses(name: str) -> None:
    algorithm = MAKERS[name](flow(hidden_dropout=0.5), critic=replace(SMALL, dropout=0.5))
    assert_acts_without_dropout(algorithm, batch(two_modes(64), peak, online=True, discount=0.9))


def test_consistency_levels_increase_during_imitation() -> None:
    torch.manual_seed(0)
    policy = ConsistencyPolicy(ConsistencyConfig(hidden=(16,), levels_last=40), SPEC)
    policy.fit_normalizer(STATISTICS)
    algorithm, levels = MAKERS["iql"](policy), []
    for updates in (0, 40, 70):
        algorithm.updates = updates
        algorithm.update(batch(two_modes(64), peak))
        levels.append(int(policy.levels))
    assert levels == [10, 20, 40]  # thirds of 100 updates
    trained = MAKERS["expo"](policy)
    trained.update(batch(two_modes(64), peak))
    assert int(policy.levels) == 40  # not reset to 10
