"""Tests of SAC against closed forms: soft optimum of a bandit, temperature, values of small chains, invariants."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.max_entropy import Temperature
from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.algorithms.sac import SAC, SACConfig, actor_loss
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.density import HALF_LOG_2PI, log_tanh_slope, sample_squashed
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

POINT = PolicySpec({"state": (2,)}, action_dim=1)
CHUNK = PolicySpec({"state": (2,)}, action_dim=2, horizon=4, action_horizon=3, obs_horizon=2)


def gaussian(spec: PolicySpec = POINT, low: float = -1.0, high: float = 1.0, **config: Any) -> GaussianPolicy:
    settings = {"hidden": (32,), "normalization": "identity", "action_normalization": "minmax", "activation": "relu"}
    settings |= {"squash": True, "state_dependent_std": True, "orthogonal_init": False}
    policy = GaussianPolicy(GaussianConfig(**(settings | config)), spec)  # type: ignore[arg-type]
    policy.fit_normalizer({"action": {"min": [low] * spec.action_dim, "max": [high] * spec.action_dim}})
    return policy


def sac(spec: PolicySpec = POINT, seed: int = 0, critic: Any = None, **config: Any) -> SAC:
    torch.manual_seed(seed)
    critic = {"hidden": (32,), "activation": "relu", "layer_norm": False} | (critic or {})
    settings = {"batch_size": 16, "critic": CriticConfig(**critic)} | config
    return SAC(SACConfig(**settings), gaussian(spec), total_updates=10)


def windows(rows: int, spec: PolicySpec = POINT, seed: int = 0, **values: Tensor) -> Transitions:
    """Random transitions with the fields in `values` replaced."""
    g = torch.Generator().manual_seed(seed)

    def obs() -> dict[str, Tensor]:
        return {"state": torch.randn(rows, spec.obs_horizon, 2, generator=g)}

    made = Transitions(
        obs=obs(),
        chunk=torch.rand(rows, spec.horizon, spec.action_dim, generator=g) * 2 - 1,
        mask=torch.ones(rows, spec.horizon),
        rewards=torch.zeros(rows, spec.action_horizon),
        steps=torch.full((rows,), spec.action_horizon),
        discount=torch.full((rows,), 0.9),
        reward=torch.randn(rows, generator=g),
        next_obs=obs(),
        returns=torch.full((rows,), torch.nan),
        record={},
        online=torch.ones(rows, dtype=torch.bool),
        weight=torch.ones(rows),
        index=torch.arange(rows),
    )
    return replace(made, **values)  # type: ignore[arg-type]


class Known(nn.Module):
    """Two critics with known action values."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, obs: dict[str, Tensor], chunk: Tensor) -> Tensor:
        return torch.stack([self.function(chunk), self.function(chunk) + 1])

    def min_q(self, obs: dict[str, Tensor], chunk: Tensor) -> Tensor:
        return self.function(chunk)


@pytest.mark.parametrize("shape", [(5, 3, 2), (3, 2)])
def test_a_squashed_sample_has_the_gradients_of_its_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mean = (2 * torch.randn(5, 3, 2, dtype=torch.float64)).requires_grad_()
    log_std = torch.randn(shape, dtype=torch.float64).requires_grad_()
    noise = torch.randn(5, 3, 2, dtype=torch.float64)
    raw = mean + log_std.exp() * noise
    plain = raw.tanh(), -0.5 * noise**2 - log_std - HALF_LOG_2PI - log_tanh_slope(raw)
    sampled = sample_squashed(mean, log_std, noise)
    weights = [torch.randn(5, 3, 2, dtype=torch.float64) for _ in range(2)]
    gradients = []
    for result in (plain, sampled):
        total = torch.stack([(w * x).sum() for w, x in zip(weights, result, strict=True)]).sum()
        gradients.append(torch.autograd.grad(total, [mean, log_std]))
    torch.testing.assert_close(plain, sampled)
    torch.testing.assert_close(*gradients)


