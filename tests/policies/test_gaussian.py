"""Tests of the Gaussian head against torch.distributions: initialisation, bounds and imitation losses."""

import math

import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=2, action_horizon=2)
OBS = {"state": torch.randn(16, 1, 3, generator=torch.Generator().manual_seed(0))}


def gaussian(**config: object) -> GaussianPolicy:
    torch.manual_seed(0)
    return GaussianPolicy(GaussianConfig(**({"normalization": "identity"} | config)), SPEC)  # type: ignore[arg-type]


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_log_probability_and_entropy_match_a_normal(state_dependent_std: bool) -> None:
    policy = gaussian(state_dependent_std=state_dependent_std, orthogonal_init=False, log_std_init=-0.5)
    sample = policy.sample(OBS)
    mean, log_std = policy.distribution(OBS)
    expected = Normal(mean, log_std.exp().expand_as(mean))
    output = policy.decisions(OBS, sample.record)
    torch.testing.assert_close(output.logp[:, 0], expected.log_prob(sample.chunk).sum((1, 2)))
    torch.testing.assert_close(output.entropy[:, 0], expected.entropy().sum((1, 2)))


def test_squashed_density_matches_the_change_of_variables() -> None:
    policy = gaussian(squash=True, orthogonal_init=False)
    sample = policy.sample(OBS)
    mean, log_std = policy.distribution(OBS)
    expected = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    chunk = sample.chunk.double().clamp(-1 + 1e-12, 1 - 1e-12)
    torch.testing.assert_close(sample.logp[:, 0].double(), expected.log_prob(chunk).sum((1, 2)), atol=1e-4, rtol=1e-4)


def test_squashed_density_stays_finite_for_large_inputs() -> None:
    policy = gaussian(squash=True)
    record = {"raw": torch.full((16, 2, 2), 30.0)}
    output = policy.decisions(OBS, record)
    assert bool(output.logp.isfinite().all() & output.entropy.isfinite().all())


def test_the_squashed_entropy_estimate_is_unbiased_and_so_is_its_gradient() -> None:
    spec = PolicySpec({"state": (1,)}, 1)
    policy = GaussianPolicy(GaussianConfig(squash=True, normalization="identity", log_std_init=-0.3), spec)
    obs = {"state": torch.zeros(100_000, 1, 1)}
    entropy = policy.decisions(obs, policy.sample(obs, generator=torch.Generator().manual_seed(0)).record).entropy

    def exact(log_std: torch.Tensor) -> torch.Tensor:
        grid = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
        u = log_std.exp() * grid
        slope = 2 * (torch.log(torch.tensor(2.0)) - u - torch.nn.functional.softplus(-2 * u))
        density = Normal(0.0, 1.0).log_prob(grid).exp() * (grid[1] - grid[0])
        return log_std + 1.4189385 + (density * slope).sum()

    log_std = torch.tensor(-0.3, dtype=torch.float64, requires_grad=True)
    value = exact(log_std)
    assert float(entropy.detach().mean()) == pytest.approx(float(value.detach()), abs=0.01)
    gradient = torch.autograd.grad(entropy.mean(), policy.log_std)[0]
    assert float(gradient) == pytest.approx(float(torch.autograd.grad(value, log_std)[0]), abs=0.01)


def test_squashed_actions_fill_the_action_bounds() -> None:
    policy = gaussian(squash=True, action_normalization="minmax", log_std_init=1.5)
    policy.fit_normalizer({"action": {"min": [-2.0, 0.0], "max": [2.0, 3.0]}})
    chunk = torch.cat([policy.sample(OBS).chunk for _ in range(50)]).flatten(0, 1)
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 3.0])
    assert bool((chunk >= low).all() and (chunk <= high).all())
    assert bool((chunk.amax(0) - high).abs().max() < 0.05 and (chunk.amin(0) - low).abs().max() < 0.05)


def test_action_scaling_only_shifts_log_probabilities_by_a_constant() -> None:
    policy = gaussian(squash=True, action_normalization="minmax")
    policy.fit_normalizer({"action": {"min": [-2.0, 0.0], "max": [2.0, 3.0]}})
    mean, log_std = policy.distribution(OBS)
    to_env = [TanhTransform(), AffineTransform(torch.tensor([0.0, 1.5]), torch.tensor([2.0, 1.5]))]
    raw = policy.sample(OBS).record["raw"].clamp(-2, 2)
    in_env_units = TransformedDistribution(Normal(mean, log_std.exp()), to_env).log_prob(policy._to_chunk(raw))
    difference = policy.decisions(OBS, {"raw": raw}).logp[:, 0] - in_env_units.sum((1, 2))
    torch.testing.assert_close(difference, torch.full((16,), 2 * math.log(2 * 1.5)), atol=1e-4, rtol=0)


