"""Tests of the shared settings of the fine-tuners: clip, entropy bonus, early stop, and targets of the critic."""

import math
from dataclasses import replace
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.common.fine_tuning import clipped_step, cosine_rate, velocity_distance
from robopolicy.algorithms.common.rollout_batch import RewardNormalizer, RolloutBatch
from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy

ROWS = 64
SURROGATE_ALONE: dict[str, dict[str, Any]] = {
    "reinflow": {"entropy_coef": 0.0, "logp_clamp": None},
    "policyflow": {"entropy_coef": 0.0, "brownian_coef": 0.0},
    "flow_grpo": {"kl_coef": 0.0},
    "flow_sde": {"kl_coef": 0.0},
    "dppo": {"entropy_coef": 0.0},
}
CLIPS = {"reinflow": 0.01, "policyflow": 0.2, "flow_grpo": 0.005, "flow_sde": 0.01}


def tuner(name: str, *, updates: int = 20, **config: Any) -> Any:
    policy = tools.diffusion_head() if name == "dppo" else tools.flow_head()
    settings = SURROGATE_ALONE[name] | config
    return make_algorithm(name, ALGORITHMS[name].config_class(**settings), policy, total_updates=updates)


def observations(rows: int = ROWS) -> Observation:
    return {"state": torch.randn(rows, 1, 6, generator=torch.Generator().manual_seed(1))}


def fresh_rows(algorithm: Any, advantage: Tensor) -> RolloutBatch:
    """Fresh decisions with these advantages, as in the first epoch."""
    obs = observations(len(advantage))
    sample = algorithm.policy.sample(obs, generator=torch.Generator().manual_seed(0))
    rows = RolloutBatch(obs, sample.record, sample.logp, advantage, advantage, advantage)
    return tools.completed(algorithm, rows)


@pytest.mark.parametrize("name", ["reinflow", "dppo", "ac_flow"])
def test_a_critic_with_the_normalisation_of_the_policy_copies_its_statistics(name: str) -> None:
    policy = (tools.diffusion_head if name == "dppo" else tools.flow_head)(normalization="minmax")
    with torch.no_grad():
        policy.encoder.normalizer.offset.copy_(torch.arange(6.0))
    config = ALGORITHMS[name].config_class
    algorithm: Any = make_algorithm(name, config(critic=ValueConfig(normalization="minmax")), policy, total_updates=9)
    assert torch.equal(algorithm.critic.encoder.normalizer.offset, torch.arange(6.0))
    assert bool(algorithm.critic.encoder.normalizer.fitted) and float(algorithm.critic.encoder.normalizer.scale[0]) == 2
    for other in (
        ValueConfig(normalization="meanstd"),
        ValueConfig(normalization="minmax", privileged_obs={"goal": 6}),
    ):
        with pytest.raises(UserError, match=r"algorithm\.critic\.normalization=running"):
            make_algorithm(name, config(critic=other), policy, total_updates=9)


@pytest.mark.parametrize("name", ["reinflow", "dppo", "fpo", "ac_flow"])
def test_an_unknown_discount_unit_is_refused_at_once(name: str) -> None:
    with pytest.raises(UserError, match="discount unit 'steps'"):
        ALGORITHMS[name].config_class(discount_unit="steps")