def test_a_saturated_squashed_sample_is_finite() -> None:
    mean = torch.tensor([[[-40.0, 40.0]]]).requires_grad_()
    sampled, density = sample_squashed(mean, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    (sampled + density).sum().backward()
    assert bool(density.isfinite().all()) and mean.grad is not None and mean.grad.flatten().tolist() == [-2, 2]


def test_reparameterised_and_policy_samples_agree() -> None:
    policy = gaussian(replace(CHUNK, action_horizon=4), low=-3.0, high=5.0)
    obs = {"state": torch.randn(6, 2, 2)}
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(3))
    chunk, logp = policy.rsample(obs, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(chunk, sample.chunk)
    torch.testing.assert_close(logp, sample.logp[:, 0])


def test_the_entropy_counts_executed_actions_only() -> None:
    algorithm = sac(CHUNK)
    assert algorithm.target_entropy == -6.0
    loss, _, _ = algorithm.actor_loss(windows(8, CHUNK), torch.tensor(0.1))
    loss.backward()
    output = list(algorithm.policy.actor.parameters())[-1].grad
    assert output is not None
    by_step = output.view(4, 4).abs().sum(1)  # four steps of two means and two standard deviations
    assert bool((by_step[:3] > 0).all()) and float(by_step[3]) == 0


def test_warmup_actions_are_uniform_over_the_bounds() -> None:
    algorithm = SAC(SACConfig(), gaussian(low=-2.0, high=6.0), total_updates=1)
    obs, generator = {"state": torch.zeros(4000, 1, 2)}, torch.Generator().manual_seed(0)
    histogram = torch.histc(algorithm.warmup_action(obs, generator=generator).chunk, 8, -2, 6)
    assert int(histogram.sum()) == 4000 and float(histogram.min()) > 400


# Losses against closed forms.


def test_actor_converges_to_the_soft_optimum_of_a_bandit() -> None:
    """For Q(a) = -(a - .3)^2 / (2 s^2 / alpha), the soft optimum is a normal density with mean .3 and deviation s."""
    torch.manual_seed(0)
    alpha, deviation = torch.tensor(0.5), 0.05
    critic: Any = Known(lambda chunk: -alpha * (chunk[:, 0, 0] - 0.3).square() / (2 * deviation**2))
    policy = gaussian()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    obs = {"state": torch.zeros(256, 1, 2)}
    for _ in range(400):
        loss, _ = actor_loss(policy, critic, obs, alpha)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sampled = policy.act({"state": torch.zeros(20_000, 1, 2)}, generator=torch.Generator().manual_seed(0))
    assert float(sampled.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(sampled.std()) == pytest.approx(deviation, rel=0.1)


def test_temperature_adapts_towards_the_target_entropy() -> None:
    temperature = Temperature(0.5, lr=0.1)
    temperature.step(torch.tensor([1.0, 3.0]), target_entropy=-1.0)  # entropy -2
    assert temperature.log.grad is not None and float(temperature.log.grad) == -1.0  # entropy minus target
    assert float(temperature.value) == pytest.approx(0.5 * math.exp(0.1))  # Adam's first step is its learning rate
    low, high = sac(target_entropy=-50.0), sac(target_entropy=50.0)
    for algorithm in (low, high):
        for _ in range(3):
            algorithm.update(windows(16))
    assert float(low.temperature.log.detach()) < 0 < float(high.temperature.log.detach())
    fixed = sac(temperature=0.2, temperature_lr=0.0)
    fixed.update(windows(16))
    assert float(fixed.temperature.value) == pytest.approx(0.2)


def test_the_temperature_has_no_gradient_of_the_actor_loss() -> None:
    algorithm = sac(target_entropy=3.0)
    loss, _, _ = algorithm.actor_loss(windows(16), algorithm.temperature.value)
    assert torch.autograd.grad(loss, algorithm.temperature.log, allow_unused=True)[0] is None


@pytest.mark.parametrize("backup_entropy", [True, False])
def test_target_is_reward_plus_discounted_soft_value_of_the_next_observation(backup_entropy: bool) -> None:
    algorithm = sac(temperature=0.2, backup_entropy=backup_entropy)
    algorithm.target_critic = Known(lambda chunk: 5 + chunk[:, 0, 0])  # type: ignore[assignment]
    batch = windows(4, discount=torch.tensor([0.9, 0.81, 0.0, 0.9]))
    rng_state = algorithm.generator.get_state()
    actual = algorithm.target(batch)
    algorithm.generator.set_state(rng_state)
    chunk, logp = algorithm.policy.rsample(batch.next_obs, generator=algorithm.generator)
    bonus = 0.2 * logp if backup_entropy else 0.0
    expected = batch.reward + batch.discount * (5 + chunk[:, 0, 0] - bonus)  # the smaller of the two critics
    torch.testing.assert_close(actual, expected)
    assert float(actual[2].detach()) == float(batch.reward[2])


def state(t: int) -> dict[str, Tensor]:
    """State t of a chain, on a circle and far from the other states."""
    angle = torch.tensor(1.2 * t)
    return {"state": 2 * torch.stack([angle.cos(), angle.sin()])[None]}


def chain(rewards: list[float], end: str, episodes: int = 30) -> Replay:
    """Replay of episodes through `len(rewards)` states, independent of the actions."""
    replay, g = Replay(1000, gamma=0.9), torch.Generator().manual_seed(0)
    for _ in range(episodes):
        for t, reward in enumerate(rewards):
            last = t == len(rewards) - 1
            replay.add(
                torch.tensor([0]),
                state(t),
                torch.rand(1, 1, generator=g) * 2 - 1,
                torch.tensor([reward]),
                torch.tensor([last and end == "terminated"]),
                torch.tensor([last and end == "truncated"]),
                state(t + 1),
            )
    return replay


def values(algorithm: SAC, states: int) -> list[float]:
    """Mean Q of the states of a chain at the action 0."""
    obs = {"state": torch.stack([state(t)["state"] for t in range(states)])}
    return algorithm.critic(obs, torch.zeros(states, algorithm.policy.spec.horizon, 1)).mean(0).tolist()


def learn(algorithm: SAC, replay: Replay, updates: int = 40) -> SAC:
    g = torch.Generator().manual_seed(0)
    for _ in range(updates):
        algorithm.update(replay.sample(algorithm.sample_spec, g, batches=10))
    return algorithm


FAST: dict[str, Any] = {
    "gamma": 0.9,
    "temperature": 1e-6,
    "temperature_lr": 0.0,
    "tau": 0.05,
    "critic_lr": 3e-3,
    "batch_size": 32,
}


@pytest.mark.parametrize("n_step", [0, 3])
def test_critic_values_of_a_terminating_chain_equal_discounted_returns(n_step: int) -> None:
    algorithm = learn(sac(**FAST, n_step=n_step), chain([1.0, -2.0, 4.0], "terminated"))
    assert values(algorithm, 3) == pytest.approx([1 - 0.9 * 2 + 0.81 * 4, -2 + 0.9 * 4, 4.0], abs=0.15)


def test_critic_bootstraps_from_the_last_state_of_truncated_episodes() -> None:
    """Truncated one-step episodes of reward 1 between two states bootstrap from the last state."""
    replay, g = Replay(1000), torch.Generator().manual_seed(0)
    for _ in range(200):
        here, there = (state(int(torch.randint(2, (1,), generator=g))) for _ in range(2))
        action, no = torch.rand(1, 1, generator=g) * 2 - 1, torch.tensor([False])
        replay.add(torch.tensor([0]), here, action, torch.ones(1), no, torch.tensor([True]), there)
    algorithm = learn(sac(**{**FAST, "gamma": 0.5}), replay)
    assert values(algorithm, 2) == pytest.approx([2.0, 2.0], abs=0.15)  # 1 / (1 - gamma)


def test_chunk_value_is_the_executed_rewards_plus_the_next_value() -> None:
    spec = PolicySpec({"state": (2,)}, action_dim=1, horizon=3, action_horizon=2)
    algorithm = learn(sac(spec, **FAST), chain([1.0, 1.0, 1.0, 5.0], "terminated"))
    assert values(algorithm, 4) == pytest.approx(
        [1 + 0.9 + 0.81 * (1 + 0.9 * 5), 1 + 0.9 + 0.81 * 5, 1 + 0.9 * 5, 5.0], abs=0.25
    )


def test_actor_learns_the_optimal_actions() -> None:
    torch.manual_seed(0)
    replay, g, yes = Replay(4000), torch.Generator().manual_seed(0), torch.tensor([True])
    for _ in range(600):
        side = float(torch.randint(2, (1,), generator=g)) * 2 - 1
        action = torch.rand(1, 1, generator=g) * 2 - 1
        obs = {"state": torch.tensor([[side, 1.0]])}
        replay.add(torch.tensor([0]), obs, action, -(action[:, 0] - 0.5 * side).square(), yes, ~yes, obs)
    algorithm = learn(sac(**{**FAST, "lr": 3e-3, "temperature": 1e-3}, critic={"hidden": (64, 64)}), replay, 60)
    best = algorithm.inference_policy().act({"state": torch.tensor([[[-1.0, 1.0]], [[1.0, 1.0]]])}, deterministic=True)
    assert best.flatten().tolist() == pytest.approx([-0.5, 0.5], abs=0.1)


# Invariants.


def test_critic_steps_count_minibatches() -> None:
    algorithm = sac(policy_delay=3)
    steps: list[int] = []
    loss = algorithm.actor_loss
    algorithm.actor_loss = lambda batch, alpha: steps.append(len(batch)) or loss(batch, alpha)  # type: ignore
    metrics = algorithm.update(windows(16 * 7))
    assert (algorithm.critic_steps, steps, algorithm.updates) == (7, [16, 16], 1)
    assert {"critic/loss", "critic/value", "actor/loss", "actor/entropy", "actor/temperature"} <= metrics.keys()
    assert algorithm.td_errors is not None and algorithm.td_errors.shape == (16 * 7,)


def test_the_sample_spec_describes_the_policy() -> None:
    spec = sac(CHUNK, gamma=0.8).sample_spec
    assert (spec.horizon, spec.steps, spec.obs_horizon, spec.gamma) == (4, 3, 2, 0.8)
    assert sac(CHUNK, n_step=7).sample_spec.steps == 7
    with pytest.raises(UserError, match=r"algorithm.n_step=2 is less than the 3 executed steps"):
        sac(CHUNK, n_step=2)


def test_td_errors_average_the_critic_errors_and_weights_scale_the_loss() -> None:
    algorithm = sac(critic_lr=1e-30, tau=1e-30)
    batch = windows(16)
    rng_state = algorithm.generator.get_state()
    loss, info = algorithm.critic_loss(batch)
    algorithm.generator.set_state(rng_state)
    expected = (algorithm.critic(batch.obs, batch.chunk) - algorithm.target(batch)).abs().mean(0)
    torch.testing.assert_close(info["td_errors"].abs().mean(0), expected.detach())
    algorithm.generator.set_state(rng_state)
    half, _ = algorithm.critic_loss(replace(batch, weight=torch.full((16,), 0.5)))
    torch.testing.assert_close(half, loss / 2)


def test_target_follows_by_tau_and_actor_loss_does_not_train_the_critic() -> None:
    algorithm = sac(tau=0.25)
    before = copy.deepcopy(algorithm.target_critic.state_dict())
    optimizer_step(algorithm.optimizer, algorithm.actor_loss(windows(16), torch.tensor(0.2))[0])
    assert all(p.grad is None for p in algorithm.critic.parameters())
    algorithm.update(windows(16))
    assert all(not p.requires_grad and p.grad is None for p in algorithm.target_critic.parameters())
    learned = algorithm.critic.state_dict()
    for key, value in algorithm.target_critic.state_dict().items():
        torch.testing.assert_close(value.float(), torch.lerp(before[key].float(), learned[key].float(), 0.25))


@pytest.mark.parametrize(
    "critic", [{}, {"members": 4, "layer_norm": True}, {"bins": 11, "value_min": -100.0, "value_max": 0.0}]
)
def test_resumed_algorithm_ends_with_the_weights_of_an_uninterrupted_one(critic: dict[str, Any]) -> None:
    straight = sac(CHUNK, critic=critic)
    straight.update(windows(32, CHUNK, seed=1))
    state = copy.deepcopy(straight.state_dict())
    straight.update(windows(32, CHUNK, seed=2))
    torch.manual_seed(99)
    resumed = sac(CHUNK, seed=5, critic=critic)
    resumed.load_state_dict(state)
    resumed.update(windows(32, CHUNK, seed=2))
    assert resumed.updates == 2 and resumed.critic_steps == 4
    for part in ("policy", "critic", "target_critic", "temperature"):
        one, two = (getattr(algorithm, part).state_dict() for algorithm in (straight, resumed))
        assert all(torch.equal(value, two[key]) for key, value in one.items()), part


def test_running_statistics_reach_policy_critic_and_target() -> None:
    torch.manual_seed(0)
    algorithm = SAC(SACConfig(batch_size=16), gaussian(normalization="running"), total_updates=1)
    batch = windows(64)
    algorithm.update(batch)
    for part in (algorithm.policy.encoder, algorithm.critic.encoder, algorithm.target_critic.encoder):
        torch.testing.assert_close(part.normalizer.offset, batch.obs["state"].mean((0, 1)))


def test_bfloat16_updates_align_with_float32_updates() -> None:
    moved: dict[str, Tensor] = {}
    for precision in ("float32", "bfloat16"):
        algorithm = sac(precision=precision, critic={"hidden": (64, 64)})
        before = torch.cat([p.detach().flatten() for p in algorithm.critic.parameters()])
        for seed in range(20):
            algorithm.update(windows(16, seed=seed))
        after = torch.cat([p.detach().flatten() for p in algorithm.critic.parameters()])
        assert after.dtype == torch.float32
        moved[precision] = after - before
    cosine = torch.nn.functional.cosine_similarity(*moved.values(), dim=0)
    assert 0.9 < float(cosine) < 0.99999
    with pytest.raises(UserError, match="precision"):
        sac(precision="float16")


def test_other_policies_are_refused() -> None:
    for policy in (FlowPolicy(FlowConfig(), POINT), gaussian(squash=False)):
        with pytest.raises(UserError, match="needs policy=squashed_gaussian"):
            SAC(SACConfig(), policy, total_updates=1)
