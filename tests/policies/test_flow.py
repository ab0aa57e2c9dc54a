"""Tests of the rectified-flow head: analytic flows, learning, masks, time distributions and bounds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.generative import TIME_DISTRIBUTIONS
from robopolicy.policies.registry import make_policy

SPEC = PolicySpec({"state": (1,)}, action_dim=1)
RAW = {"normalization": "identity", "action_normalization": "identity", "action_clip": 0.0}
M, S = 0.4, 0.3


class GaussianVelocity(nn.Module):
    """Exact velocity of the flow from N(0, 1) to N(mean, std^2)."""

    def __init__(self, mean: float = M, std: float = S) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        t, data = t.view(-1, 1, 1), self.std**2
        variance = (1 - t) ** 2 + t**2 * data
        return self.mean + (t * data - (1 - t)) / variance * (x - t * self.mean)


class Velocity(nn.Module):
    """Velocity as a function of the iterate."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return self.function(x)


def zeros(rows: int) -> dict[str, Tensor]:
    return {"state": torch.zeros(rows, 1, 1)}


def test_raw_actions_beyond_the_bound_are_refused() -> None:
    raw = {"normalization": "identity", "action_normalization": "identity"}
    found = {"action": {"min": [-2.0], "max": [0.5]}}
    with pytest.raises(UserError, match="Actions reach 2, which action_clip=1 would clip"):
        make_policy("flow", FlowConfig(**raw), SPEC).fit_normalizer(found)  # type: ignore[arg-type]
    make_policy("flow", FlowConfig(**raw, action_clip=2.0), SPEC).fit_normalizer(found)  # type: ignore[arg-type]


def test_euler_steps_on_the_exact_field_converge_to_the_gaussian_map() -> None:
    noise = torch.linspace(-2, 2, 9).view(-1, 1, 1)
    errors = []
    for steps in (4, 8, 64):
        policy = FlowPolicy(FlowConfig(steps=steps, **RAW), SPEC)  # type: ignore[arg-type]
        policy.backbone = GaussianVelocity()
        errors.append(float((policy.decode(zeros(9), noise) - (M + S * noise)).abs().max()))
    assert errors[1] < 0.6 * errors[0] and errors[2] < 0.02


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [({"action_clip": 1.0}, 0.33), ({"action_clip": 1.0, "clip_iterates": False}, 0.425), ({"action_clip": 0.0}, 0.43)],
)
def test_clipped_iterates_narrow_the_distribution(clipping: dict[str, float], expected: float) -> None:
    """With the exact velocity of N(0, 0.5^2), 10 Euler steps narrow the samples a little and clipping much more."""
    policy = FlowPolicy(FlowConfig(steps=10, **(RAW | clipping)), SPEC)  # type: ignore[arg-type]
    policy.backbone = GaussianVelocity(0.0, 0.5)
    samples = policy.act(zeros(100_000), generator=torch.Generator().manual_seed(0))
    assert float(samples.std()) == pytest.approx(expected, abs=0.005)


def test_only_the_last_iterate_is_clipped_without_clip_iterates() -> None:
    """Velocity 3 from noise 0 in 2 steps: iterates 1.5 and 3; velocity -2 x from 1.5: 0."""
    for velocity, expected in ((lambda x: 3 + 0 * x, 1.0), (lambda x: torch.where(x < 1, 3.0, -2 * x), 0.0)):
        policy = FlowPolicy(FlowConfig(steps=2, **(RAW | {"action_clip": 1.0, "clip_iterates": False})), SPEC)  # type: ignore[arg-type]
        policy.backbone = Velocity(velocity)
        assert float(policy.decode(zeros(1), torch.zeros(1, 1, 1))) == expected


def test_one_step_on_the_left_grid_returns_the_mean() -> None:
    policy = FlowPolicy(FlowConfig(steps=1, **RAW), SPEC)  # type: ignore[arg-type]
    policy.backbone = GaussianVelocity()
    assert policy.nfe == 1
    torch.testing.assert_close(policy.decode(zeros(5), torch.randn(5, 1, 1)), torch.full((5, 1, 1), M))


@pytest.mark.parametrize("time_distribution", TIME_DISTRIBUTIONS)
def test_a_flow_learns_a_gaussian(time_distribution: str) -> None:
    config = FlowConfig(steps=20, hidden=(64, 64), time_distribution=time_distribution, **RAW)  # type: ignore[arg-type]
    policy = FlowPolicy(config, SPEC)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for i in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - i / 300)
        loss, _ = policy.imitation_loss(zeros(512), M + S * torch.randn(512, 1, 1))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    samples = policy.act(zeros(4000))
    assert float(samples.mean()) == pytest.approx(M, abs=0.05)
    assert float(samples.std()) == pytest.approx(S, abs=0.06)


