"""Tests of the stochastic differential equation of a flow: its marginals, its noiseless limit and its density."""

import math

import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.exploration.flow_chains import SDEChain
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.path import step_index

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2)
OBS = {"state": torch.randn(16, 1, 3, generator=torch.Generator().manual_seed(0))}
RAW = {"hidden": (32, 32), "normalization": "identity", "action_normalization": "identity"}
MEAN, STD = 0.4, 0.5


def sde(noise_level: float, **config: object) -> SDEChain:
    torch.manual_seed(0)
    return SDEChain(FlowPolicy(FlowConfig(**(RAW | config)), SPEC), noise_level)  # type: ignore[arg-type]


class ToGaussian(FlowPolicy):
    """The exact flow from standard normal noise to N(MEAN, STD^2)."""

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None, None]
        gain = (t * STD**2 - (1 - t)) / (t**2 * STD**2 + (1 - t) ** 2)
        return MEAN + gain * (x - t * MEAN)


@pytest.mark.parametrize(("clip", "clip_iterates"), [(0.0, True), (0.5, True), (0.5, False)])
def test_without_noise_the_sde_equals_the_deployed_flow(clip: float, clip_iterates: bool) -> None:
    policy = sde(0.0, action_clip=clip, clip_iterates=clip_iterates)
    sample = policy.sample(OBS, generator=torch.Generator().manual_seed(3))
    noise = sample.record["chain"][:, 0]
    assert torch.equal(sample.chunk, policy.decode(OBS, noise))
    x = noise
    for k in range(4):
        x = policy.head.sampler_step(policy.head.encode(OBS), x, step_index(k, x))
        assert torch.equal(sample.record["chain"][:, k + 1], x)


@pytest.mark.parametrize("noise_level", [0.0, 0.3, 0.7])
def test_marginals_on_a_gaussian_match_the_flow(noise_level: float) -> None:
    steps, rows = 100, 20000
    spec = PolicySpec({"state": (1,)}, action_dim=1)
    head = ToGaussian(FlowConfig(**(RAW | {"steps": steps, "action_clip": 0.0})), spec)  # type: ignore[arg-type]
    policy = SDEChain(head, noise_level)
    obs = {"state": torch.zeros(rows, 1, 1)}
    chain = policy.sample(obs, generator=torch.Generator().manual_seed(0)).record["chain"].flatten(2).squeeze(2)
    for k in (25, 50, 75, 100):
        t = k / steps
        expected = math.sqrt(t**2 * STD**2 + (1 - t) ** 2)
        assert float(chain[:, k].mean()) == pytest.approx(t * MEAN, abs=0.02)
        assert float(chain[:, k].std()) == pytest.approx(expected, rel=0.03)
    travelled = float((chain[:, 1:] - chain[:, :-1]).abs().sum(1).mean())
    assert (travelled > 1.2) == (noise_level > 0)  # same marginals, different paths


def test_steps_match_the_published_code_with_reversed_time() -> None:
    policy = sde(0.7, action_clip=0.0)
    features, steps = policy.head.encode(OBS), 4
    x = torch.randn(16, 4, 2)
    for k in range(steps):
        mean, log_std = policy.transition(features, x, torch.full((16,), k))
        sigma, dt = 1 - k / steps, -1 / steps  # sigma = 1 is noise in the published code
        output = -policy.head.velocity(features, x, torch.full((16,), k / steps))  # it predicts noise - data
        g = 0.7 * math.sqrt(sigma / (1 - (0.75 if sigma == 1 else sigma)))
        expected = x * (1 + g**2 / (2 * sigma) * dt) + output * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
        torch.testing.assert_close(mean, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(log_std.exp(), torch.full_like(mean, g * math.sqrt(-dt)))


def test_noise_decreases_towards_the_data() -> None:
    policy = sde(0.3)
    log_std = policy.transitions(OBS, policy.sample(OBS).record)[1]
    std = log_std.exp()[0, :, 0, 0]
    assert bool((std[1:] < std[:-1]).all())
    assert float(std[-1]) == pytest.approx(0.3 / math.sqrt(4 * 3))
    single = sde(0.3, steps=1)
    assert float(single.transitions(OBS, single.sample(OBS).record)[1].exp()[0, 0, 0, 0]) == pytest.approx(0.3)


@pytest.mark.parametrize("config", [{}, {"steps": 1}, {"backbone": "transformer", "transformer_width": 16}])
def test_ratios_of_fresh_chains_are_one_and_scores_are_means(config: dict) -> None:
    policy = sde(0.3, **config)
    sample = policy.sample(OBS)
    output = policy.decisions(OBS, sample.record)
    assert float((output.logp.detach() - sample.logp).exp().sub(1).abs().max()) < 1e-5
    mean, log_std = policy.transitions(OBS, sample.record)
    normal = torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(output.logp, normal.log_prob(sample.record["chain"][:, 1:]).mean((2, 3)))
    torch.testing.assert_close(output.entropy, normal.entropy().mean((2, 3)))
    assert not output.entropy.requires_grad and output.logp.requires_grad


def test_negative_noise_is_refused() -> None:
    with pytest.raises(UserError, match="must not be negative"):
        sde(-0.1)
