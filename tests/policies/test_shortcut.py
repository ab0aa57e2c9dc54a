"""Tests of shortcut models: exact maps, both halves of the objective, step sizes and the shared dispersive loss."""

from typing import Any

import pytest
import torch
from average_forms import BACKBONES, CHUNK, POINT, RAW, SMALL, ExactAverage, M, S, nothing
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.policies.heads.average_velocity import ShortcutConfig, ShortcutPolicy, dispersive_loss
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.path import interpolate

DATA = torch.rand(400, 5, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
OBS = {"state": torch.randn(400, 2, 3, generator=torch.Generator().manual_seed(1))}


def exact(**settings: Any) -> ShortcutPolicy:
    policy = ShortcutPolicy(ShortcutConfig(**{**RAW, "delta": 0.0, **settings}), POINT)
    policy.backbone = ExactAverage()
    return policy


def shortcut(**settings: Any) -> ShortcutPolicy:
    return ShortcutPolicy(ShortcutConfig(**(SMALL | settings)), CHUNK)


@pytest.mark.parametrize("steps", [1, 2, 4, 64])
def test_a_perfect_network_maps_noise_to_the_gaussian_in_any_number_of_steps(steps: int) -> None:
    policy, noise = exact(steps=steps), torch.linspace(-2, 2, 9).view(-1, 1, 1)
    torch.testing.assert_close(policy.decode(nothing(9), noise), M + S * noise, atol=1e-5, rtol=1e-5)
    assert policy.nfe == steps == len(policy.backbone.asked)  # type: ignore[arg-type]


def test_one_step_evaluates_the_network_at_noise_with_length_one() -> None:
    policy = exact(steps=1)
    assert policy.grid.tolist() == [0.0]
    policy.act(nothing(3))
    assert torch.equal(policy.backbone.asked[0], torch.tensor([[0.0, 1.0]]))  # type: ignore[index]


def test_with_length_zero_and_no_delta_the_loss_equals_the_rectified_flow_loss() -> None:
    class Instantaneous(nn.Module):
        def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
            return policy.backbone(x, torch.stack([t, torch.zeros_like(t)], -1), features)

    policy = shortcut(delta=0.0, consistency_share=0.0)
    flow = FlowPolicy(FlowConfig(**SMALL), CHUNK)
    flow.backbone = Instantaneous()
    features, noise, t = policy.encode(OBS), torch.randn(400, 5, 2), torch.rand(400)
    expected = flow.matching_loss(features, DATA, noise, t)
    torch.testing.assert_close(policy.matching_loss(features, DATA, noise, t), expected, atol=1e-6, rtol=1e-5)
    training_target = policy.training_target(features, DATA, noise, None)
    assert not bool(training_target.length.any())
    torch.testing.assert_close(training_target.x, interpolate(noise, DATA, training_target.t[:, None, None]))
    torch.testing.assert_close(training_target.target, DATA - noise)
    almost = shortcut(delta=0.1).matching_loss(features, DATA, noise, t)
    assert not torch.allclose(almost, expected, atol=1e-3)


def test_two_half_steps_equal_one_step_of_a_perfect_network() -> None:
    policy, x = exact(), torch.randn(200, 1, 1)
    step = torch.exp2(-torch.randint(0, 6, (200,)).float())
    t = (torch.rand(200) / step).floor() * step
    features = policy.encode(nothing(200))
    halves = policy.two_half_steps(features, x, t, step)
    torch.testing.assert_close(halves, policy.average(features, x, t, step), atol=1e-4, rtol=1e-4)


def test_half_way_points_and_targets_of_half_steps_are_bounded_by_four() -> None:
    class Fast(nn.Module):
        """A velocity of 20; the points at which it is evaluated are stored."""

        def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
            points.append(x)
            return torch.full_like(x, 20.0)

    points: list[Tensor] = []
    policy = shortcut()
    policy.backbone = Fast()
    halves = policy.two_half_steps(policy.encode(OBS), DATA, torch.zeros(400), torch.ones(400))
    assert torch.equal(points[0], DATA)
    assert bool((points[1] == 4.0).all()) and bool((halves == 4.0).all())


def test_a_quarter_of_the_rows_trains_self_consistency_on_dyadic_steps() -> None:
    policy = shortcut(max_steps=16)
    rows = 4000
    data, features = torch.zeros(rows, 5, 2), torch.zeros(rows, 2, 3)
    training_target = policy.training_target(features, data, torch.randn(rows, 5, 2), torch.Generator().manual_seed(0))
    chosen = training_target.length > 0
    assert float(chosen.float().mean()) == pytest.approx(0.25, abs=0.03)
    t, length = training_target.t[chosen], training_target.length[chosen]
    assert sorted(set(length.tolist())) == [2 / 16, 0.25, 0.5, 1.0]
    assert bool(((t / length) == (t / length).round()).all()) and bool((t + length <= 1).all())
    counts = [int((length == value).sum()) for value in (0.125, 0.25, 0.5, 1.0)]
    assert min(counts) > 0.18 * len(length)
    assert len(set(t[length == 0.125].tolist())) == 8


def test_the_finest_half_step_has_length_zero() -> None:
    policy = exact(max_steps=8)
    policy.two_half_steps(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), torch.zeros(2), torch.tensor([0.25, 1.0]))
    first, second = policy.backbone.asked  # type: ignore[misc]
    assert first.tolist() == [[0.0, 0.0], [0.0, 0.5]] and second.tolist() == [[0.125, 0.0], [0.5, 0.5]]
    max_steps = exact(steps=8, max_steps=8)
    max_steps.act(nothing(1))
    assert all(float(times[0, 1]) == 0.0 for times in max_steps.backbone.asked)  # type: ignore[union-attr]


