"""Tests of Flow-GRPO and Flow-SDE: group advantages, ratios, the KL to the base, resume, closed-form gradients."""

import math
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, minibatches, normalize
from robopolicy.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig, group_advantage, nonzero_advantage_rows, sde_loss
from robopolicy.algorithms.flow_sde import FlowSDE, FlowSDEConfig
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.errors import UserError
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.composed import compose
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace


def grpo(seed: int = 0, **overrides: Any) -> FlowGRPO:
    settings = {"group_size": 4, "batch_size": 64} | overrides
    return FlowGRPO(FlowGRPOConfig(**settings), tools.flow_head(seed), total_updates=20)


def sde(seed: int = 0, **overrides: Any) -> FlowSDE:
    settings = {"num_steps": 8, "batch_size": 64, "kl_coef": 0.01} | overrides
    return FlowSDE(FlowSDEConfig(**settings), tools.flow_head(seed), total_updates=20)


MAKERS = {"flow_grpo": grpo, "flow_sde": sde}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def fresh_rows(algorithm: Any, rollout: Any) -> RolloutBatch:
    if algorithm.data_source == "rollout":
        return tools.rows_of(algorithm, rollout)
    return tools.completed(
        algorithm, nonzero_advantage_rows(rollout, group_advantage(rollout.returns, rollout.group, 5.0))
    )


def test_returns_are_standardised_within_their_group() -> None:
    returns = torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0, 5.0, 0.0, 8.0])
    group = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    advantage = group_advantage(returns, group, 5.0)
    torch.testing.assert_close(advantage, torch.tensor([1.0, -1, 1, -1, 0, 0, -1, 1]), atol=1e-3, rtol=0)
    rare = torch.tensor([1.0] + [0.0] * 63)
    assert float(group_advantage(rare, torch.zeros(64, dtype=torch.int64), 5.0)[0]) == 5.0
    assert group_advantage(torch.tensor([3.0]), torch.tensor([7]), 5.0).tolist() == [0.0]


def test_each_decision_has_the_advantage_of_its_episode() -> None:
    algorithm = grpo()
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)
    advantage = torch.arange(16.0) + 1
    rows = nonzero_advantage_rows(rollout, advantage)
    assert len(rows) == int(rollout.valid.sum()) and rows.logp.shape == (len(rows), 4)
    states = {tuple(row): n + 1 for n in range(16) for row in rollout.obs["state"][rollout.valid[:, n], n, 0].tolist()}
    later = [i for i, row in enumerate(rows.obs["state"][:, 0].tolist()) if tuple(row) in states and i >= 16]
    assert later and all(rows.advantage[i] == states[tuple(rows.obs["state"][i, 0].tolist())] for i in later)


@both
@pytest.mark.parametrize("settings", [{}, {"chain_dtype": "bfloat16"}, {"recompute_chains": True}])
def test_every_ratio_of_the_first_minibatch_is_one(make: Any, settings: dict[str, Any]) -> None:
    algorithm = make(**settings)
    sampler = tools.sampler_for(algorithm)
    for number in range(2):
        rollout = sampler.collect(algorithm.act)
        rows = fresh_rows(algorithm, rollout)
        for batch, _ in minibatches(rows, 50, torch.Generator().manual_seed(0)):
            _, info = algorithm.loss(batch)
            assert float(info["ratio_max"]) < 1e-5 and float(info["clip_fraction"]) == 0.0
            assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9)
            assert (float(info["kl_base"].detach()) > 1e-8) == (number == 1)
        algorithm.update(rollout)


@both
def test_the_first_gradient_is_the_policy_gradient(make: Any) -> None:
    algorithm = make(kl_coef=0.0)
    rows = fresh_rows(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
    loss, info = algorithm.loss(rows)
    assert "kl_base" not in info
    advantage = rows.advantage if isinstance(algorithm, FlowGRPO) else normalize(rows.advantage)
    plain = -(advantage[:, None] * algorithm.policy.decisions(rows.obs, rows.record).logp).mean()
    tools.assert_close(
        tools.gradient(loss, tools.actor_parameters(algorithm)),
        tools.gradient(plain, tools.actor_parameters(algorithm)),
    )


def test_the_penalty_is_the_gaussian_kl_of_the_means() -> None:
    algorithm = grpo(kl_coef=0.7)
    rows = fresh_rows(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
    with torch.no_grad():
        for parameter in algorithm.policy.head.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    zeros = torch.zeros(len(rows))
    loss, info = sde_loss(algorithm.policy, algorithm.reference_policy, rows, zeros, algorithm.estimator, 0.7)
    mean, log_std = algorithm.policy.transitions(rows.obs, rows.record)
    base, _ = algorithm.reference_policy.transitions(rows.obs, rows.record)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, log_std.exp()), torch.distributions.Normal(base, log_std.exp())
    ).mean()
    torch.testing.assert_close(info["kl_base"], expected)
    torch.testing.assert_close(loss, 0.7 * expected)  # without advantages only the penalty remains


