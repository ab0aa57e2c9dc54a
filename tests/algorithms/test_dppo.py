"""Tests of DPPO: ratios, credit and clip ranges along the chain, the frozen base, resume, a closed-form gradient."""

import copy
import math
from pathlib import Path
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, minibatches, normalize
from robopolicy.algorithms.dppo import DPPO, DPPOConfig, bc_loss, dppo_loss, step_advantage
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.policies.exploration import diffusion_chain
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.staged import StagedDiffusion
from robopolicy.training.checkpoint import load_policy, save_checkpoint

TINY = {"transformer_width": 16, "transformer_layers": 1, "transformer_heads": 2}
QUICK: dict[str, Any] = {"num_steps": 8, "batch_size": 64, "epochs": 2}


def dppo(seed: int = 0, head: dict[str, Any] | None = None, **overrides: Any) -> DPPO:
    policy = tools.diffusion_head(seed, **(head or {}))
    return DPPO(DPPOConfig(**(QUICK | overrides)), policy, total_updates=20)


SETTINGS: dict[str, dict[str, Any]] = {
    "all-steps": {},
    "two-steps": {"trained_steps": 2},
    "one-step": {"trained_steps": 1},
    "learned-eta": {"eta_min": 0.1, "entropy_coef": 0.01},
    "bfloat16": {"chain_dtype": "bfloat16"},
    "seeds": {"recompute_chains": True, "trained_steps": 3},
    "ddpm": {"head": {"sampler": "ddpm"}},
    "running-statistics": {"head": {"normalization": "running"}, "trained_steps": 3},
    "dropout": {"head": {"backbone": "transformer", "transformer_dropout": 0.5, **TINY}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_ratio_of_the_first_minibatch_is_one(name: str) -> None:
    algorithm = dppo(**SETTINGS[name])
    sampler = tools.sampler_for(algorithm)
    for _ in range(2):  # the second time with changed weights and statistics
        rollout = sampler.collect(algorithm.act)
        rows = tools.rows_of(algorithm, rollout)
        for batch, _ in minibatches(rows, 50, torch.Generator().manual_seed(0)):
            _, info = algorithm.loss(batch)
            assert float(info["ratio_max"]) < 1e-5
            assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9) and float(info["clip_fraction"]) == 0.0
        metrics = algorithm.update(rollout)
        assert all(math.isfinite(value) for value in metrics.values())


def test_the_first_gradient_is_the_policy_gradient_of_every_step() -> None:
    algorithm = dppo(gamma_denoise=0.5, trained_steps=3)
    rows = tools.rows_of(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
    loss, _ = dppo_loss(algorithm.policy, rows, algorithm.estimator, algorithm.config)
    logp = algorithm.policy.decisions(rows.obs, rows.record).logp
    weights = torch.tensor([0.25, 0.5, 1.0])
    plain = -(normalize(rows.advantage)[:, None] * weights * logp).mean()
    parameters = tools.actor_parameters(algorithm)
    tools.assert_close(tools.gradient(loss, parameters), tools.gradient(plain, parameters))


def test_a_zero_denoising_discount_trains_only_the_last_step() -> None:
    algorithm = dppo(gamma_denoise=0.0)
    rows = tools.rows_of(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
    advantage = step_advantage(rows.advantage, Decisions(logp_old=rows.logp), algorithm.config)
    assert not bool(advantage[:, :-1].any())
    torch.testing.assert_close(advantage[:, -1], normalize(rows.advantage))  # 0 ** 0 = 1
    loss, _ = dppo_loss(algorithm.policy, rows, algorithm.estimator, algorithm.config)
    last = algorithm.policy.decisions(rows.obs, rows.record).logp[:, -1]
    plain = -(normalize(rows.advantage) * last).mean() / 4
    parameters = tools.actor_parameters(algorithm)
    tools.assert_close(tools.gradient(loss, parameters), tools.gradient(plain, parameters))


def test_extreme_advantages_are_clipped_at_their_quantiles() -> None:
    advantage = torch.cat([torch.randn(998), torch.tensor([100.0, -100.0])])
    decisions = Decisions(logp_old=torch.zeros(1000, 1))
    plain = step_advantage(advantage, decisions, DPPOConfig())
    cut = step_advantage(advantage, decisions, DPPOConfig(advantage_quantile=0.05)).squeeze(1)
    low, high = plain.quantile(0.05), plain.quantile(0.95)
    torch.testing.assert_close(cut, plain.squeeze(1).clamp(low, high))
    assert float(plain.max()) > 10 > float(cut.max())


def test_the_clip_range_grows_along_the_chain_and_is_finite_for_one_step() -> None:
    algorithm = dppo(clip=0.05, clip_base=0.002)
    low, high = algorithm.estimator.config.bounds(Decisions(logp_old=torch.zeros(3, 4)))
    grown = [0.002 + 0.048 * math.expm1(3 * i / 3) / math.expm1(3) for i in range(4)]
    torch.testing.assert_close(high, torch.tensor([grown] * 3) + 1)
    torch.testing.assert_close(low, 1 - torch.tensor([grown] * 3))
    one = dppo(clip=0.05, trained_steps=1)
    assert one.estimator.config.bounds(Decisions(logp_old=torch.zeros(3, 1))) == (0.95, 1.05)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_base_stays_bit_identical_and_the_head_learns(steps: int) -> None:
    algorithm = dppo(trained_steps=steps, bc_coef=0.1, head={"normalization": "running"})
    base, before = tools.snapshot(algorithm.base), tools.snapshot(algorithm.policy)
    sampler = tools.sampler_for(algorithm)
    for _ in range(2):
        algorithm.update(sampler.collect(algorithm.act))
    assert not tools.changed(base, algorithm.base)
    moved = tools.changed(before, algorithm.policy)
    assert moved and all(key.startswith("head.") for key in moved)


def test_imitation_of_the_base_reduces_the_distance_to_it() -> None:
    algorithm = dppo(bc_coef=1.0)
    obs = {"state": torch.randn(128, 1, 6)}
    with torch.no_grad():
        for parameter in algorithm.policy.head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    noise = torch.randn(128, 4, 2)

    def gap() -> float:
        with torch.no_grad():
            return float(nn.functional.mse_loss(algorithm.policy.decode(obs, noise), algorithm.base.decode(obs, noise)))

    optimizer, start = torch.optim.Adam(algorithm.policy.head.parameters(), lr=3e-3), gap()
    for _ in range(60):
        loss = bc_loss(algorithm.policy, algorithm.teacher, obs, algorithm.generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert gap() < 0.7 * start


@pytest.mark.parametrize("steps", [0, 2])
def test_the_deployed_policy_runs_base_then_head_and_survives_a_checkpoint(steps: int, tmp_path: Path) -> None:
    algorithm = dppo(trained_steps=steps)
    sampler = tools.sampler_for(algorithm)
    algorithm.update(sampler.collect(algorithm.act))
    deployed, obs = algorithm.inference_policy(), {"state": torch.randn(8, 1, 6)}
    noise = torch.randn(8, 4, 2)
    x = noise
    for k in range(4):
        head = algorithm.policy.head if k >= algorithm.policy.first_trained_step else algorithm.base.heads[0]
        x = head.sampler_step(head.encode(obs), x, torch.full((8,), k))
    torch.testing.assert_close(deployed.decode(obs, noise), head.action_normalizer.denormalize(head.clip(x)))
    assert isinstance(deployed, StagedDiffusion) == (steps == 2)
    save_checkpoint(tmp_path / "c", deployed, task="toy/point_mass", obs_sample=obs)
    loaded, _ = load_policy(tmp_path / "c")
    torch.testing.assert_close(loaded.decode(obs, noise), deployed.decode(obs, noise), atol=0, rtol=0)


def test_saving_leaves_the_ratio_of_fresh_data_at_one(tmp_path: Path) -> None:
    algorithm = dppo(trained_steps=2, head={"hidden_dropout": 0.5})
    obs = {"state": torch.randn(8, 1, 6)}
    save_checkpoint(tmp_path / "c", algorithm.inference_policy(), task="toy/point_mass", obs_sample=obs)
    assert not any(module.training for module in algorithm.policy.head.modules())
    rows = tools.rows_of(algorithm, tools.sampler_for(algorithm).collect(algorithm.act))
    _, info = algorithm.loss(rows)
    assert float(info["ratio_max"]) < 1e-5


def test_a_fine_tuned_policy_can_be_fine_tuned_again() -> None:
    first = dppo(trained_steps=3)
    sampler = tools.sampler_for(first)
    first.update(sampler.collect(first.act))
    staged = first.inference_policy()
    assert isinstance(staged, StagedDiffusion)
    again = DPPO(DPPOConfig(**(QUICK | {"trained_steps": 1})), copy.deepcopy(staged), total_updates=5)
    noise, obs = torch.randn(8, 4, 2), {"state": torch.randn(8, 1, 6)}
    torch.testing.assert_close(again.inference_policy().decode(obs, noise), staged.decode(obs, noise))
    again.update(tools.sampler_for(again).collect(again.act))
    deployed = again.inference_policy()
    assert isinstance(deployed, StagedDiffusion) and deployed.config.starts == (0, 1, 3)
    assert tools.distance(deployed.heads[0], staged.heads[0]) == tools.distance(deployed.heads[1], staged.heads[1]) == 0
    assert tools.distance(deployed.heads[2], staged.heads[1]) > 0
    default = DPPO(DPPOConfig(), copy.deepcopy(staged), total_updates=5)
    assert default.policy.first_trained_step == 1 and default.base.config.starts == (0, 1)
    with pytest.raises(UserError, match="trained_steps must be at most the newest network's 3 steps; got 4"):
        DPPO(DPPOConfig(trained_steps=4), staged, total_updates=5)


@pytest.mark.parametrize("settings", [{}, {"trained_steps": 2, "bc_coef": 0.1}, {"recompute_chains": True}])
def test_a_resumed_run_ends_with_the_same_weights(settings: dict[str, Any]) -> None:
    straight = dppo(**settings)
    sampler = tools.sampler_for(straight)
    straight.update(sampler.collect(straight.act))
    state, sim_state = copy.deepcopy(straight.state_dict()), copy.deepcopy(sampler.state_dict())
    deployed = copy.deepcopy(straight.inference_policy())
    straight.update(sampler.collect(straight.act))

    config = straight.config  # a resumed run is built from the deployed policy
    for resumed in (dppo(seed=1, **settings), DPPO(config, deployed, total_updates=20)):
        resumed.load_state_dict(copy.deepcopy(state))
        other = tools.sampler_for(resumed)
        other.load_state_dict(copy.deepcopy(sim_state))
        resumed.update(other.collect(resumed.act))
        assert not tools.changed(tools.snapshot(straight.policy), resumed.policy)
        assert not tools.changed(tools.snapshot(straight.inference_policy()), resumed.inference_policy())
        assert not tools.changed(tools.snapshot(straight.critic), resumed.critic)


def test_policies_without_gaussian_steps_are_refused() -> None:
    with pytest.raises(UserError, match=r"scores Gaussian denoising steps.*got 'flow'; use reinflow"):
        DPPO(DPPOConfig(), tools.flow_head(), total_updates=1)
    with pytest.raises(UserError, match="got 'gaussian'"):
        DPPO(DPPOConfig(), GaussianPolicy(GaussianConfig(), tools.SPEC), total_updates=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trained_steps": 5}, r"trained_steps must be in 0..4"),
        ({"chain_dtype": "half"}, "Unknown chain_dtype"),
        ({"eta": 0.5, "eta_min": 0.5, "head": {"sampler": "ddpm"}}, "is 1 for the sampler ddpm"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dppo(**settings)


class Drift(DiffusionPolicy):
    """Every step adds `drift` and has the standard deviation 1/2."""

    def __init__(self) -> None:
        super().__init__(DiffusionConfig(**tools.RAW, hidden=(4,), steps=2, spacing="trailing"), tools.LINE)
        self.drift = nn.Parameter(torch.tensor(0.3))

    def posterior(self, features: Tensor, x: Tensor, k: Tensor, eta: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        return x + self.drift, torch.full_like(x, 0.5)


def test_the_gradient_of_a_bandit_is_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of drift d from N(0, 1) and reward -(x - 2)^2: dE/dd = -4 (2 d - 2)."""
    monkeypatch.setattr(diffusion_chain, "LOGP_BOUNDS", (-1e6, 1e6))  # the clamp costs 2 % of this gradient
    torch.manual_seed(0)
    rows, drift = 200_000, 0.3
    config = DPPOConfig(gamma_denoise=1.0, noise_clip=0.0)
    algorithm = DPPO(config, Drift(), total_updates=1)
    obs = {"state": torch.zeros(rows, 1, 1)}
    sample = algorithm.act(obs, generator=torch.Generator().manual_seed(0))
    reward = -(sample.chunk[:, 0, 0] - 2).square()
    batch = RolloutBatch(obs, sample.record, sample.logp, reward, reward, reward)
    loss, info = dppo_loss(algorithm.policy, batch, algorithm.estimator, config)
    head = algorithm.policy.head
    assert isinstance(head, Drift) and float(info["clamped"]) < 0.01
    (slope,) = torch.autograd.grad(loss, [head.drift])
    # the loss averages over both steps and standardises the reward
    estimate = -2 * float(slope) * float(reward.std())
    chain = sample.record["chain"].flatten(2).squeeze(2)
    score = ((chain[:, 1:] - chain[:, :-1] - drift) / 0.25).sum(1)
    error = float(((reward - reward.mean()) * score).std()) / math.sqrt(rows)
    assert error < 0.05 and abs(estimate - -4 * (2 * drift - 2)) < 3 * error
