"""Tests of ReinFlow invariants: ratio, log-density clamp, imitation term, noise bounds and critic."""

import math
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, compute_advantages, minibatches, normalize
from robopolicy.algorithms.reinflow import ReinFlow, ReinFlowConfig, bc_loss, chain_logp, reinflow_loss
from robopolicy.critics.value import ValueConfig
from robopolicy.policies.density import normal_log_density
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy


def reinflow(head: dict[str, Any] | None = None, **overrides: Any) -> ReinFlow:
    settings: dict[str, Any] = {"num_steps": 8, "batch_size": 64} | overrides
    return ReinFlow(ReinFlowConfig(**settings), tools.flow_head(**(head or {})), total_updates=20)


SETTINGS: dict[str, dict[str, Any]] = {
    "one-step": {"head": {"steps": 1}},
    "bfloat16": {"chain_dtype": "bfloat16"},
    "seeds": {"recompute_chains": True},
    "decaying-noise": {"noise": NoiseConfig(schedule="learned_decay"), "recompute_chains": True},
    "dropout": {"head": {"backbone": "transformer", "transformer_width": 16, "transformer_dropout": 0.5}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_ratio_of_the_first_minibatch_is_one(name: str) -> None:
    algorithm = reinflow(**SETTINGS[name])
    sampler = tools.sampler_for(algorithm)
    for _ in range(2):
        rollout = sampler.collect(algorithm.act)
        for batch, _ in minibatches(tools.rows_of(algorithm, rollout), 50, torch.Generator().manual_seed(0)):
            _, info = algorithm.loss(batch)
            assert float(info["ratio_max"]) < 1e-5 and float(info["clip_fraction"]) == 0.0
        algorithm.update(rollout)


def test_recomputed_chains_train_like_stored_chains() -> None:
    stored, seeds = reinflow(), reinflow(recompute_chains=True)
    rollout = tools.sampler_for(seeds).collect(seeds.act)
    assert {key: value.dtype for key, value in rollout.record.items()} == {"seed": torch.int64}
    rows = compute_advantages(rollout, seeds.critic, gamma=0.99, gae_lambda=0.95)
    seeds.recorder.snapshot()
    resampled = seeds.recorder.resample(rows)
    stored.policy.load_state_dict(seeds.policy.state_dict())
    assert stored.recorder.resample(resampled) is resampled
    losses = seeds.loss(resampled)[0], stored.loss(resampled)[0]
    one, two = (
        tools.gradient(loss, tools.actor_parameters(algorithm))
        for loss, algorithm in zip(losses, (seeds, stored), strict=True)
    )
    tools.assert_close(one, two)


def perturb(module: nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def whole_chain_logp(policy: StochasticFlow, rows: RolloutBatch) -> Tensor:
    """Log-density `(B,)` of the initial noise and all transitions, summed step by step."""
    chain = rows.record["chain"]  # (B, K + 1, H, A)
    features, total = policy.head.encode(rows.obs), Normal(0.0, 1.0).log_prob(chain[:, 0]).flatten(1).sum(1).double()
    for k in range(chain.shape[1] - 1):
        mean, log_std = policy.transition(features, chain[:, k], torch.full((len(chain),), k))
        total = total + Normal(mean, log_std.exp()).log_prob(chain[:, k + 1]).flatten(1).sum(1)
    return total


def test_ratio_equals_the_density_ratio_of_whole_denoising_chains() -> None:
    algorithm = reinflow(logp_clamp=None, entropy_coef=0.0)
    rows = tools.rows_of(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
    with torch.no_grad():
        before = whole_chain_logp(algorithm.policy, rows)
        perturb(algorithm.policy, 0.02)
        change = whole_chain_logp(algorithm.policy, rows) - before
        loss, info = algorithm.loss(rows)
    assert float(change.abs().max()) > 0.1
    chain = rows.record["chain"]
    ratio = (change / chain[:, 1:].flatten(1).shape[1]).exp()  # per transition and dimension
    advantage = normalize(rows.advantage)
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.99, 1.01) * advantage).mean()
    assert float(info["ratio_max"]) == pytest.approx(float((ratio - 1).abs().max()), abs=1e-5)
    assert float(info["ratio_mean"]) == pytest.approx(float(ratio.mean()), abs=1e-6)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)


def test_normalised_ratio_is_unchanged_by_duplicated_action_dimensions() -> None:
    x, mean = torch.randn(2, 6, 3, 5, dtype=torch.float64)  # (B, K, D) each
    shift = 0.03
    log_std = torch.full_like(x, -2.0)

    def ratio(copies: int) -> torch.Tensor:
        old, new = (
            normal_log_density(x, centre, log_std).repeat(1, 1, copies).sum(2) for centre in (mean, mean + shift)
        )
        return chain_logp(new, 5 * copies, None) - chain_logp(old, 5 * copies, None)

    torch.testing.assert_close(ratio(2), ratio(1))
    expected = ((x - mean - shift / 2) * shift / torch.e**-4).mean((1, 2))
    torch.testing.assert_close(ratio(1).squeeze(1), expected)


def test_logp_clamp_zeroes_the_gradient_of_small_noise_and_reports_clamping() -> None:
    small = NoiseConfig(std_min=0.01, std_max=0.02)  # densities around e^2.5 per dimension
    for clamp, stopped in ((1.0, True), (None, False)):
        algorithm = reinflow(noise=small, logp_clamp=clamp, entropy_coef=0.0)
        rows = tools.rows_of(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
        loss, info = reinflow_loss(algorithm.policy, rows, algorithm.estimator, algorithm.config)
        slopes = tools.gradient(loss, tools.actor_parameters(algorithm))
        assert all(not bool(slope.any()) for slope in slopes) == stopped
        assert ("clamped" in info) == stopped and (not stopped or float(info["clamped"]) == 1.0)


def test_losses_are_finite_under_autocast_and_propagate_nan() -> None:
    algorithm = reinflow(bc_coef=0.1)
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)
    rows = tools.rows_of(algorithm, rollout)
    with torch.autocast("cpu", torch.bfloat16):
        loss, info = algorithm.loss(rows)
    assert bool(loss.isfinite()) and bool(info["bc_loss"].isfinite())
    rows.record["chain"][3, 2] = math.nan
    assert bool(algorithm.loss(rows)[0].isnan())
    rollout.reward[3, 2] = math.nan
    assert math.isnan(algorithm.update(rollout)["critic/loss"])


def test_imitation_loss_is_zero_at_the_base_and_trains_only_the_velocity() -> None:
    algorithm = reinflow(bc_coef=1.0)
    obs = {"state": torch.randn(32, 1, 6)}
    assert float(bc_loss(algorithm.policy.head, algorithm.base, obs).detach()) == 0.0
    perturb(algorithm.policy.head, 0.05)
    bc_loss(algorithm.policy.head, algorithm.base, obs).backward()
    assert any(bool(p.grad.any()) for p in algorithm.policy.head.parameters() if p.grad is not None)
    assert all(p.grad is None for p in algorithm.policy.noise.parameters())
    assert all(p.grad is None for p in algorithm.base.parameters())


def test_imitation_compares_the_chunks_from_zero_noise() -> None:
    algorithm = reinflow(bc_coef=1.0, head={"action_clip": 0.0})
    obs = {"state": torch.randn(32, 1, 6)}
    perturb(algorithm.policy.head, 0.05)
    chunks = []
    for head in (algorithm.policy.head, algorithm.base):
        x = torch.zeros(32, 4, 2)
        for k in range(head.config.steps):
            x = x + head.velocity(head.encode(obs), x, torch.full((32,), k / head.config.steps)) / head.config.steps
        chunks.append(x)
    torch.testing.assert_close(
        bc_loss(algorithm.policy.head, algorithm.base, obs), (chunks[0] - chunks[1]).square().mean()
    )


def test_noise_upper_bound_follows_its_decay_schedule() -> None:
    noise = NoiseConfig(schedule="learned_decay", std_min=0.1, std_max=0.2)
    algorithm = ReinFlow(ReinFlowConfig(num_steps=4, epochs=1, noise=noise), tools.flow_head(), total_updates=4)
    sampler = tools.sampler_for(algorithm)
    bounds = []
    for _ in range(4):
        algorithm.update(sampler.collect(algorithm.act))
        bounds.append(float(algorithm.policy.noise.log_std_max.exp()))
    # Constant for 35 % of the updates, then a cosine decay to 0.3 * 0.1 + 0.7 * 0.2.
    shares = [0.5 * (1 + math.cos(math.pi * max(done - 0.35, 0.0) / 0.65)) for done in (0.25, 0.5, 0.75, 1.0)]
    assert bounds == pytest.approx([0.17 + 0.03 * share for share in shares], rel=1e-5)
    assert bounds[0] == pytest.approx(0.2) and bounds[3] == pytest.approx(0.17)


@pytest.mark.parametrize("residual", [False, True])
def test_initial_critic_output_is_near_its_bias(residual: bool) -> None:
    sizes = {"hidden": (64, 64, 64), "residual": residual}
    algorithm, plain = (reinflow(critic=ValueConfig(**sizes, bias=bias)) for bias in (4.0, 0.0))
    obs = {"state": torch.randn(500, 1, 6)}
    assert float(algorithm.critic(obs).detach().mean()) == pytest.approx(4.0, abs=1.0)
    assert float(plain.critic(obs).detach().mean()) == pytest.approx(0.0, abs=1.0)


class Drift(FlowPolicy):
    """Both Euler steps add half of `drift`."""

    def __init__(self) -> None:
        super().__init__(FlowConfig(**tools.RAW, hidden=(4,), steps=2), tools.LINE)
        self.drift = nn.Parameter(torch.tensor(0.3))

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return self.drift.expand_as(x)


def test_bandit_gradient_equals_the_closed_form() -> None:
    """For drift d from N(0, 1), two noises of variance 1/4 and reward -(x - 2)^2, dE/dd = -2 (d - 2)."""
    rows, drift = 200_000, 0.3
    noise = NoiseConfig(schedule="constant", std_min=0.5, std_max=0.5, noise_clip=0.0)
    config = ReinFlowConfig(noise=noise, logp_clamp=None, entropy_coef=0.0)
    algorithm = ReinFlow(config, Drift(), total_updates=1)
    obs = {"state": torch.zeros(rows, 1, 1)}
    sample = algorithm.act(obs, generator=torch.Generator().manual_seed(0))
    reward = -(sample.chunk[:, 0, 0] - 2).square()
    batch = RolloutBatch(obs, sample.record, sample.logp, reward, reward, reward)
    loss, _ = reinflow_loss(algorithm.policy, batch, algorithm.estimator, config)
    head = algorithm.policy.head
    assert isinstance(head, Drift)
    (slope,) = torch.autograd.grad(loss, [head.drift])
    # the loss averages over both steps and standardises the reward
    estimate = -2 * float(slope) * float(reward.std())
    chain = sample.record["chain"].flatten(2).squeeze(2)
    score = ((chain[:, 1:] - chain[:, :-1] - drift / 2) / 0.25 / 2).sum(1)
    error = float(((reward - reward.mean()) * score).std()) / math.sqrt(rows)
    assert error < 0.05 and abs(estimate - -2 * (drift - 2)) < 3 * error