@both
def test_the_base_stays_bit_identical_and_the_head_learns(make: Any) -> None:
    algorithm = make()
    base, before = tools.snapshot(algorithm.base), tools.snapshot(algorithm.policy)
    sampler = tools.sampler_for(algorithm)
    for _ in range(2):
        metrics = algorithm.update(sampler.collect(algorithm.act))
        assert all(math.isfinite(value) for value in metrics.values())
    assert not tools.changed(base, algorithm.base) and algorithm.reference_policy.head is algorithm.base
    assert tools.changed(before, algorithm.policy)
    assert type(algorithm.inference_policy()) is FlowPolicy


@pytest.mark.parametrize("reward", [0.0, 0.7, 1000.1])
def test_groups_with_equal_returns_do_not_change_the_policy(reward: float) -> None:
    algorithm = grpo(kl_coef=1.0)
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)
    algorithm.update(rollout)  # afterwards the penalty is nonzero and Adam has momentum
    rollout.reward.zero_()
    rollout.reward[0] = reward
    before = tools.snapshot(algorithm.policy)
    assert algorithm.update(rollout)["actor/nonzero_advantage_fraction"] == 0.0
    assert not tools.changed(before, algorithm.policy)


def test_only_groups_with_different_returns_contribute_rows() -> None:
    algorithm = grpo()
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)
    one = rollout.group == rollout.group[0]
    rollout.reward[:, ~one] = 0.0
    advantage = group_advantage(rollout.returns, rollout.group, 5.0)
    rows = nonzero_advantage_rows(rollout, advantage)
    assert len(rows) == int(rollout.valid[:, one & (advantage != 0)].sum()) > 0
    assert bool((rows.advantage != 0).all())


@both
def test_a_resumed_run_that_recomputes_chains_ends_with_the_same_weights(make: Any) -> None:
    straight, resumed = tools.resumed(lambda seed=0: make(seed, recompute_chains=True))
    assert not tools.changed(tools.snapshot(straight.policy), resumed.policy)
    assert not tools.changed(tools.snapshot(straight.base), resumed.base)


def test_unsupported_heads_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="Flow-GRPO fine-tunes policies of the kind flow, got 'diffusion'; use dppo"):
        FlowGRPO(FlowGRPOConfig(), tools.diffusion_head(), total_updates=1)
    with pytest.raises(UserError, match="Flow-SDE fine-tunes policies of the kind flow, got 'diffusion'; use dppo"):
        FlowSDE(FlowSDEConfig(), tools.diffusion_head(), total_updates=1)


class Constant(FlowPolicy):
    """A flow with the same velocity everywhere."""

    def __init__(self, steps: int) -> None:
        super().__init__(FlowConfig(**tools.RAW, hidden=(4,), steps=steps), tools.LINE)
        self.speed = nn.Parameter(torch.tensor(0.4))

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return self.speed.expand_as(x)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_of_a_bandit_is_the_closed_form(steps: int) -> None:
    """The gradient is exact for reward x and steps that are linear in x and the speed u: x' = a x + b u + noise."""
    torch.manual_seed(0)
    rows = 100_000
    algorithm = FlowGRPO(FlowGRPOConfig(kl_coef=0.0, noise_level=0.6), Constant(steps), total_updates=1)
    obs = {"state": torch.zeros(rows, 1, 1)}
    sample = algorithm.act(obs, generator=torch.Generator().manual_seed(0))
    reward = sample.chunk[:, 0, 0]
    batch = RolloutBatch(obs, sample.record, sample.logp, reward - reward.mean(), reward, reward)
    loss, _ = algorithm.loss(batch)
    head = algorithm.policy.head
    assert isinstance(head, Constant)
    (slope,) = torch.autograd.grad(loss, [head.speed])
    expected, scores = 0.0, torch.zeros(rows)
    chain = sample.record["chain"].flatten(2).squeeze(2)
    for k in range(steps):
        t, dt, g = k / steps, 1 / steps, float(algorithm.policy.diffusion[k])
        a, b = 1 - g**2 / (2 * (1 - t)) * dt, (1 + g**2 * t / (2 * (1 - t))) * dt
        expected = expected * a + b
        scores += b * (chain[:, k + 1] - a * chain[:, k] - b * 0.4) / (g**2 * dt)
    error = float(((reward - reward.mean()) * scores).std()) / math.sqrt(rows)
    assert error < 0.05 and abs(-steps * float(slope) - expected) < 3 * error


def test_wrapped_policies_are_refused_with_an_alternative() -> None:
    head = tools.flow_head()
    space = NoiseSpace(kind="repeat")
    for policy, alternative in (
        (compose([head, tools.flow_head(1)]), "'composed'; fine-tune one of its parents, or steer it by dsrl_na"),
        (LatentPolicy.from_base(head, space, STEERING_ACTOR), "'latent'; fine-tune its base policy"),
        (
            make_best_of_n(head, QEnsemble(CriticConfig(hidden=(8,)), head), candidates=2),
            "'selected'; fine-tune its inner policy",
        ),
    ):
        with pytest.raises(UserError, match=alternative):
            FlowSDE(FlowSDEConfig(), policy, total_updates=1)
