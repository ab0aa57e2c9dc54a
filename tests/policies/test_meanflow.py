"""Tests of MeanFlow: exact maps, the MeanFlow identity, derivatives on every backbone, times and weights."""

import copy
from typing import Any

import pytest
import torch
from average_forms import (
    BACKBONES,
    CHUNK,
    POINT,
    RAW,
    SMALL,
    ExactAverage,
    M,
    S,
    deviation,
    flow_map,
    nothing,
    velocity,
)
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.average_velocity import (
    TIME_SCALE,
    MeanFlowConfig,
    MeanFlowPolicy,
    central_difference,
    forward_mode,
)
from robopolicy.policies.heads.generative import TIME_DISTRIBUTIONS

DATA = torch.rand(64, 5, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
OBS = {"state": torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(1))}


def meanflow(**settings: Any) -> MeanFlowPolicy:
    return MeanFlowPolicy(MeanFlowConfig(**(SMALL | settings)), CHUNK)


def exact(**settings: Any) -> MeanFlowPolicy:
    policy = MeanFlowPolicy(MeanFlowConfig(**(RAW | settings)), POINT)
    policy.backbone = ExactAverage(TIME_SCALE)
    return policy


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_perfect_network_maps_noise_to_the_gaussian_in_any_number_of_steps(steps: int) -> None:
    policy, noise = exact(steps=steps), torch.linspace(-2, 2, 9).view(-1, 1, 1)
    torch.testing.assert_close(policy.decode(nothing(9), noise), M + S * noise, atol=1e-5, rtol=1e-5)
    assert policy.nfe == steps


def test_one_step_evaluates_the_network_at_noise_only() -> None:
    policy = exact(steps=1)
    assert policy.grid.tolist() == [0.0]
    policy.act(nothing(2))
    assert torch.equal(policy.backbone.asked[0], torch.tensor([[0.0, 1.0]]))  # type: ignore[index]


@pytest.mark.parametrize("derivative", ["exact", "difference"])
def test_the_average_velocity_solves_its_identity(derivative: str) -> None:
    policy, rows = exact(derivative=derivative), 200
    t, end = torch.rand(2, rows).sort(0).values
    end = torch.maximum(end, t + 0.05)
    x = torch.randn(rows, 1, 1)
    v, length, features = velocity(x, t.view(-1, 1, 1)), end - t, policy.encode(nothing(rows))
    average = policy.average(features, x, t, length)
    slope = policy.total_derivative(features, x, t, length, v)
    torch.testing.assert_close(v + length[:, None, None] * slope, average, atol=1e-2, rtol=1e-2)
    assert float((v - average).abs().mean()) > 0.1  # the correction matters
    wrong = v - length[:, None, None] * slope
    assert float((wrong - average).abs().mean()) > 0.1  # and so does its sign


@pytest.mark.parametrize("derivative", ["exact", "difference"])
def test_training_target_matches_its_closed_form(derivative: str) -> None:
    """With end point F(x, t), the target is the average plus dF/dx times (row velocity - flow velocity)."""
    policy, rows = exact(derivative=derivative, flow_ratio=0.0, time_distribution="uniform"), 400
    data, noise = M + S * torch.randn(rows, 1, 1), torch.randn(rows, 1, 1)
    training_target = policy.training_target(
        policy.encode(nothing(rows)), data, noise, torch.Generator().manual_seed(0)
    )
    t, end = training_target.t.view(-1, 1, 1), (training_target.t + training_target.length).view(-1, 1, 1)
    torch.testing.assert_close(training_target.x, (1 - t) * noise + t * data)
    average = (flow_map(training_target.x, t, end) - training_target.x) / (end - t)
    expected = average + deviation(end) / deviation(t) * (data - noise - velocity(training_target.x, t))
    long = training_target.length > 0.1  # shorter intervals amplify rounding errors
    assert int(long.sum()) > 200
    torch.testing.assert_close(training_target.target[long], expected[long], atol=1e-3, rtol=1e-4)
    assert float((training_target.target - (data - noise))[long].abs().mean()) > 0.1


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_forward_derivative_agrees_with_finite_differences(backbone: str, mode: str) -> None:
    policy = copy.deepcopy(meanflow(backbone=backbone)).double().train(mode == "train")
    x, tangent = torch.randn(2, 8, 5, 2, dtype=torch.float64)
    t, length = torch.rand(2, 8, dtype=torch.float64) / 2
    features, ones = torch.randn(8, 2, 3, dtype=torch.float64), torch.ones(8, dtype=torch.float64)

    def network(x: Tensor, t: Tensor, length: Tensor) -> Tensor:
        return policy.average(features, x, t, length)

    forward = policy.total_derivative(features, x, t, length, tangent)
    with torch.no_grad():
        numeric = central_difference(network, (x, t, length), (tangent, ones, -ones), step=1e-4)
    assert not forward.requires_grad
    scale = float(numeric.abs().max())
    assert float((forward - numeric).abs().max()) < 1e-3 * scale


def test_the_difference_option_gives_nearly_the_same_targets() -> None:
    forward, difference = meanflow(flow_ratio=0.0), meanflow(flow_ratio=0.0, derivative="difference")
    difference.load_state_dict(forward.state_dict())
    noise = torch.randn(64, 5, 2)
    targets = [
        p.training_target(p.encode(OBS), DATA, noise, torch.Generator().manual_seed(0)).target
        for p in (forward, difference)
    ]
    torch.testing.assert_close(targets[0], targets[1], atol=2e-2, rtol=2e-2)


