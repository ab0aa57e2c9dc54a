"""Tests of the noise-injected flow of ReinFlow: densities, bounds, gradient routing and the noiseless limit."""

import math

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2)
OBS = {"state": torch.randn(8, 1, 3, generator=torch.Generator().manual_seed(0))}


def stochastic(noise: NoiseConfig | None = None, **config: object) -> StochasticFlow:
    torch.manual_seed(0)
    settings = {"hidden": (32, 32), "normalization": "identity", "action_normalization": "identity"} | config
    return StochasticFlow(FlowPolicy(FlowConfig(**settings), SPEC), noise or NoiseConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_without_noise_the_chain_equals_the_deployed_flow(clip: float) -> None:
    policy = stochastic(NoiseConfig(std_min=1e-8, std_max=1e-7), action_clip=clip)
    sample = policy.sample(OBS, generator=torch.Generator().manual_seed(3))
    noise = sample.record["chain"][:, 0]
    torch.testing.assert_close(sample.chunk, policy.decode(OBS, noise), atol=1e-5, rtol=0)
    plain = policy.act(OBS, deterministic=True, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(sample.chunk, plain, atol=1e-5, rtol=0)


def test_log_probabilities_equal_gaussian_transitions_at_left_grid_points() -> None:
    policy = stochastic()
    sample = policy.sample(OBS)
    chain = sample.record["chain"]
    assert chain.shape == (8, 5, 4, 2)
    features = policy.head.encode(OBS)
    for k in range(4):
        mean, log_std = policy.transition(features, chain[:, k], torch.full((8,), k))
        expected = torch.distributions.Normal(mean, log_std.exp())
        torch.testing.assert_close(sample.logp[:, k], expected.log_prob(chain[:, k + 1]).sum((1, 2)))
        entropy = policy.decisions(OBS, sample.record).entropy[:, k]
        torch.testing.assert_close(entropy, expected.entropy().sum((1, 2)))
        clipped = (chain[:, k] + policy.field(OBS, chain[:, k], torch.full((8,), k / 4)) / 4).clamp(-1, 1)
        assert torch.equal(mean, clipped)


def test_noise_std_stays_within_its_bounds_for_extreme_network_outputs() -> None:
    policy = stochastic(NoiseConfig(std_min=0.05, std_max=0.2))
    last = policy.noise.body[-1]
    for value, bound in ((-1e4, 0.05), (1e4, 0.2), (0.0, 0.1)):  # the middle is the geometric mean
        torch.nn.init.zeros_(last.weight)  # type: ignore[arg-type]
        torch.nn.init.constant_(last.bias, value)  # type: ignore[arg-type]
        std = policy.noise(torch.randn(5, 3), torch.rand(5)).exp()
        torch.testing.assert_close(std, torch.full((5, 8), bound))


def test_noise_is_clipped_at_the_given_number_of_standard_deviations() -> None:
    policy = stochastic(NoiseConfig(schedule="constant", std_max=0.1, noise_clip=0.5))
    chain = policy.sample(OBS).record["chain"]
    mean, _ = policy.transition(policy.head.encode(OBS), chain[:, 0], torch.zeros(8, dtype=torch.int64))
    assert float((chain[:, 1] - mean).detach().abs().max()) <= 0.05 + 1e-6


def test_the_executed_chunk_is_clipped_and_the_record_is_not() -> None:
    policy = stochastic(NoiseConfig(schedule="constant", std_min=0.5, std_max=0.5))
    sample = policy.sample(OBS)
    last = sample.record["chain"][:, -1]
    assert float(sample.chunk.abs().max()) <= 1.0 < float(last.abs().max())
    assert torch.equal(sample.chunk, last.clamp(-1, 1))


def test_log_probabilities_give_gradients_to_both_networks_and_sampling_to_neither() -> None:
    policy = stochastic()
    sample = policy.sample(OBS)
    assert all(p.grad is None for p in policy.parameters())
    policy.decisions(OBS, sample.record).logp.sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in policy.head.backbone.parameters())
    assert all(p.grad is not None and bool(p.grad.any()) for p in policy.noise.parameters())
    names = {name.split(".")[0] for name, _ in policy.named_parameters()}
    assert names == {"head", "noise"}


def test_entropy_gives_gradients_to_the_noise_network_only() -> None:
    policy = stochastic()
    policy.decisions(OBS, policy.sample(OBS).record).entropy.sum().backward()
    assert all(p.grad is None for p in policy.head.parameters())
    assert all(p.grad is not None for p in policy.noise.parameters())
    constant = stochastic(NoiseConfig(schedule="constant"))
    output = constant.decisions(OBS, constant.sample(OBS).record)
    assert not output.entropy.requires_grad and output.logp.requires_grad


def test_the_decaying_bound_is_constant_then_decreases() -> None:
    policy = stochastic(NoiseConfig(schedule="learned_decay", std_min=0.1, std_max=0.2))

    def bound(progress: float) -> float:
        policy.set_progress(progress)
        return math.exp(float(policy.noise.log_std_max))

    assert bound(0.0) == pytest.approx(0.2) and bound(0.35) == pytest.approx(0.2)
    assert 0.17 < bound(0.7) < 0.2
    assert bound(1.0) == pytest.approx(0.3 * 0.1 + 0.7 * 0.2)
    fixed = stochastic(NoiseConfig(std_min=0.1, std_max=0.2))
    fixed.set_progress(1.0)
    assert math.exp(float(fixed.noise.log_std_max)) == pytest.approx(0.2)


def test_the_noise_of_a_step_is_evaluated_at_its_start() -> None:
    policy, k = stochastic(), torch.arange(4)
    features = policy.head.encode({"state": OBS["state"][:4]})
    found = policy.transition(features, torch.zeros(4, 4, 2), k)[1].flatten(1)
    torch.testing.assert_close(found, policy.noise(features.flatten(1), torch.tensor([0.0, 0.25, 0.5, 0.75])))
    assert not torch.allclose(found, policy.noise(features.flatten(1), torch.zeros(4)), atol=1e-4)


def test_noise_that_ignores_time_is_the_same_at_every_step() -> None:
    policy = stochastic(NoiseConfig(time_dim=0))
    features = torch.randn(2, 3)
    assert torch.equal(policy.noise(features, torch.zeros(2)), policy.noise(features, torch.ones(2)))


def test_a_mean_shift_changes_the_log_ratio_by_the_textbook_amount() -> None:
    policy = stochastic(NoiseConfig(schedule="constant", std_max=0.1), steps=1, action_clip=0.0)
    sample = policy.sample(OBS)
    mean, _ = policy.transition(
        policy.head.encode(OBS), sample.record["chain"][:, 0], torch.zeros(8, dtype=torch.int64)
    )
    x, shift = sample.record["chain"][:, 1], 0.01
    with torch.no_grad():
        policy.head.backbone.body[-1].bias.add_(shift)  # type: ignore[index,union-attr,operator]
    ratio = policy.decisions(OBS, sample.record).logp - sample.logp
    expected = ((2 * shift * (x - mean) - shift**2) / (2 * 0.1**2)).sum((1, 2))
    torch.testing.assert_close(ratio[:, 0], expected, atol=1e-4, rtol=1e-4)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'learned'"):
        NoiseConfig(schedule="learnt")
