"""Tests of the diffusion head: textbook formulas, time conversions, exact Gaussians, learning and both samplers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from closed_forms import BOUNDED, GAUSSIAN, POINT, RAW, TWO_MODES, check_two_modes, exact_diffusion, learn, nothing
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.path import alpha_bars, linear_betas, spaced_levels, squared_cosine_betas
from robopolicy.policies.registry import make_policy

CHUNK = PolicySpec({"state": (2,)}, action_dim=2, horizon=6, action_horizon=2, obs_horizon=2)


def diffusion(spec: PolicySpec = CHUNK, **settings: Any) -> DiffusionPolicy:
    torch.manual_seed(0)
    return DiffusionPolicy(DiffusionConfig(**({"hidden": (32,), **RAW} | settings)), spec)


def observations(rows: int, spec: PolicySpec = CHUNK) -> dict[str, Tensor]:
    return {"state": torch.rand(rows, spec.obs_horizon, *spec.observation["state"])}


def test_betas_match_the_papers() -> None:
    cosine = [math.cos((i / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(101)]
    every = alpha_bars("squared_cosine", 100, 1e-4, 0.02)
    torch.testing.assert_close(every[:-1], torch.tensor(cosine[1:-1], dtype=torch.float64) / cosine[0])
    assert float(squared_cosine_betas(100)[-1]) == 0.999
    assert linear_betas(3, 1e-4, 0.02).tolist() == pytest.approx([1e-4, 0.01005, 0.02])
    assert float(alpha_bars("linear", 1000, 1e-4, 0.02)[-1]) == pytest.approx(4e-5, rel=0.02)


def test_spacing_sets_the_first_and_last_level() -> None:
    assert spaced_levels("leading", 100, 10) == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0]
    assert spaced_levels("trailing", 100, 10) == [99, 89, 79, 69, 59, 49, 39, 29, 19, 9]
    assert spaced_levels("linspace", 100, 10) == [99, 88, 77, 66, 55, 44, 33, 22, 11, 0]
    for spacing in ("leading", "trailing", "linspace"):
        assert spaced_levels(spacing, 50, 50) == list(reversed(range(50)))
        for steps in range(1, 51):
            levels = spaced_levels(spacing, 50, steps)
            assert len(set(levels)) == steps and sorted(levels, reverse=True) == levels and min(levels) >= 0


@pytest.mark.parametrize("prediction", ["noise", "data", "v"])
@pytest.mark.parametrize("schedule", ["squared_cosine", "linear"])
def test_loss_at_a_level_matches_the_textbook_formula(prediction: str, schedule: str) -> None:
    train_steps = 100 if schedule == "squared_cosine" else 1000
    policy = diffusion(prediction=prediction, schedule=schedule, train_steps=train_steps, steps=20)
    features, data, noise = torch.randn(20, 2, 2), torch.rand(20, 6, 2) * 2 - 1, torch.randn(20, 6, 2)
    level = torch.linspace(0, train_steps - 1, 20).long()
    every = policy.config.alpha_bars()[level].view(-1, 1, 1)
    a, b = every.sqrt(), (1 - every).sqrt()
    x = (a * data + b * noise).float()
    target = {"noise": noise, "data": data, "v": a * noise - b * data}[prediction]
    predicted = policy.backbone(x, 1 - (level + 1) / train_steps, features)
    expected = (predicted - target).square().mean(-1).float()
    found = policy.matching_loss(features, data, noise, policy.level_times[level])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_training_times_are_uniform_over_the_levels() -> None:
    policy = diffusion(train_steps=20)
    t = policy.sample_times(20_000, torch.Generator().manual_seed(0))
    level = (t[:, None] - policy.level_times).abs().argmin(1)
    assert bool((policy.level_times[level] == t).all())
    counts = torch.bincount(level, minlength=20)
    assert len(counts) == 20 and int(counts.min()) > 880 and int(counts.max()) < 1120


@pytest.mark.parametrize("prediction", ["noise", "data", "v"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_velocity_at_a_level_matches_the_sampler_step(prediction: str, clip: float) -> None:
    policy = diffusion(prediction=prediction, action_clip=clip)
    features, x = torch.randn(10, 2, 2), torch.randn(10, 6, 2)
    k = torch.arange(10)
    a, b = policy.signal_scale[:-1].view(-1, 1, 1), policy.noise_scale[:-1].view(-1, 1, 1)
    velocity = policy.velocity(features, x / (a + b), (a / (a + b)).flatten())
    # The data estimate, computed by hand from the output of the network.
    level = torch.tensor(policy.config.levels())
    y = policy.backbone(x, 1 - (level + 1) / 100, features)
    data = {"noise": (x - b * y) / a, "data": y, "v": a * x - b * y}[prediction]
    data = data.clamp(-clip, clip) if clip else data
    noise = (x - a * data) / b
    torch.testing.assert_close(velocity, data - noise, atol=1e-4, rtol=1e-4)
    a_next, b_next = policy.signal_scale[1:].view(-1, 1, 1), policy.noise_scale[1:].view(-1, 1, 1)
    torch.testing.assert_close(
        policy.sampler_step(features, x, k), a_next * data + b_next * noise, atol=1e-4, rtol=1e-4
    )


def test_times_outside_the_levels_use_the_nearest_level() -> None:
    policy = diffusion(action_clip=1.0)
    features, x = torch.randn(4, 2, 2), torch.randn(4, 6, 2)
    ends = policy.level_times[[-1, 0]]
    assert 0 < float(ends[0]) < 1e-3 and 0.97 < float(ends[1]) < 1
    for t, end in zip((0.0, 1.0), ends, strict=True):
        found = policy.velocity(features, x, torch.full((4,), t))
        assert bool(found.isfinite().all())
        assert torch.equal(found, policy.velocity(features, x, end.expand(4)))
        loss = policy.matching_loss(features, x, x, torch.full((4,), t))
        assert torch.equal(loss, policy.matching_loss(features, x, x, end.expand(4)))


@pytest.mark.parametrize("train_steps", [100, 1000])
def test_coefficients_at_a_level_match_the_sampler(train_steps: int) -> None:
    policy = diffusion(train_steps=train_steps, steps=train_steps)
    a, b, time = policy._on_path(policy.level_times.flip(0))
    torch.testing.assert_close(a.flatten(), policy.signal_scale[:-1], atol=1e-7, rtol=2e-5)
    torch.testing.assert_close(b.flatten(), policy.noise_scale[:-1], atol=1e-7, rtol=2e-5)
    torch.testing.assert_close(time, policy.grid, atol=1e-6, rtol=0)


def test_network_time_is_monotonic_and_continuous() -> None:
    policy = diffusion()
    t = torch.linspace(0, 1, 20_001)
    _, _, time = policy._on_path(t)
    steps = time.diff()
    assert bool((steps >= -1e-6).all()) and float(steps.max()) < 2e-3
    assert float(time[0]) == pytest.approx(0.0, abs=1e-6) and float(time[-1]) == pytest.approx(0.99, abs=1e-6)


def test_ddim_on_the_exact_score_converges_to_the_gaussian_map() -> None:
    noise = torch.linspace(-2, 2, 9).view(-1, 1, 1)
    errors = []
    for steps in (10, 100, 1000):
        policy = exact_diffusion(GAUSSIAN, train_steps=1000, steps=steps, spacing="trailing")
        errors.append(float((policy.decode(nothing(9), noise) - (0.4 + 0.3 * noise)).abs().max()))
    assert errors[1] < 0.2 * errors[0] and errors[2] < 3e-3


def test_ddpm_on_the_exact_score_matches_the_moments_of_the_data() -> None:
    policy = exact_diffusion(GAUSSIAN, train_steps=200, steps=200, sampler="ddpm")
    samples = policy.act(nothing(20_000), generator=torch.Generator().manual_seed(0))
    assert float(samples.mean()) == pytest.approx(0.4, abs=0.01)
    assert float(samples.std()) == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("steps", [100, 10])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_ddim_with_eta_one_has_the_mean_and_variance_of_ddpm(steps: int, clip: float) -> None:
    policy = diffusion(steps=steps, action_clip=clip)
    features, x = torch.randn(steps, 2, 2), torch.randn(steps, 6, 2)
    k = torch.arange(steps)
    mean, std = policy.posterior(features, x, k, 1.0)
    every = torch.cat([policy.config.alpha_bars()[policy.config.levels()], torch.ones(1, dtype=torch.float64)])
    bar, before = every[:-1].view(-1, 1, 1), every[1:].view(-1, 1, 1)
    alpha, beta = bar / before, 1 - bar / before
    noise = policy.backbone(x, policy.grid, features).double()
    data = (x - (1 - bar).sqrt() * noise) / bar.sqrt()
    data = data.clamp(-clip, clip) if clip else data
    expected = before.sqrt() * beta / (1 - bar) * data + alpha.sqrt() * (1 - before) / (1 - bar) * x
    torch.testing.assert_close(mean.double(), expected, atol=2e-4, rtol=2e-4)
    variance = (beta * (1 - before) / (1 - bar)).expand_as(std)
    torch.testing.assert_close(std.double().square(), variance, atol=1e-6, rtol=1e-4)
    assert float(std[-1].max()) == 0.0


def test_eta_scales_the_noise_and_receives_gradients() -> None:
    policy = diffusion(action_clip=1.0)
    features, x, k = torch.randn(10, 2, 2), torch.randn(10, 6, 2), torch.arange(10)
    mean, std = policy.posterior(features, x, k, 0.0)
    assert not bool(std.any()) and torch.equal(mean, policy.sampler_step(features, x, k))
    full = policy.posterior(features, x, k)[1]
    eta = torch.full((10, 1, 1), 0.5, requires_grad=True)
    mean, std = policy.posterior(features, x, k, eta)
    torch.testing.assert_close(std, 0.5 * full)
    (mean.sum() + std.sum()).backward()
    assert eta.grad is not None and bool(eta.grad.isfinite().all()) and bool(eta.grad[:-1].any())
    one = torch.ones(1, 1, 1, requires_grad=True)
    sum(part.sum() for part in policy.posterior(features, x, k, one)).backward()  # type: ignore[union-attr]
    assert one.grad is not None and bool(one.grad.isfinite().all())


def test_ddim_is_deterministic_and_ddpm_shares_its_decode() -> None:
    ddim, ddpm = diffusion(), diffusion(sampler="ddpm")
    obs, noise = observations(4), torch.randn(4, 6, 2)
    assert torch.equal(ddim.decode(obs, noise), ddim.decode(obs, noise))
    assert torch.equal(ddim.decode(obs, noise), ddpm.decode(obs, noise))
    own_noise = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(7))
    chunks = [p.act(obs, deterministic=True, generator=torch.Generator().manual_seed(7)) for p in (ddim, ddpm)]
    assert torch.equal(chunks[0], ddim.decode(obs, own_noise).detach()) and not torch.allclose(chunks[0], chunks[1])
    alone = ddim.decode({"state": obs["state"][1:2]}, noise[1:2])
    torch.testing.assert_close(alone, ddim.decode(obs, noise)[1:2], atol=1e-5, rtol=1e-4)


def test_ddpm_noise_comes_from_the_stream_of_each_row() -> None:
    policy = diffusion(sampler="ddpm", action_clip=1.0)
    obs = observations(6)
    whole = policy.act(obs, generator=PerRowGenerator(range(6), [2] * 6))
    some = policy.act({"state": obs["state"][[4, 1]]}, generator=PerRowGenerator([4, 1], [2, 2]))
    torch.testing.assert_close(some, whole[[4, 1]], atol=1e-5, rtol=1e-4)
    other = policy.act({"state": obs["state"][[4, 1]]}, generator=PerRowGenerator([4, 1], [3, 2]))
    assert not torch.allclose(other[0], some[0], atol=1e-3) and torch.allclose(other[1], some[1], atol=1e-5)


def test_the_last_ddpm_step_adds_no_noise() -> None:
    class Counting:
        draws = 0

        def normal(self, shape: tuple[int, ...]) -> Tensor:
            self.draws += 1
            return torch.zeros(shape)

    policy, source = diffusion(sampler="ddpm", steps=5), Counting()
    policy.draw_noise = lambda batch, generator, device: source.normal((batch, 6, 2))  # type: ignore[method-assign]
    policy.act(observations(2))
    assert source.draws == 5  # the initial noise, and one per step except the last
    assert policy.nfe == 5


def test_actions_are_in_environment_units_and_within_the_data_range() -> None:
    for sampler in ("ddim", "ddpm"):
        settings = {"normalization": "minmax", "action_normalization": "minmax", "action_clip": 1.0}
        policy = diffusion(sampler=sampler, **settings)
        low, high = torch.tensor([-2.0, 10.0]), torch.tensor([-1.0, 30.0])
        policy.fit_normalizer({"state": {"min": [0, 0], "max": [1, 1]}, "action": {"min": low, "max": high}})
        chunk = policy.act(observations(50))
        assert bool((chunk >= low - 1e-5).all() and (chunk <= high + 1e-5).all())


@pytest.mark.parametrize("prediction", ["noise", pytest.param("data", marks=pytest.mark.slow), "v"])
def test_imitation_learns_two_modes_and_their_probabilities(prediction: str) -> None:
    config = DiffusionConfig(prediction=prediction, hidden=(64, 64), **BOUNDED)
    policy = DiffusionPolicy(config, POINT)
    learn(policy, TWO_MODES, updates=1000 if prediction == "data" else 600)  # data prediction weights low noise least
    check_two_modes(policy.act(nothing(4000)))
    ddpm = DiffusionPolicy(replace(config, sampler="ddpm", steps=100), POINT)
    ddpm.load_state_dict(policy.state_dict())
    check_two_modes(ddpm.act(nothing(4000)))


@pytest.mark.parametrize("backbone", ["mlp", "unet", "transformer"])
def test_every_backbone_decodes_differentiably(backbone: str) -> None:
    sizes = {"unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
    policy = diffusion(backbone=backbone, steps=4, **sizes)
    noise = torch.randn(2, 6, 2, requires_grad=True)
    policy.decode(observations(2), noise).square().sum().backward()
    assert noise.grad is not None and bool(noise.grad.any())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.parameters())


def test_schedule_buffers_are_not_in_the_state_dict() -> None:
    policy = diffusion()
    assert not {"signal_scale", "grid", "level_times"} & policy.state_dict().keys()
    other = diffusion(steps=20)
    other.load_state_dict(policy.state_dict())
    assert other.nfe == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "dimm"}, "Did you mean 'ddim'"),
        ({"prediction": "nois"}, "Did you mean 'noise'"),
        ({"prediction": "velocity"}, "Unknown prediction"),
        ({"schedule": "squared_cosin"}, "Did you mean 'squared_cosine'"),
        ({"spacing": "leadin"}, "Did you mean 'leading'"),
        ({"steps": 2}, "start from noise at level 50 of 100, which is 69% data"),
        ({"schedule": "linear"}, "or policy.schedule=squared_cosine"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_policy("diffusion", DiffusionConfig(**settings), POINT)
    assert "\n" not in str(error.value)
