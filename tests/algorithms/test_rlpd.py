"""Tests of RLPD: differences from SAC in defaults, target critics, actor objective and layer normalisation."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from chunk_bandit import SMALL, gaussian
from chunk_bandit import batch as bandit_batch
from torch import Tensor

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.algorithms.rlpd import RLPD, RLPDConfig, actor_loss
from robopolicy.algorithms.sac import actor_loss as sac_actor_loss
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.replay import MixedReplay, Replay
from robopolicy.nets.mlp import EnsembleLayerNorm, EnsembleMLP
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SPEC = PolicySpec({"state": (2,)}, action_dim=2, horizon=3, action_horizon=2)


def rlpd(seed: int = 0, **config: Any) -> RLPD:
    torch.manual_seed(seed)
    shape = GaussianConfig(
        hidden=(32,),
        activation="relu",
        squash=True,
        state_dependent_std=True,
        orthogonal_init=False,
        normalization="identity",
        action_normalization="minmax",
    )
    policy = GaussianPolicy(shape, SPEC)
    policy.fit_normalizer({"action": {"min": [-1.0] * 2, "max": [1.0] * 2}})
    critic = CriticConfig(members=10, hidden=(32, 32), activation="relu")
    return RLPD(RLPDConfig(**({"critic": critic, "batch_size": 16} | config)), policy, total_updates=10)


def batch(rows: int, seed: int = 0) -> Transitions:
    """Transitions, half from a dataset and half online."""
    rng = np.random.default_rng(seed)
    arrays = {
        "state": rng.normal(size=(200, 2)),
        "action": rng.uniform(-1, 1, (200, 2)),
        "reward": rng.normal(size=200),
    }
    offline = Replay.from_episodes(Episodes.from_list([Episode(arrays)], 0.1))
    online = Replay.from_episodes(Episodes.from_list([Episode(arrays)], 0.1))
    online.online = True
    sample_spec = ReplaySampleSpec(batch_size=16, horizon=3, steps=2, gamma=0.9)
    return MixedReplay(offline, online).sample(sample_spec, torch.Generator().manual_seed(seed), batches=rows // 16)


def test_defaults_match_the_paper() -> None:
    config = RLPDConfig()
    assert (config.critic.members, config.critic.layer_norm, config.num_min_qs) == (10, True, 2)
    assert (config.utd, config.policy_delay, config.tau, config.batch_size) == (20, 20, 0.005, 256)
    assert rlpd().target_entropy == -2.0  # half of two executed steps of two dimensions
    assert rlpd(target_entropy=-1.0).target_entropy == -1.0


def test_target_std_sets_the_target_entropy_in_full() -> None:
    expected = 4 * math.log(0.15 * math.sqrt(2 * math.pi * math.e))  # two executed steps of two dimensions
    assert rlpd(target_std=0.15).target_entropy == pytest.approx(expected)


@pytest.mark.parametrize("name", ["rlpd", "cal_ql", "expo", "dsrl_sac", "dsrl_na"])
def test_the_first_entropy_bonus_of_learners_from_sparse_rewards_is_small_against_a_return_of_one(name: str) -> None:
    """The bonus is largest for uniform actions: log 2 per dimension, here of chunks of four actions of lift."""
    config: Any = ALGORITHMS[name].config_class()
    assert config.temperature * 4 * 4 * math.log(2.0) < 0.2
    assert not getattr(config, "backup_entropy", False)


@pytest.mark.parametrize(("settings", "learns"), [({}, True), ({"temperature": 1.0}, False)])
def test_the_actor_finds_a_sparse_reward_unless_its_entropy_outweighs_it(settings: Any, learns: bool) -> None:
    """The reward is 1 for a tenth of the actions; the random actor gets 0.1."""
    torch.manual_seed(0)
    hit = lambda action: ((action.squeeze(1) - 0.4).abs() < 0.1).float()  # noqa: E731
    rates: Any = {"lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05, "policy_delay": 1, "batch_size": 128}
    algorithm = RLPD(RLPDConfig(critic=SMALL, **rates, **settings), gaussian(), total_updates=300)
    for _ in range(300):
        algorithm.update(bandit_batch(torch.rand(128, 2, 1) * 2 - 1, hit))
    success = float(hit(algorithm.act({"state": torch.rand(512, 1, 2)}).chunk[:, 0]).mean())
    assert success > 0.3 if learns else success < 0.15


def test_every_critic_layer_is_normalised() -> None:
    body: Any = rlpd().critic.body
    assert sum(isinstance(layer, EnsembleLayerNorm) for layer in body.layers) == 2


def test_actor_updates_once_per_policy_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = rlpd()
    steps: list[int] = []
    spied = lambda *inputs: steps.append(algorithm.critic_steps) or actor_loss(*inputs)  # noqa: E731
    monkeypatch.setattr("robopolicy.algorithms.rlpd.actor_loss", spied)
    algorithm.update(batch(16 * 40))
    assert algorithm.critic_steps == 40 and steps == [20, 40]


def test_target_evaluates_only_two_random_critics(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[tuple[int, ...]] = []
    forward = EnsembleMLP.forward

    def spy(self: EnsembleMLP, x: Tensor, members: Tensor | None = None) -> Tensor:
        evaluated.append(tuple(range(10)) if members is None else tuple(members.tolist()))
        return forward(self, x, members)

    algorithm = rlpd(temperature=0.3, backup_entropy=True)
    part = batch(16)
    monkeypatch.setattr(EnsembleMLP, "forward", spy)
    for _ in range(30):
        algorithm.target(part)
    assert all(len(set(members)) == 2 for members in evaluated) and len(set(evaluated)) > 10
    monkeypatch.undo()

    rng_state = algorithm.generator.get_state()
    actual = algorithm.target(part)
    algorithm.generator.set_state(rng_state)
    chunk, logp = algorithm.policy.rsample(part.next_obs, generator=algorithm.generator)
    members = torch.randperm(10, generator=algorithm.generator)[:2]
    least = algorithm.target_critic(part.next_obs, chunk)[members].min(0).values
    torch.testing.assert_close(actual, part.reward + part.discount * (least - 0.3 * logp))


def test_the_actor_maximises_the_mean_of_the_critics() -> None:
    algorithm = rlpd()
    obs, alpha = batch(16).obs, torch.tensor(0.3)
    loss, logp = actor_loss(algorithm.policy, algorithm.critic, obs, alpha, torch.Generator().manual_seed(1))
    chunk, again = algorithm.policy.rsample(obs, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logp, again)
    torch.testing.assert_close(loss, (0.3 * logp - algorithm.critic(obs, chunk).mean(0)).mean())
    sac_loss, _ = sac_actor_loss(algorithm.policy, algorithm.critic, obs, alpha, torch.Generator().manual_seed(1))
    assert float(sac_loss.detach()) > float(loss.detach())


def test_layer_norm_bounds_values_outside_the_data() -> None:
    largest = {}
    for layer_norm in (False, True):
        torch.manual_seed(0)
        config = CriticConfig(hidden=(64, 64), activation="relu", layer_norm=layer_norm)
        critic = QEnsemble(config, rlpd().policy)
        obs, chunk = {"state": torch.randn(256, 1, 2)}, torch.rand(256, 3, 2) * 2 - 1
        optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
        for _ in range(150):
            loss = (critic(obs, chunk) - chunk[:, 0, 0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            largest[layer_norm] = float(critic(obs, 100 * chunk).abs().max())
    assert largest[True] < 5 < largest[False] / 4
