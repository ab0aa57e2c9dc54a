"""Tests of the mixture head against torch.distributions and closed forms: densities, router and modes."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.mixture import MixtureConfig, MixturePolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=2, action_horizon=2)
ONE = PolicySpec({"state": (1,)}, 1)
OBS = {"state": torch.randn(16, 1, 3, generator=torch.Generator().manual_seed(0))}
RAW = {"normalization": "identity", "action_normalization": "identity"}


def mixture(spec: PolicySpec = SPEC, **config: object) -> MixturePolicy:
    torch.manual_seed(0)
    settings = RAW | {"hidden": (16,), "experts": 3, "orthogonal_init": False} | config
    return MixturePolicy(MixtureConfig(**settings), spec)  # type: ignore[arg-type]


def bandit(*, means: list[float], weights: list[float], stds: list[float], squash: bool = False) -> MixturePolicy:
    """Return a one-action mixture whose outputs are biases only, because the state is zero."""
    policy = mixture(ONE, hidden=(), experts=len(means), state_dependent_std=False, squash=squash, orthogonal_init=True)
    with torch.no_grad():
        policy.centres.copy_(torch.tensor(means)[:, None, None])
        policy.router[-1].bias.copy_(torch.tensor(weights).log())  # type: ignore[operator,union-attr]
        policy.log_std.copy_(torch.tensor(stds).log()[:, None, None])
    return policy


def zeros(count: int) -> dict[str, Tensor]:
    return {"state": torch.zeros(count, 1, 1)}


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_log_probabilities_equal_the_torch_mixture_distribution(state_dependent_std: bool) -> None:
    policy = mixture(state_dependent_std=state_dependent_std)
    sample = policy.sample(OBS)
    experts = policy.experts(policy.encoder(OBS))
    parts = Independent(Normal(experts.mean.flatten(2), experts.log_std.exp().flatten(2)), 1)
    expected = MixtureSameFamily(Categorical(logits=experts.log_weight), parts)
    torch.testing.assert_close(sample.logp[:, 0], expected.log_prob(sample.chunk.flatten(1)))


def test_the_squashed_density_integrates_to_one() -> None:
    policy = bandit(means=[-0.6, 0.9], weights=[0.3, 0.7], stds=[0.4, 0.2], squash=True)
    edges = torch.linspace(-0.9999, 0.9999, 20_001)
    record = {"raw": edges.atanh()[:, None, None], "noise": torch.zeros(20_001, 2, 1, 1)}
    density = policy.decisions(zeros(20_001), record).logp.detach().exp().flatten()
    assert float(torch.trapezoid(density, edges)) == pytest.approx(1.0, abs=2e-3)


def test_one_expert_is_a_gaussian() -> None:
    policy = mixture(ONE, experts=1, hidden=(), state_dependent_std=False)
    gaussian = GaussianPolicy(GaussianConfig(hidden=(), **RAW), ONE)  # type: ignore[arg-type]
    with torch.no_grad():
        gaussian.actor[-1].weight.copy_(policy.actor[-1].weight)  # type: ignore[index,union-attr,operator]
        gaussian.actor[-1].bias.copy_(policy.actor[-1].bias + policy.centres.flatten())  # type: ignore[index,union-attr,operator]
        gaussian.log_std.copy_(policy.log_std[0])
    obs = {"state": torch.randn(20_000, 1, 1)}
    sample = policy.sample(obs)
    torch.testing.assert_close(gaussian.decisions(obs, sample.record).logp, sample.logp)
    entropies = [head.decisions(obs, sample.record).entropy.detach().mean() for head in (policy, gaussian)]
    assert float(entropies[0]) == pytest.approx(float(entropies[1]), abs=0.02)


@pytest.mark.parametrize("squash", [False, True])
def test_the_entropy_estimate_is_unbiased_and_so_is_its_gradient(squash: bool) -> None:
    policy = bandit(means=[-0.7, 0.5], weights=[0.3, 0.7], stds=[0.3, 0.6], squash=squash)
    count = 100_000
    obs = zeros(count)
    estimate = policy.decisions(obs, policy.sample(obs, generator=torch.Generator().manual_seed(0)).record).entropy
    assert estimate.shape == (count, 1)

    grid = torch.linspace(-9, 9, 20_001)[:, None, None]
    slope = 2 * (math.log(2) - grid - torch.nn.functional.softplus(-2 * grid)).flatten()
    logp = policy.experts(policy.encoder(zeros(len(grid)))).logp(grid)
    step = float(grid[1] - grid[0])
    exact = (logp.exp() * ((slope if squash else 0) - logp)).sum() * step
    assert float(estimate.detach().mean()) == pytest.approx(float(exact.detach()), abs=0.01)
    parameters = [policy.router[-1].bias, policy.centres, policy.log_std]
    for found, right in zip(
        torch.autograd.grad(estimate.mean(), parameters),  # type: ignore[arg-type]
        torch.autograd.grad(exact, parameters),  # type: ignore[arg-type]
        strict=True,
    ):
        torch.testing.assert_close(found, right, atol=0.01, rtol=0)


def test_the_policy_gradient_of_a_two_mode_bandit_matches_its_closed_form() -> None:
    # The expectation of the reward -(a^2 - 1)^2 under an expert is a polynomial of its mean and std.
    means, weights, stds, count = [-0.8, 0.5], [0.4, 0.6], [0.3, 0.5], 50_000
    policy = bandit(means=means, weights=weights, stds=stds)
    obs = zeros(count)
    sample = policy.sample(obs)
    action = sample.chunk.flatten()
    reward = -(action.square() - 1).square()
    logp = policy.decisions(obs, sample.record).logp[:, 0]
    parameters = [policy.router[-1].bias, policy.centres, policy.log_std]
    found = torch.autograd.grad((reward * logp).mean(), parameters)  # type: ignore[arg-type]

    logit, mean, log_std = (torch.tensor(x, requires_grad=True) for x in (weights, means, stds))
    logit, log_std = logit.log().detach().requires_grad_(), log_std.log().detach().requires_grad_()
    variance = (2 * log_std).exp()
    fourth = mean**4 + 6 * mean.square() * variance + 3 * variance.square()
    exact = (logit.softmax(0) * -(fourth - 2 * (mean.square() + variance) + 1)).sum()
    right = torch.autograd.grad(exact, [logit, mean, log_std])

    z = (action[:, None] - torch.tensor(means)) / torch.tensor(stds)  # (N, M)
    density = torch.tensor(weights) * (-z.square() / 2).exp() / torch.tensor(stds)
    share = density / density.sum(1, keepdim=True)
    scores = (share - torch.tensor(weights), share * z / torch.tensor(stds), share * (z.square() - 1))
    for gradient, expected, score in zip(found, right, scores, strict=True):
        error = (reward[:, None] * score).std(0) / math.sqrt(count)
        torch.testing.assert_close(gradient.flatten(), (reward[:, None] * score).mean(0), atol=1e-4, rtol=1e-3)
        assert bool(((gradient.flatten() - expected).abs() < 3 * error).all())


def test_samples_follow_router_and_experts() -> None:
    policy = bandit(means=[-5.0, 0.0, 5.0], weights=[0.2, 0.5, 0.3], stds=[0.5, 0.1, 0.2])
    action = policy.act(zeros(40_000), generator=torch.Generator().manual_seed(0)).flatten()
    nearest = (action / 5).round().long() + 1
    for m, (weight, std) in enumerate([(0.2, 0.5), (0.5, 0.1), (0.3, 0.2)]):
        selected = action[nearest == m]
        assert len(selected) / 40_000 == pytest.approx(weight, abs=0.01)
        assert float(selected.std()) == pytest.approx(std, rel=0.03)


def test_the_deterministic_chunk_is_the_mean_of_the_most_likely_expert() -> None:
    policy = mixture(squash=True)
    experts = policy.experts(policy.encoder(OBS))
    expected = torch.stack([experts.mean[b, m] for b, m in enumerate(experts.log_weight.argmax(1))]).tanh()
    assert torch.equal(policy.act(OBS, deterministic=True), expected.detach())


def imitate(policy: MixturePolicy | GaussianPolicy) -> None:
    """Train on chunks with two modes, +0.7 or -0.7, the same at both steps."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        side = torch.randint(0, 2, (128, 1, 1), generator=generator) * 1.4 - 0.7
        chunk = side + 0.05 * torch.randn(128, 2, 1, generator=generator)
        loss, _ = policy.imitation_loss(zeros(128), chunk)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()


