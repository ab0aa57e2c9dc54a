"""Tests of consistency functions: boundary, exact maps, the training grid, the loss, and both samplers."""

import math
from typing import Any

import pytest
import torch
from average_forms import BACKBONES, CHUNK, POINT, RAW, SMALL, M, S, nothing
from torch import Tensor, nn

from robopolicy.algorithms.reinflow import ReinFlow, ReinFlowConfig
from robopolicy.errors import UserError
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.edm import preconditioning
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.path import interpolate, karras_sigmas

OBS = {"state": torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(1))}
DATA = torch.rand(64, 5, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


class ExactConsistency(nn.Module):
    """Exact network: the consistency function maps every trajectory of N(mean, std^2) to its end."""

    def __init__(self, config: ConsistencyConfig, mean: float, std: float) -> None:
        super().__init__()
        self.config, self.mean, self.std = config, mean, std

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        config, sigma = self.config, (4 * t.double()).exp().view(-1, 1, 1)
        _, _, c_in = preconditioning(sigma, config.sigma_data)
        x = x.double() / c_in
        ratio = ((self.std**2 + config.sigma_min**2) / (self.std**2 + sigma**2)).sqrt()
        above = sigma - config.sigma_min
        c_skip = config.sigma_data**2 / (above**2 + config.sigma_data**2)
        c_out = above * config.sigma_data * c_in
        return ((self.mean + ratio * (x - self.mean) - c_skip * x) / c_out).float()


def exact(mean: float = M, std: float = S, **settings: Any) -> ConsistencyPolicy:
    policy = ConsistencyPolicy(ConsistencyConfig(**(RAW | settings)), POINT)
    policy.backbone = ExactConsistency(policy.config, mean, std)
    return policy


def consistency(**settings: Any) -> ConsistencyPolicy:
    return ConsistencyPolicy(ConsistencyConfig(**(SMALL | settings)), CHUNK)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_consistency_function_is_the_identity_at_the_lowest_level(backbone: str) -> None:
    policy = consistency(backbone=backbone)
    x, sigma = 3 * torch.randn(64, 5, 2), torch.full((64, 1, 1), 0.002)
    assert torch.equal(policy.denoise(policy.encode(OBS), x, sigma), x)
    assert not torch.allclose(policy.denoise(policy.encode(OBS), x, 2 * sigma), x, atol=1e-4)


def test_consistency_function_is_the_preconditioned_network() -> None:
    policy = consistency()
    x, sigma = torch.randn(64, 5, 2), torch.logspace(-2.5, 1.9, 64).view(-1, 1, 1)
    features, d = policy.encode(OBS), sigma - 0.002
    network = policy.backbone(x / (sigma**2 + 0.25).sqrt(), sigma.flatten().log() / 4, features)
    expected = 0.25 / (d**2 + 0.25) * x + 0.5 * d / (sigma**2 + 0.25).sqrt() * network
    torch.testing.assert_close(policy.denoise(features, x, sigma), expected, atol=1e-5, rtol=1e-4)


def test_exact_function_maps_noise_to_the_gaussian_in_one_step() -> None:
    policy, noise = exact(), torch.linspace(-2, 2, 9).view(-1, 1, 1)
    # The sampler starts from noise without data, which shifts the end by M S / sigma_max.
    torch.testing.assert_close(policy.decode(nothing(9), noise), M + S * noise, atol=2 * M * S / 80, rtol=0)
    assert policy.nfe == 1 and policy.sigmas.tolist() == pytest.approx([80.0, 0.002])


def test_all_points_of_a_trajectory_have_the_same_end() -> None:
    policy, w = exact(), torch.randn(50, 1, 1)
    ends = [
        policy.denoise(torch.zeros(50, 1, 1), M + math.sqrt(S**2 + s**2) * w, torch.full((50, 1, 1), s))
        for s in (0.002, 0.1, 1.0, 20.0)
    ]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("steps", [2, 3])
def test_multistep_sampling_preserves_the_distribution(steps: int) -> None:
    policy = exact(steps=steps)
    sampled = policy.act(nothing(20_000))
    assert float(sampled.mean()) == pytest.approx(M, abs=0.01) and float(sampled.std()) == pytest.approx(S, abs=0.01)
    centred, noise = exact(0.0, 0.5, steps=steps), torch.randn(50, 1, 1)  # `decode` assumes data from N(0, 0.5^2)
    torch.testing.assert_close(centred.decode(nothing(50), noise), 0.5 * noise, atol=1e-3, rtol=1e-3)


def test_added_noise_accounts_for_the_remaining_noise_of_the_lowest_level() -> None:
    policy, calls = exact(sigma_min=0.3, sigma_max=1.0, steps=3), list[tuple[float, float]]()

    def zero(features: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """Record the standard deviation of the input and its noise level."""
        calls.append((float(x.std()), float(sigma[0])))
        return torch.zeros_like(x)

    policy.denoise = zero  # type: ignore[method-assign]
    policy.act(nothing(20_000), generator=torch.Generator().manual_seed(0))
    assert [sigma for _, sigma in calls] == policy.sigmas[:-1].tolist()
    for spread, sigma in calls[1:]:
        assert spread == pytest.approx(math.sqrt(sigma**2 - 0.3**2), rel=0.02)


def test_act_equals_decode_with_one_step_and_adds_new_noise_with_more() -> None:
    noise = torch.randn(64, 5, 2, generator=torch.Generator().manual_seed(7))
    for steps in (1, 2):
        policy = consistency(steps=steps)
        acted = policy.act(OBS, generator=torch.Generator().manual_seed(7))
        assert torch.equal(acted, policy.act(OBS, generator=torch.Generator().manual_seed(7)))
        assert torch.allclose(acted, policy.decode(OBS, noise), atol=1e-6) == (steps == 1)


def test_rows_do_not_depend_on_the_batch() -> None:
    policy = consistency(steps=3)
    whole = policy.act(OBS, generator=PerRowGenerator(range(64), [2] * 64))
    some = policy.act({"state": OBS["state"][5:9]}, generator=PerRowGenerator(range(5, 9), [2] * 4))
    torch.testing.assert_close(some, whole[5:9], atol=1e-5, rtol=1e-5)


def test_field_is_the_velocity_of_the_line_to_the_estimate() -> None:
    policy, t = consistency(), torch.linspace(0.02, 0.99, 64)
    x, row = torch.randn(64, 5, 2), t.view(-1, 1, 1)
    sigma = (1 - row) / row
    end = policy.denoise(policy.encode(OBS), x / row, sigma)
    ahead = 1 / 1.002  # linear time of sigma_min
    expected = (ahead * end - x) / (ahead - row)
    torch.testing.assert_close(policy.field(OBS, x, t), expected, atol=1e-3, rtol=1e-3)
    for edge in (0.0, 1.0):
        assert bool(policy.field(OBS, x, torch.full((64,), edge)).isfinite().all())
    point = exact(0.3, 1e-4)  # trajectories to a single point are straight
    z = torch.randn(64, 1, 1)
    x = interpolate(z, torch.tensor(0.3), row)
    torch.testing.assert_close(point.field(nothing(64), x, t), 0.3 - z, atol=2e-2, rtol=0)


def test_training_grid_doubles_in_equal_stages_and_is_saved() -> None:
    policy = consistency()
    assert int(policy.levels) == 10
    sizes = []
    for i in range(800):
        policy.set_progress(i / 800)
        sizes.append(int(policy.levels))
    assert [sizes.count(10 * 2**i) for i in range(8)] == [100] * 8
    policy.set_progress(1.0)
    policy.set_progress(0.0)  # further training does not coarsen the grid
    other = consistency()
    other.load_state_dict(policy.state_dict())
    assert int(other.levels) == 1280
    odd = consistency(levels_first=10, levels_last=50)
    odd.set_progress(0.99)
    assert int(odd.levels) == 40


def test_training_pairs_are_neighbours_on_the_karras_grid() -> None:
    policy = consistency(levels_first=12)
    grid = karras_sigmas(13, 0.002, 80.0, 7.0)[:-1].float()
    above, below = policy._interval(grid[:-1].view(-1, 1, 1))
    torch.testing.assert_close(above.flatten(), grid[:-1], atol=0, rtol=1e-4)
    torch.testing.assert_close(below.flatten(), grid[1:], atol=0, rtol=1e-4)
    above, below = policy._interval(torch.tensor([[[0.002]]]))
    assert float(above) == pytest.approx(float(grid[-2]), rel=1e-4)
    assert float(below) == pytest.approx(0.002, rel=1e-4)


def test_levels_are_sampled_from_a_discretised_lognormal() -> None:
    policy = consistency(levels_first=12)
    t = policy.sample_times(40_000, torch.Generator().manual_seed(0))
    rising = karras_sigmas(13, 0.002, 80.0, 7.0)[:-1].flip(0)
    normal = torch.distributions.Normal(-1.1, 2.0)
    mass = normal.cdf(rising.log()[1:]) - normal.cdf(rising.log()[:-1])
    counts = torch.stack([(((1 - t) / t) / sigma - 1).abs() < 1e-3 for sigma in rising[1:]]).sum(1)
    assert int(counts.sum()) == 40_000
    torch.testing.assert_close(counts / 40_000, (mass / mass.sum()).float(), atol=0.01, rtol=0)


def test_loss_is_the_pseudo_huber_distance_to_the_detached_lower_level() -> None:
    policy = consistency()
    grid = karras_sigmas(11, 0.002, 80.0, 7.0)[:-1].float()
    high, low = grid[3].expand(64, 1, 1), grid[4].expand(64, 1, 1)
    features, noise = policy.encode(OBS), torch.randn(64, 5, 2)
    loss = policy.matching_loss(features, DATA, noise, 1 / (1 + high.flatten()))
    target = policy.denoise(features, DATA + low * noise, low).detach()
    c = 0.00054 * math.sqrt(2)
    distance = (policy.denoise(features, DATA + high * noise, high) - target).square().sum(-1)
    expected = ((distance + c**2).sqrt() - c) / float(grid[3] - grid[4])
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-3)
    weight = policy.backbone.body[0].weight  # type: ignore[index,union-attr]
    found, reference = (torch.autograd.grad(value.sum(), weight)[0] for value in (loss, expected))
    torch.testing.assert_close(found, reference, atol=1e-2, rtol=1e-2)


def test_reinflow_refuses_consistency_heads() -> None:
    with pytest.raises(UserError, match="got 'consistency'"):
        ReinFlow(ReinFlowConfig(), consistency(), total_updates=1)


@pytest.mark.slow
def test_consistency_training_learns_a_gaussian_without_a_teacher() -> None:
    settings = {"hidden": (64, 64, 64), "levels_last": 40, "sigma_max": 10.0}
    policy = ConsistencyPolicy(ConsistencyConfig(**(RAW | settings)), POINT)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    for i in range(700):
        policy.set_progress(i / 700)
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - i / 700)
        loss, _ = policy.imitation_loss(nothing(256), M + S * torch.randn(256, 1, 1))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    sampled = policy.act(nothing(4000))
    assert float(sampled.mean()) == pytest.approx(M, abs=0.05) and float(sampled.std()) == pytest.approx(S, abs=0.08)