def test_attention_is_differentiable_in_every_mode_and_backend_settings_are_restored() -> None:
    policy = meanflow(backbone="transformer", flow_ratio=0.0)
    fast = torch.backends.mha.get_fastpath_enabled()
    for frozen in (False, True):
        policy.requires_grad_(not frozen)
        for training in (True, False):
            loss, _ = policy.train(training).imitation_loss(OBS, DATA)
            assert bool(loss.isfinite().all())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert bool(policy.eval().imitation_loss(OBS, DATA)[0].isfinite().all())
    assert torch.backends.mha.get_fastpath_enabled() == fast
    with pytest.raises(ZeroDivisionError), forward_mode():
        raise ZeroDivisionError
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_three_quarters_of_the_rows_train_the_instantaneous_velocity() -> None:
    policy = exact()
    data, noise = torch.zeros(4000, 1, 1), torch.randn(4000, 1, 1)
    training_target = policy.training_target(
        policy.encode(nothing(4000)), data, noise, torch.Generator().manual_seed(0)
    )
    instant = training_target.length == 0
    assert float(instant.float().mean()) == pytest.approx(0.75, abs=0.03)
    assert torch.equal(training_target.target[instant], (data - noise)[instant])
    assert not torch.allclose(training_target.target[~instant], (data - noise)[~instant], atol=1e-3)
    assert bool((training_target.length >= 0).all()) and bool((training_target.t + training_target.length <= 1).all())
    assert not training_target.target.requires_grad
    only = exact(flow_ratio=1.0)
    only.training_target(only.encode(nothing(10)), data[:10], noise[:10], None)
    assert not only.backbone.asked  # nothing to differentiate


def test_times_have_more_mass_near_the_data() -> None:
    logit = torch.logit(TIME_DISTRIBUTIONS["logit_normal_data"](torch.randn(50_000)).double())
    assert float(logit.mean()) == pytest.approx(0.4, abs=0.02) and float(logit.std()) == pytest.approx(1.0, abs=0.02)


def test_weights_divide_each_row_by_its_own_error_without_gradient() -> None:
    error = torch.randn(6, 5, 2, requires_grad=True)
    total = error.detach().square().sum((1, 2))
    for power in (0.0, 0.5, 1.0):
        loss = meanflow(adaptive_power=power).reduce(error)
        assert loss.shape == (6, 5)
        weight = (total + 0.01) ** -power
        torch.testing.assert_close(loss.mean(1), weight * error.square().sum((1, 2)))
        gradient = torch.autograd.grad(loss.mean(1).sum(), error)[0]
        torch.testing.assert_close(gradient, 2 * weight[:, None, None] * error.detach())


def test_the_field_is_the_instantaneous_velocity_and_the_matching_loss_its_regression() -> None:
    policy, x, t, noise = meanflow(), torch.randn(64, 5, 2), torch.rand(64), torch.randn(64, 5, 2)
    features = policy.encode(OBS)
    output = policy.backbone(x, torch.stack([TIME_SCALE * t, torch.zeros(64)], -1), features)
    assert torch.equal(policy.field(OBS, x, t), output)
    between = noise + t[:, None, None] * (DATA - noise)
    expected = (policy.velocity(features, between, t) - (DATA - noise)).square().mean(-1)
    torch.testing.assert_close(policy.matching_loss(features, DATA, noise, t), expected)


@pytest.mark.slow
def test_a_learned_meanflow_maps_noise_to_the_gaussian_in_one_call() -> None:
    settings = {"hidden": (64, 64), "adaptive_power": 0.0, "time_distribution": "uniform", "flow_ratio": 0.5}
    policy = MeanFlowPolicy(MeanFlowConfig(**(RAW | settings)), POINT)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for i in range(700):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - i / 700)
        loss, _ = policy.imitation_loss(nothing(256), M + S * torch.randn(256, 1, 1))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    noise = torch.randn(4000, 1, 1)
    samples = policy.decode(nothing(4000), noise).detach()
    # The std approaches S from below; after this short training it is about two thirds of S.
    assert float(samples.mean()) == pytest.approx(M, abs=0.05) and 0.45 * S < float(samples.std()) < 1.1 * S
    assert float((samples - (M + S * noise)).abs().mean()) < 0.14


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"derivative": "exat"}, "Did you mean 'exact'"), ({"time_distribution": "unifrm"}, "Did you mean 'uniform'")],
)
def test_bad_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MeanFlowConfig(**settings)


@pytest.mark.parametrize("backbone", ["mlp", "unet", "transformer"])
def test_finite_differences_have_full_precision_under_autocast(backbone: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden": (32, 32), "unet_channels": (16, 16), "transformer_width": 16, "transformer_layers": 1}
    config = MeanFlowConfig(backbone=backbone, derivative="difference", **RAW, **sizes)  # type: ignore[arg-type]
    policy = MeanFlowPolicy(config, PolicySpec({"state": (3,)}, 2, horizon=4, action_horizon=4))
    features, x, tangent = torch.randn(6, 1, 3), torch.randn(6, 4, 2), torch.randn(6, 4, 2)
    t, length = torch.rand(6), torch.rand(6) / 2
    exact = policy.total_derivative(features, x, t, length, tangent)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy.total_derivative(features, x, t, length, tangent), exact)


def test_padded_steps_do_not_weight_the_loss() -> None:
    policy = meanflow()
    error, mask = torch.randn(64, 5, 2), (torch.arange(5) < 2).float().expand(64, 5)
    padded = torch.cat([error[:, :2], torch.randn(64, 3, 2)], 1)
    valid = [policy.reduce(each, mask)[:, :2] for each in (error, padded)]
    assert torch.equal(*valid)
    torch.testing.assert_close(policy.reduce(error, torch.ones(64, 5)), policy.reduce(error))