def signs() -> Tensor:
    """Equal numbers of positive and negative advantages."""
    return torch.tensor([1.0, -1.0]).repeat(ROWS // 2)


def with_ratios(algorithm: Any, rows: RolloutBatch, ratio: Tensor) -> RolloutBatch:
    """`rows` with recorded log-probabilities that give the current policy the ratios `ratio` `(B,)`."""
    now = algorithm.policy.decisions(rows.obs, rows.record).logp.detach()
    spec = algorithm.policy.spec
    terms = spec.horizon * spec.action_dim if algorithm.name == "reinflow" else 1  # its ratio is per dimension
    return replace(rows, logp=now - terms * ratio.log()[:, None])


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("stretch", [2.0, 0.5, -2.0])  # change of the ratios along the advantage, in clips
def test_decisions_beyond_the_clip_have_no_gradient(name: str, stretch: float) -> None:
    algorithm, clip, advantage = tuner(name), CLIPS[name], signs()
    rows = with_ratios(algorithm, fresh_rows(algorithm, advantage), 1 + stretch * clip * advantage)
    loss, info = algorithm.loss(rows)
    size = 1.0 if name == "flow_grpo" else math.sqrt((ROWS - 1) / ROWS)  # of normalised advantages
    assert float(loss.detach()) == pytest.approx(-min(stretch, 1.0) * clip * size, abs=2e-5)
    has_gradient = any(bool(slope.any()) for slope in tools.gradient(loss, tools.actor_parameters(algorithm)))
    assert has_gradient == (stretch < 1)
    assert float(info["clip_fraction"]) == float(stretch > 1)


def spread_of(algorithm: Any, rows: RolloutBatch) -> Tensor:
    """Standard deviations of the distribution in the entropy bonus of `algorithm`."""
    policy = algorithm.policy
    if algorithm.name == "policyflow":
        return policy.log_std.exp().expand(policy.spec.action_horizon, -1)
    std = policy.transitions(rows.obs, rows.record)[1].exp()  # (B, K, H, A)
    return std[:, :, : policy.spec.action_horizon] if algorithm.name == "dppo" else std


@pytest.mark.parametrize("name", ["reinflow", "policyflow", "dppo"])
def test_the_entropy_bonus_rewards_a_wider_spread(name: str) -> None:
    learned: dict[str, Any] = {"eta_min": 0.1} if name == "dppo" else {}
    plain, bonus = tuner(name, **learned), tuner(name, **learned, entropy_coef=0.5)
    rows = fresh_rows(plain, signs())
    with torch.no_grad():
        difference = bonus.loss(rows)[0] - plain.loss(rows)[0]
        entropy = torch.distributions.Normal(0.0, spread_of(bonus, rows)).entropy()
    counted = entropy.sum() if name == "policyflow" else entropy.mean()
    assert float(counted) != pytest.approx(0.0, abs=0.1)
    torch.testing.assert_close(difference, -0.5 * counted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_the_gradient_norm_of_the_actor_is_clipped(limit: float) -> None:
    algorithm = tuner("flow_sde", grad_clip=limit)
    loss, info = algorithm.loss(fresh_rows(algorithm, signs()))
    info = clipped_step(algorithm.actor_optimizer, loss, info, limit)
    length = torch.stack([p.grad.norm() for p in tools.actor_parameters(algorithm) if p.grad is not None]).norm()
    measured = float(info["actor/grad_norm"])  # before clipping
    assert 1e-3 < measured < 1e3 and float(length) == pytest.approx(min(measured, limit), rel=1e-3)


def test_the_learning_rate_falls_along_a_cosine_to_its_last_value() -> None:
    algorithm = tuner("flow_sde", lr=3e-4, lr_final=1e-4, lr_warmup=0, updates=8)
    found = []
    for algorithm.updates in (0, 2, 4, 8):
        rate = cosine_rate(algorithm.actor_optimizer, algorithm.config, algorithm.updates, algorithm.total_updates)
        assert rate == algorithm.actor_optimizer.param_groups[0]["lr"]
        found.append(rate)
    assert found == pytest.approx([3e-4, 2e-4 + 1e-4 * math.sqrt(0.5), 2e-4, 1e-4])


@pytest.mark.parametrize(("name", "critic_only"), [("flow_grpo", 0), ("flow_sde", 2)])
def test_the_learning_rate_increases_linearly_over_the_first_updates_of_the_actor(name: str, critic_only: int) -> None:
    critic = {"critic_warmup": critic_only} if critic_only else {}
    algorithm = tuner(name, lr=1e-3, lr_final=1e-3, lr_warmup=3, updates=100, **critic)
    optimizer, config = algorithm.actor_optimizer, algorithm.config
    rates = [cosine_rate(optimizer, config, update, algorithm.total_updates) for update in range(critic_only + 6)]
    assert rates == pytest.approx([0.0] * critic_only + [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("name", ["flow_grpo", "flow_sde"])  # without a critic and with one
def test_the_first_step_of_the_actor_is_a_fraction_of_the_learning_rate(name: str) -> None:
    """Adam's first step moves every weight by the whole rate, whatever the gradient."""
    algorithm = tuner(name, lr=1e-3, lr_final=1e-3, epochs=1, batch_size=10_000)
    before = [parameter.detach().clone() for parameter in tools.actor_parameters(algorithm)]
    algorithm.update(tools.sampler_for(algorithm).collect(algorithm.act))
    moved = [
        (new.detach() - old).abs().max() for old, new in zip(before, tools.actor_parameters(algorithm), strict=True)
    ]
    first_rate = 1e-3 / (algorithm.config.lr_warmup + 1)
    assert float(torch.stack(moved).max()) == pytest.approx(first_rate, rel=1e-3) and first_rate < 2e-4


@pytest.mark.parametrize("name", ["flow_grpo", "flow_sde"])  # without a critic and with one
@pytest.mark.parametrize(("kl", "epochs"), [((0.0, 0.009, 0.011), 2), ((0.02,), 0), ((0.0,) * 5, 5)])
def test_epochs_end_before_the_first_step_beyond_the_target_kl(name: str, kl: tuple[float, ...], epochs: int) -> None:
    one_batch: dict[str, Any] = {"batch_size": 10_000, "epochs": 5, "target_kl": 0.01}
    algorithm, measured, steps = tuner(name, **one_batch), iter(kl), []
    original, step = algorithm.loss, algorithm.actor_optimizer.step
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)

    def with_kl(rows: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, info = original(rows)
        return loss, info | {"approx_kl": torch.tensor(next(measured))}

    algorithm.loss = with_kl
    algorithm.actor_optimizer.step = lambda: steps.append(step())
    metrics = algorithm.update(rollout)
    assert metrics["actor/epochs"] == epochs == len(steps)
    assert metrics["actor/approx_kl"] == pytest.approx(kl[-1])  # also the one that ended the epochs
    assert next(measured, None) is None
    assert ("actor/ratio_mean" in metrics) == (epochs > 0)


def test_large_steps_end_the_epochs_early() -> None:
    counted = []
    for target in (2e-4, None):
        algorithm = tuner("flow_sde", num_steps=4, batch_size=16, lr=0.01, lr_warmup=0, target_kl=target)
        metrics = algorithm.update(tools.sampler_for(algorithm).collect(algorithm.act))
        counted.append(metrics["actor/epochs"])
    assert counted[0] < counted[1] == 5


def episodes(policy: Policy, reward: Tensor) -> Rollout:
    """One episode per column of rewards `(T, N)`, which ends at the last row."""
    obs = observations(reward.numel())
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    shape, last = reward.shape, torch.zeros(reward.shape, dtype=torch.bool)
    last[-1] = True
    seen = {key: value.unflatten(0, shape) for key, value in obs.items()}
    record = {key: value.unflatten(0, shape) for key, value in sample.record.items()}
    none, ended = ({key: value[rows] for key, value in obs.items()} for rows in (slice(0, 0), slice(0, shape[1])))
    steps = torch.ones(shape, dtype=torch.int64)
    return Rollout(seen, record, sample.logp.unflatten(0, shape), reward, steps, last, ~last & False, none, ended)


@pytest.mark.parametrize(("unit", "inside", "between"), [("step", 0.5, 0.25), ("chunk", 1.0, 0.5)])
@pytest.mark.parametrize("scaled", [True, False])
def test_advantages_use_scaled_rewards_discounted_in_their_unit(
    unit: str, inside: float, between: float, scaled: bool
) -> None:
    algorithm = tuner("flow_sde", gamma=0.5, gae_lambda=1.0, discount_unit=unit, normalize_reward=scaled)
    assert algorithm.step_discount == inside  # discount of rewards within a chunk
    rollout = episodes(algorithm.policy, torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 8.0]]))
    found, process = [], algorithm.process_rollout
    algorithm.process_rollout = lambda batch: found.append(process(batch)) or found[0]
    algorithm.update(replace(rollout, steps=torch.full((3, 2), 2)))
    returns = torch.tensor([[1 + between * (2 + between * 4), between**2 * 8], [2 + between * 4, between * 8], [4, 8]])
    so_far = torch.tensor([[1, 0], [2 + between, 0], [4 + between * (2 + between), 8]])  # the scale is their deviation
    factor = 1 / so_far.std(correction=0) if scaled else 1.0
    torch.testing.assert_close(found[0].value_target, factor * returns.flatten())  # lam is 1: no critic
    torch.testing.assert_close(found[0].advantage, found[0].value_target - found[0].value)


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_the_critic_learns_the_discounted_returns(lam: float) -> None:
    settings: dict[str, Any] = {"gamma": 0.5, "gae_lambda": lam, "discount_unit": "chunk", "normalize_reward": False}
    rates: dict[str, Any] = {"critic": ValueConfig(hidden=(64, 64)), "critic_lr": 3e-3, "critic_warmup": 100}
    algorithm = tuner("flow_sde", epochs=30, updates=100, **settings, **rates)
    rollout = episodes(algorithm.policy, torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 8.0]]))
    for _ in range(15):
        metrics = algorithm.update(rollout)
    expected = torch.tensor([3.0, 2.0, 4.0, 4.0, 4.0, 8.0])  # 1 + (2 + 4 / 2) / 2, (8 / 2) / 2, ...
    with torch.no_grad():
        torch.testing.assert_close(algorithm.critic(observations(6)), expected, atol=0.1, rtol=0)
    assert metrics["critic/loss"] < 0.01 and metrics["critic/explained_variance"] > 0.99


def test_scaled_rewards_are_clipped_at_ten_deviations_and_unscaled_rewards_are_not() -> None:
    scale = RewardNormalizer()
    assert scale(torch.tensor([300.0])).item() == 300.0
    scale.moments.observe(torch.tensor([0.0, 0.2]))
    expected = torch.tensor([float(0.5 * scale.factor), 10.0, -10.0])
    torch.testing.assert_close(scale(torch.tensor([0.5, 300.0, -300.0])), expected)


def test_the_velocity_distance_has_no_gradient_in_its_reference() -> None:
    velocity, other = torch.tensor([1.0, 4.0], requires_grad=True), torch.tensor([0.0, 1.0], requires_grad=True)
    distance = velocity_distance(velocity, other)
    assert float(distance) == 5.0  # (1 + 9) / 2
    distance.backward()
    assert velocity.grad is not None and velocity.grad.tolist() == [1.0, 3.0] and other.grad is None