def test_time_distributions_cover_the_unit_interval() -> None:
    n = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    for law in TIME_DISTRIBUTIONS.values():
        t = law(n)
        assert 0 <= float(t.min()) < 0.05 and 0.9 < float(t.max()) <= 1
    quantiles = TIME_DISTRIBUTIONS["uniform"](n).quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quantiles, torch.tensor([0.25, 0.5, 0.75]), atol=0.02, rtol=0)
    assert float(TIME_DISTRIBUTIONS["beta"](n).mean()) == pytest.approx(
        0.999 * 0.4, abs=0.01
    )  # Beta(1.5, 1) has mean 0.6


def test_padded_steps_have_no_loss_and_weights_scale_rows() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(16,), backbone="unet", unet_channels=(8, 16)), SPEC_CHUNK)
    obs, chunk = {"state": torch.randn(3, 1, 2)}, torch.randn(3, 6, 2)
    mask = torch.ones(3, 6)
    mask[1, 4:], mask[2] = 0, 0

    def loss(weight: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return policy.imitation_loss(obs, chunk, weight, mask=mask, generator=torch.Generator().manual_seed(1))[0]

    full, masked = loss(), loss(mask=mask)
    assert full.shape == (3,)
    assert torch.equal(full[0], masked[0]) and not torch.equal(full[1], masked[1]) and not bool(masked[2])
    torch.testing.assert_close(loss(mask=torch.ones(3, 6).bool()), full)
    weight = torch.tensor([2.0, 0.0, -1.0])
    torch.testing.assert_close(loss(weight), full * weight)
    gradient = torch.autograd.grad(masked[2], policy.backbone.output[-1].weight)[0]  # type: ignore[index,union-attr]
    assert not bool(gradient.any())


SPEC_CHUNK = PolicySpec({"state": (2,)}, action_dim=2, horizon=6, action_horizon=2)


def test_actions_are_in_environment_units_and_within_the_data_range() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(16,)), SPEC_CHUNK)
    low, high = torch.tensor([-2.0, 10.0]), torch.tensor([-1.0, 30.0])
    policy.fit_normalizer({"state": {"min": [0, 0], "max": [1, 1]}, "action": {"min": low, "max": high}})
    chunk = policy.decode({"state": torch.rand(50, 1, 2)}, 5 * torch.randn(50, 6, 2))
    assert bool((chunk >= low - 1e-5).all() and (chunk <= high + 1e-5).all())
    assert bool((chunk.amax((0, 1)) == high).all())


def test_decode_is_differentiable_in_noise_and_weights() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(16,), **RAW), SPEC_CHUNK)  # type: ignore[arg-type]
    noise = torch.randn(2, 6, 2, requires_grad=True)
    policy.decode({"state": torch.rand(2, 1, 2)}, noise).square().sum().backward()
    assert noise.grad is not None and bool(noise.grad.any())
    assert all(p.grad is not None for p in policy.parameters())


def test_act_decodes_the_noise_it_samples() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(16,), **RAW), SPEC_CHUNK)  # type: ignore[arg-type]
    obs = {"state": torch.rand(4, 1, 2)}
    noise = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(7))
    assert torch.equal(policy.act(obs, generator=torch.Generator().manual_seed(7)), policy.decode(obs, noise).detach())


def test_field_equals_the_sampler_step() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(16,), steps=1, **RAW), SPEC_CHUNK)  # type: ignore[arg-type]
    obs, noise = {"state": torch.rand(4, 1, 2)}, torch.randn(4, 6, 2)
    assert torch.equal(policy.decode(obs, noise), noise + policy.field(obs, noise, torch.zeros(1)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "unett"}, "Did you mean 'unet'"),
        ({"time_distribution": "unifrm"}, "Did you mean 'uniform'"),
        ({"action_normalization": "running"}, "cannot be 'running'"),
        ({"action_normalization": "meanstd"}, "would clip standardised actions"),
        ({"transformer_width": 10, "transformer_heads": 4}, "multiple of transformer_heads"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FlowPolicy(FlowConfig(**settings), SPEC)


def test_unknown_policies_suggest_the_nearest_name_and_configs_must_match() -> None:
    with pytest.raises(UserError, match="Did you mean 'flow'"):
        make_policy("flwo", None, SPEC)
    with pytest.raises(UserError, match="needs a GaussianConfig"):
        make_policy("gaussian", FlowConfig(), SPEC)


def test_a_missing_method_is_named() -> None:
    with pytest.raises(TypeError, match="'flow' has no method sample"):
        FlowPolicy(FlowConfig(hidden=(8,)), SPEC).sample(zeros(1))