def test_targets_carry_no_gradient() -> None:
    policy = shortcut(consistency_share=1.0)
    features = policy.encode(OBS)
    training_target = policy.training_target(features, DATA, torch.randn(400, 5, 2), None)
    assert not training_target.target.requires_grad and bool((training_target.length > 0).all())
    error = (
        policy.average(features, training_target.x, training_target.t, training_target.length) - training_target.target
    )
    assert error.requires_grad and torch.equal(policy.reduce(error), error.square().mean(-1))


def test_the_field_is_the_instantaneous_velocity() -> None:
    policy, x, t = shortcut(), torch.randn(400, 5, 2), torch.rand(400)
    output = policy.backbone(x, torch.stack([t, torch.zeros(400)], -1), policy.encode(OBS))
    assert torch.equal(policy.field(OBS, x, t), output)


@pytest.mark.slow
def test_a_learned_shortcut_agrees_with_its_two_half_steps_and_with_the_data() -> None:
    policy = ShortcutPolicy(ShortcutConfig(**(RAW | {"hidden": (64, 64), "max_steps": 16})), POINT)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for i in range(600):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - i / 600)
        loss, _ = policy.imitation_loss(nothing(256), M + S * torch.randn(256, 1, 1))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    noise = torch.randn(4000, 1, 1)
    one = policy.decode(nothing(4000), noise).detach()
    assert float(one.mean()) == pytest.approx(M, abs=0.05) and float(one.std()) == pytest.approx(S, abs=0.06)
    features, zero, whole = policy.encode(nothing(4000)), torch.zeros(4000), torch.ones(4000)
    halves = noise + policy.two_half_steps(features, noise, zero, whole)
    assert float((halves - one).abs().mean()) < 0.06


def test_the_dispersive_loss_is_the_log_of_the_mean_similarity_and_decreases_with_distance() -> None:
    z = torch.randn(6, 4)
    distance = (z[:, None] - z[None]).square().sum(-1) / 4
    torch.testing.assert_close(dispersive_loss(z, 0.3), (-distance / 0.3).exp().mean().log())
    assert float(dispersive_loss(torch.ones(5, 3), 0.3)) == pytest.approx(0.0, abs=1e-6)
    assert float(dispersive_loss(3 * z, 0.3)) < float(dispersive_loss(z, 0.3))
    assert bool(dispersive_loss(100 * z, 0.3).isfinite())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_dispersive_loss_is_added_to_every_row_and_reaches_the_lower_layers(backbone: str) -> None:
    plain, dispersed = shortcut(backbone=backbone), shortcut(backbone=backbone, dispersive_coef=0.5)
    dispersed.load_state_dict(plain.state_dict())
    obs, data = {"state": OBS["state"][:16]}, DATA[:16]
    losses = [
        p.imitation_loss(obs, data, generator=torch.Generator().manual_seed(0))[0].detach() for p in (plain, dispersed)
    ]
    extra = losses[1] - losses[0]
    torch.testing.assert_close(extra, extra[:1].expand(16), atol=1e-5, rtol=0)
    assert float(extra[0]) < 0
    x, times = torch.randn(16, 5, 2), torch.rand(16, 2)
    middle = plain.backbone.representation(x, times, plain.encode(obs))  # type: ignore[operator]
    assert middle.dim() == 2 and len(middle) == 16
    dispersive_loss(middle, 0.3).backward()
    reached = [name for name, parameter in plain.backbone.named_parameters() if parameter.grad is not None]
    assert any(name.startswith("time") for name in reached) and not any(name.startswith("output") for name in reached)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"steps": 3}, "steps must be a power of two, got 3"), ({"max_steps": 100}, "max_steps must be a power of two")],
)
def test_bad_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ShortcutConfig(**settings)
