"""Tests of PRDC and A2PR: the limits of beta, regularization targets, and a bandit of mixed quality."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chunk_bandit import SMALL, STATISTICS, batch, gaussian
from mixed_bandit import batches, mixed, regret
from td3_learners import (
    COMMON,
    SHOWN,
    check_a_policy_tau_of_one_removes_the_target_policy,
    check_accepts_only_a_squashed_gaussian_and_sane_settings,
    check_critic_targets_move_only_with_the_actor,
    drawn,
    gradient,
    td3_bc,
)
from torch import Tensor

from robopolicy.algorithms.td3 import q1
from robopolicy.algorithms.td3_bc import TD3BC
from robopolicy.contrib.offline.a2pr import A2PR, A2PRConfig, ChunkVAE, ChunkVAEConfig, better_of, vae_loss
from robopolicy.contrib.offline.prdc import PRDC, PRDCConfig
from robopolicy.critics.value import ValueConfig
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

pytest.importorskip("scipy")


def prdc(seed: int = 0, episodes: Episodes = SHOWN, **config: Any) -> PRDC:
    torch.manual_seed(seed)
    algorithm = PRDC(PRDCConfig(**(COMMON | config)), gaussian(), total_updates=100)
    algorithm.attach_dataset(episodes)
    return algorithm


def a2pr(seed: int = 0, **config: Any) -> A2PR:
    torch.manual_seed(seed)
    small = {
        "value": ValueConfig(hidden=(32, 32), activation="relu", orthogonal_init=False),
        "vae": ChunkVAEConfig(hidden=(32, 32)),
    }
    return A2PR(A2PRConfig(**(COMMON | small | config)), gaussian(), total_updates=100)


MAKERS: dict[str, Callable[..., TD3BC]] = {"prdc": prdc, "a2pr": a2pr}


@pytest.mark.parametrize("name", MAKERS)
def test_only_a_squashed_gaussian_and_valid_settings_are_accepted(name: str) -> None:
    check_accepts_only_a_squashed_gaussian_and_sane_settings(MAKERS[name])


@pytest.mark.parametrize("name", MAKERS)
def test_critic_targets_move_only_with_the_actor(name: str) -> None:
    algorithm = MAKERS[name]()
    check_critic_targets_move_only_with_the_actor(algorithm, drawn(algorithm))


@pytest.mark.parametrize("name", MAKERS)
def test_a_policy_tau_of_one_removes_the_target_policy(name: str) -> None:
    check_a_policy_tau_of_one_removes_the_target_policy(MAKERS[name])


# PRDC.


def test_prdc_with_a_large_beta_equals_td3_bc() -> None:
    pulled, plain = prdc(beta=1e6), td3_bc()
    data = drawn(pulled)
    chunk = pulled.policy.mode(data.obs)
    torch.testing.assert_close(pulled.penalty(data, chunk)[0], plain.penalty(data, chunk)[0])
    torch.testing.assert_close(pulled.actor_loss(data)[0], plain.actor_loss(data)[0])


def test_zero_beta_penalty_is_the_squared_distance_to_the_nearest_action() -> None:
    algorithm = prdc(beta=0.0)
    data = drawn(algorithm)
    chunk = algorithm.policy.mode(data.obs)
    actions = torch.from_numpy(SHOWN.arrays["action"][:, 0])
    nearest = (chunk[:, :1, 0] - actions).abs().min(1).values
    torch.testing.assert_close(algorithm.penalty(data, chunk)[0], nearest.square())


def test_the_nearest_pair_has_no_gradient() -> None:
    algorithm = prdc(alpha=0.0)
    data = drawn(algorithm)
    target, _, novelty = algorithm.nearest(data.obs, algorithm.policy.mode(data.obs))
    assert not target.requires_grad and not novelty.requires_grad
    assert torch.isin(target.flatten(), torch.from_numpy(SHOWN.arrays["action"])).all()


def test_pairs_contain_the_executed_chunk_and_its_mask() -> None:
    policy = GaussianPolicy(
        GaussianConfig(hidden=(8,), squash=True, normalization="minmax", action_normalization="minmax"),
        PolicySpec({"state": (2,)}, action_dim=1, horizon=4, action_horizon=3, obs_horizon=2),
    )
    policy.fit_normalizer(STATISTICS)
    algorithm = PRDC(PRDCConfig(critic=SMALL, beta=1e6), policy, total_updates=1)
    state = np.random.default_rng(0).uniform(-1, 1, (10, 2)).astype(np.float32)
    action = np.linspace(-0.9, 0.9, 10, dtype=np.float32)[:, None]
    arrays = {"state": state, "action": action, "reward": np.zeros(10), "terminated": np.zeros(10, bool)}
    algorithm.attach_dataset(Episodes(arrays, np.array([4, 10]), ("", ""), np.array([-1, -1]), 0.1))
    obs = {"state": torch.from_numpy(np.stack([state[[1, 2]], state[[7, 8]]]))}
    chunk, mask, novelty = algorithm.nearest(obs, torch.zeros(2, 4, 1))
    assert chunk[:, :, 0].tolist() == pytest.approx(action[[[2, 3, 3], [8, 9, 9]], 0])
    assert mask.tolist() == [[1, 1, 0], [1, 1, 0]]
    assert novelty.shape == (2,)


def test_prdc_actions_stay_within_the_usual_neighbour_distance_of_the_data() -> None:
    algorithm = prdc(alpha=0.5)
    for data in batches(algorithm, SHOWN, 150):
        metrics = algorithm.update(data)
    assert metrics["actor/novelty"] < 1


def test_resumed_prdc_finds_the_same_pairs_and_refuses_another_dataset() -> None:
    algorithm = prdc()
    state = copy.deepcopy(algorithm.state_dict())
    assert not any("tree" in key for key in state)
    other = prdc(seed=1)
    other.load_state_dict(state)
    data = drawn(algorithm)
    chunk = torch.zeros(len(data), 2, 1)
    for original, restored in zip(algorithm.nearest(data.obs, chunk), other.nearest(data.obs, chunk), strict=True):
        assert torch.equal(original, restored)
    with pytest.raises(UserError, match="resume with the dataset"):
        prdc(episodes=mixed(100)).load_state_dict(state)


def test_prdc_without_dataset_or_vectors_is_refused() -> None:
    torch.manual_seed(0)
    algorithm = PRDC(PRDCConfig(**COMMON), gaussian(), total_updates=1)
    with pytest.raises(UserError, match="attach_dataset"):
        algorithm.actor_loss(drawn(algorithm))
    with pytest.raises(UserError, match="beta"):
        PRDCConfig(beta=-1.0)
    for key, shape in {"image.top": (3, 16, 16), "embedding.goal": (4,), "entities.others": (2, 3)}.items():
        spec = PolicySpec({"state": (2,), key: shape}, action_dim=1, horizon=2, action_horizon=1)
        seeing = GaussianPolicy(GaussianConfig(hidden=(8,), squash=True, normalization="identity"), spec)
        seeing.fit_normalizer(STATISTICS)
        with pytest.raises(UserError, match=key.replace(".", r"\.")):
            PRDC(PRDCConfig(critic=SMALL), seeing, total_updates=1)


# A2PR.


def test_better_of_selects_the_higher_q_and_gates_on_positive_advantage() -> None:
    generated = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    own = torch.tensor([0.0, 1.0, -2.0, 2.0, 0.7])
    take, gate = better_of(generated, own, torch.tensor([0.5, 0.5, 0.5, 1.0, 0.7]))
    assert take.tolist() == [True, False, True, True, False]
    assert gate.tolist() == [True, True, False, True, False]  # the fourth counts once


def test_regularization_is_zero_without_positive_advantages() -> None:
    algorithm = a2pr(alpha=0.0)
    data = drawn(algorithm)
    with torch.no_grad():
        [layer for layer in algorithm.value.head.modules() if isinstance(layer, torch.nn.Linear)][-1].bias.add_(100.0)
    loss, info = algorithm.actor_loss(data)
    assert float(info["pulled"]) == 0 and not gradient(algorithm, loss).any()
    with torch.no_grad():
        [layer for layer in algorithm.value.head.modules() if isinstance(layer, torch.nn.Linear)][-1].bias.sub_(200.0)
    loss, info = algorithm.actor_loss(data)
    assert float(info["pulled"]) == 1 and gradient(algorithm, loss).any()


def test_the_regularization_target_is_constant_with_a_matching_mask() -> None:
    algorithm = a2pr()
    data = drawn(algorithm)
    data = replace(data, mask=torch.zeros_like(data.mask))
    chunk = algorithm.policy.mode(data.obs)
    target, mask, _ = algorithm.regularization_target(data, chunk)
    own = (target == data.chunk[:, :1]).flatten()
    assert not target.requires_grad and bool(own.any()) and not bool(own.all())
    assert mask.flatten().tolist() == (~own).float().tolist()


def test_v_target_is_the_minimum_of_online_and_target_critic_targets() -> None:
    algorithm = a2pr(target_noise=0.0)
    data = replace(drawn(algorithm), discount=torch.full((128,), 0.9))
    with torch.no_grad():
        chunk = algorithm.target_policy.mode(data.next_obs)
        online, slow = algorithm.critic(data.next_obs, chunk), algorithm.target_critic(data.next_obs, chunk)
        torch.testing.assert_close(algorithm.value_target(data), data.reward + 0.9 * slow.amin(0))
        algorithm.critic.body.layers[-1].bias -= 1.0  # type: ignore[operator]
        torch.testing.assert_close(algorithm.value_target(data), data.reward + 0.9 * (online.amin(0) - 1))


def test_a_step_fits_v_to_its_target_and_the_vae_to_rows_above_v(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, shown = a2pr(), list[Tensor]()
    data = replace(drawn(algorithm), reward=torch.full((128,), 0.7))  # episodes of one step

    def spy(decoded: Tensor, action: Tensor, good: Tensor, *others: Any) -> Tensor:
        shown.append(good)
        return vae_loss(decoded, action, good, *others)

    monkeypatch.setattr("robopolicy.contrib.offline.a2pr.vae_loss", spy)
    for _ in range(50):
        info = algorithm.critic_step(data) | algorithm.fit_models(data)
    with torch.no_grad():
        value, own = algorithm.value(data.obs), q1(algorithm.critic, data.obs, data.chunk)
    assert torch.equal(shown[-1], own > value) and 0 < float(info["good"]) < 1
    assert float((value - 0.7).abs().mean()) < 0.2


def test_the_vae_loss_counts_only_good_rows() -> None:
    decoded, action = torch.zeros(2, 1, 1), torch.tensor([1.0, 3.0]).view(2, 1, 1)
    mean, log_std = torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1)
    loss = vae_loss(decoded, action, torch.tensor([True, False]), mean, log_std, 2.0)
    assert float(loss) == pytest.approx(2.0 * (1.0 + 0.0) / 2 + 0.5 * 0.5 * (1.0 + 0.0) / 2)


def test_vae_learns_only_the_good_actions() -> None:
    torch.manual_seed(0)
    vae = ChunkVAE(ChunkVAEConfig(hidden=(32, 32)), gaussian())
    optimizer = torch.optim.Adam(vae.parameters(), 3e-3)
    data = batch(torch.cat([torch.full((64, 2, 1), 0.6), torch.full((64, 2, 1), -0.6)]), lambda action: action[:, 0])
    action, good = data.chunk[:, :1], torch.arange(128) < 64
    for _ in range(150):
        decoded, mean, log_std = vae(data.obs, action)
        loss = vae_loss(decoded, action, good, mean, log_std, 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert float((vae(data.obs, -torch.ones(128, 1, 1))[0] - 0.6).abs().mean()) < 0.15


def test_the_value_network_of_a2pr_uses_its_configured_normalization() -> None:
    nets = [a2pr(value=ValueConfig(hidden=(8,), normalization=mode)).value for mode in ("running", "identity")]
    assert [value.encoder.normalizer.mode for value in nets] == [a2pr().policy.encoder.normalizer.mode, "identity"]


def test_invalid_a2pr_settings_are_refused() -> None:
    with pytest.raises(UserError, match="reg_coef"):
        A2PRConfig(reg_coef=-0.1)
    with pytest.raises(UserError, match="weight must be positive"):
        ChunkVAEConfig(weight=0.0)
    assert A2PRConfig().vae.weight == 1.5  # the public code's for Walker2d


# All of them.


def test_regret_on_mixed_data_is_highest_for_imitation_then_td3_bc() -> None:
    episodes, found = mixed(), {}
    for name, alpha in (("imitation", 0.0), ("td3_bc", 0.5), ("prdc", 0.5), ("a2pr", 0.5)):
        algorithm = MAKERS.get(name, td3_bc)(alpha=alpha, **({"episodes": episodes} if name == "prdc" else {}))
        for data in batches(algorithm, episodes, 200):
            algorithm.update(data)
        found[name] = regret(algorithm.inference_policy())
    assert found["imitation"] > 0.7 and 0.12 < found["td3_bc"] < 0.4
    assert max(found["prdc"], found["a2pr"]) < 0.1