def test_default_network_matches_stable_baselines3() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    gymnasium = pytest.importorskip("gymnasium")
    reference = sb3.PPO("MlpPolicy", gymnasium.make("Pendulum-v1"), seed=0).policy
    policy = GaussianPolicy(GaussianConfig(normalization="identity"), PolicySpec({"state": (3,)}, 1))
    layers = [m for m in policy.actor if isinstance(m, torch.nn.Linear)]
    linear = [m for m in reference.mlp_extractor.policy_net if isinstance(m, torch.nn.Linear)] + [reference.action_net]
    assert [m.weight.shape for m in layers] == [m.weight.shape for m in linear]
    for layer, other in zip(layers, linear, strict=True):
        assert float(layer.weight.detach().norm()) == pytest.approx(float(other.weight.detach().norm()), rel=1e-4)
        with torch.no_grad():
            layer.weight.copy_(other.weight)
    obs = torch.randn(5, 3)
    sample = policy.sample({"state": obs.unsqueeze(1)})
    _, logp, entropy = reference.evaluate_actions(obs, sample.chunk[:, 0])
    torch.testing.assert_close(sample.logp[:, 0], logp)
    torch.testing.assert_close(policy.decisions({"state": obs.unsqueeze(1)}, sample.record).entropy[:, 0], entropy)


def test_the_policy_gradient_of_a_bandit_matches_its_closed_form() -> None:
    policy = GaussianPolicy(GaussianConfig(normalization="identity", log_std_init=-0.7), PolicySpec({"state": (1,)}, 1))
    obs, optimum = {"state": torch.zeros(50_000, 1, 1)}, 0.6
    sample = policy.sample(obs)
    reward = -(sample.chunk.flatten() - optimum).square()
    logp = policy.decisions(obs, sample.record).logp[:, 0]
    mean_bias = policy.actor[-1].bias
    by_mean, by_std = torch.autograd.grad((reward * logp).mean(), [mean_bias, policy.log_std])  # type: ignore[list-item]
    std = math.exp(-0.7)
    z = (sample.record["raw"].flatten() - policy.actor[-1].bias.detach()) / std  # type: ignore[union-attr,operator]
    for found, score, exact in ((by_mean, z / std, 2 * optimum), (by_std, z.square() - 1, -2 * std**2)):
        standard_error = float((reward * score).std()) / math.sqrt(50_000)
        assert abs(float(found) - exact) < 3 * standard_error


def test_predicted_standard_deviations_are_bounded() -> None:
    policy = gaussian(state_dependent_std=True, log_std_min=-2.0, log_std_max=0.5)
    torch.nn.init.constant_(policy.actor[-1].bias, 1e3)  # type: ignore[arg-type]
    assert float(policy.distribution(OBS)[1].detach().max()) == 0.5
    torch.nn.init.constant_(policy.actor[-1].bias, -1e3)  # type: ignore[arg-type]
    assert float(policy.distribution(OBS)[1].detach().min()) == -2.0


@pytest.mark.parametrize("imitation", ["nll", "mse"])
@pytest.mark.parametrize("squash", [False, True])
def test_imitation_recovers_a_linear_demonstrator(imitation: str, squash: bool) -> None:
    policy = gaussian(imitation=imitation, squash=squash, action_normalization="minmax")
    policy.fit_normalizer({"action": {"min": [-4.0, -4.0], "max": [4.0, 4.0]}})
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    obs = {"state": torch.randn(256, 1, 3)}
    chunk = obs["state"][..., :2].tanh().repeat(1, 2, 1)
    for _ in range(150):
        loss, info = policy.imitation_loss(obs, chunk, mask=torch.ones(256, 2))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert float(info["mse"]) < 2e-3
    assert float((policy.act(obs, deterministic=True) - chunk).abs().mean()) < 0.2


def test_masks_and_weights_select_steps_and_rows() -> None:
    policy = gaussian(imitation="mse")
    chunk, mask = torch.randn(16, 2, 2), torch.ones(16, 2)
    mask[3, 1], mask[4] = 0, 0
    loss, _ = policy.imitation_loss(OBS, chunk, mask=mask)
    mean, _ = policy.distribution(OBS)
    torch.testing.assert_close(loss[3], (mean - chunk).square()[3, 0].mean())
    assert float(loss[4].detach()) == 0.0
    weighted, _ = policy.imitation_loss(OBS, chunk, torch.arange(16.0), mask=mask)
    torch.testing.assert_close(weighted, loss * torch.arange(16.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"imitation": "nl"}, "Did you mean 'nll'"), ({"action_normalization": "running"}, "cannot be 'running'")],
)
def test_bad_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GaussianConfig(**settings)