def test_imitation_covers_both_modes_where_a_gaussian_averages_them() -> None:
    spec = PolicySpec({"state": (1,)}, 1, horizon=2, action_horizon=2)
    policy = mixture(spec, experts=4, hidden=())
    gaussian = GaussianPolicy(GaussianConfig(hidden=(), **RAW), spec)  # type: ignore[arg-type]
    shares = []
    for head in (policy, gaussian):
        imitate(head)
        chunk = head.act(zeros(4000), generator=torch.Generator().manual_seed(0)).squeeze(-1)  # (B, H)
        near = (chunk.abs() - 0.7).abs().amax(1) < 0.3
        together = chunk[:, 0].sign() == chunk[:, 1].sign()  # one mode for the whole chunk
        shares.append([float((near & together & (chunk[:, 0] * sign > 0)).float().mean()) for sign in (-1, 1)])
    assert min(shares[0]) > 0.4 and sum(shares[0]) > 0.95
    assert sum(shares[1]) < 0.3
    best = policy.act(zeros(1), deterministic=True).flatten()
    torch.testing.assert_close(best.abs(), torch.full((2,), 0.7), atol=0.1, rtol=0)


@pytest.mark.parametrize("squash", [False, True])
def test_padded_steps_are_integrated_out(squash: bool) -> None:
    policy = mixture(squash=squash)
    chunk, mask = torch.rand(16, 2, 2) - 0.5, torch.ones(16, 2)
    mask[:4, 1], mask[4] = 0, 0
    other = chunk.clone()
    other[:4, 1], other[4] = 0.9, -0.9
    results = []
    for target in (chunk, other):
        loss, _ = policy.imitation_loss(OBS, target, mask=mask)
        results.append((loss, *torch.autograd.grad(loss.sum(), list(policy.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert float(results[0][0][4].detach()) == 0
    empty = policy.imitation_loss(OBS, chunk, mask=torch.zeros(16, 2))[0].sum()
    assert not any(bool(g.any()) for g in torch.autograd.grad(empty, list(policy.parameters())))
    full = policy.imitation_loss(OBS, chunk, mask=torch.ones(16, 2))[0]
    torch.testing.assert_close(full, policy.imitation_loss(OBS, chunk)[0])
    torch.testing.assert_close(policy.imitation_loss(OBS, chunk, torch.full((16,), 2.0))[0], 2 * full)


def test_the_imitation_loss_is_the_negative_log_likelihood_per_dimension() -> None:
    policy = mixture()
    chunk = torch.randn(16, 2, 2)
    record = {"raw": chunk, "noise": torch.zeros(16, 3, 2, 2)}
    loss, info = policy.imitation_loss(OBS, chunk)
    torch.testing.assert_close(loss, -policy.decisions(OBS, record).logp[:, 0] / 4)
    assert 0 < float(info["router_entropy"]) <= math.log(3) + 1e-6


def test_experts_start_apart_and_predicted_stds_are_bounded() -> None:
    policy = mixture(mean_spread=0.5, experts=64, state_dependent_std=True, log_std_min=-2.0, log_std_max=0.5)
    assert float(policy.centres.abs().max().detach()) <= 0.5 and float(policy.centres.std().detach()) > 0.2
    for value, bound in ((1e3, 0.5), (-1e3, -2.0)):
        torch.nn.init.constant_(policy.actor[-1].bias, value)  # type: ignore[index,arg-type]
        log_std = policy.experts(policy.encoder(OBS)).log_std.detach()
        assert bool((log_std == bound).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"action_normalization": "running"}, "cannot be 'running'"), ({"backbone": "unett"}, "Did you mean 'unet'")],
)
def test_bad_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MixtureConfig(**settings)


def test_ppo_updates_the_mixture_router_and_starts_at_zero_kl() -> None:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=8, reward="shaped"))
    spec = PolicySpec({"state": (6,)}, 2, horizon=2, action_horizon=2)
    policy = MixturePolicy(MixtureConfig(hidden=(16,), experts=2), spec)
    policy.fit_normalizer({"action": {"min": [-1.0, -1.0], "max": [1.0, 1.0]}})
    algorithm = PPO(PPOConfig(num_steps=8, epochs=1, batch_size=64, entropy_coef=0.01), policy, total_updates=2)
    sampler = RolloutSampler(ChunkedSim(sim, action_horizon=2, obs_horizon=1, gamma=0.99), decisions=8, seed=0)
    before = copy.deepcopy(policy.state_dict())
    metrics = algorithm.update(sampler.collect(algorithm.act))
    assert metrics["actor/approx_kl"] == pytest.approx(0.0, abs=1e-8)  # one epoch, one minibatch
    assert all(not torch.equal(before[key], policy.state_dict()[key]) for key in before if "router" in key)
