"""Tests of action tokens: bins, causality, exact probabilities, the policy gradient by enumeration, imitation."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.density import sample_category
from robopolicy.policies.heads.autoregressive import AutoregressiveConfig, AutoregressivePolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=3, action_horizon=2, obs_horizon=2)
OBS = {"state": torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(0))}
RAW = {"normalization": "identity", "action_normalization": "identity"}


def tokens(spec: PolicySpec = SPEC, **config: object) -> AutoregressivePolicy:
    torch.manual_seed(0)
    small = {"bins": 8, "transformer_width": 16, "transformer_layers": 2, "transformer_heads": 2}
    policy = AutoregressivePolicy(AutoregressiveConfig(**(RAW | small | config)), spec)  # type: ignore[arg-type]
    with torch.no_grad():
        policy.output.weight.mul_(10)  # far from uniform
    return policy


def test_constant_actions_have_one_scale_on_all_devices() -> None:
    policy = tokens(action_normalization="minmax")
    low, high = torch.tensor([-1.0, 0.5]), torch.tensor([1.0, 0.5])
    policy.fit_normalizer({"action": {"min": low, "max": high}})
    normalizer = policy.action_normalizer
    assert normalizer.scale[1] < normalizer.scale[0]
    torch.testing.assert_close(normalizer.variance, normalizer.scale.square(), msg="a device divides by its root")


@pytest.mark.parametrize("bins", [2, 3, 128, 256])
def test_tokenisation_error_is_at_most_half_a_bin(bins: int) -> None:
    policy = tokens(bins=bins)
    action = torch.cat([torch.linspace(-1, 1, 6 * 1000), torch.randn(6 * 1000).clamp(-1, 1)]).view(-1, 3, 2)
    coded = policy.encode_actions(action)
    assert coded.shape == (2000, 6) and int(coded.min()) == 0 and int(coded.max()) == bins - 1
    assert float((policy.decode_actions(coded) - action).abs().max()) <= 1 / bins + 1e-6
    assert torch.equal(policy.encode_actions(policy.decode_actions(coded)), coded)


def test_actions_out_of_range_map_to_the_outermost_bins() -> None:
    policy = tokens()
    assert policy.encode_actions(torch.tensor([-7.0, 7.0, -1.0, 1.0, -0.999, 0.999]).view(1, 3, 2)).tolist() == [
        [0, 7, 0, 7, 0, 7]
    ]


def test_bins_cover_the_range_of_the_action() -> None:
    policy = tokens(action_normalization="minmax", bins=4)
    policy.fit_normalizer({"action": {"min": [-2.0, 10.0], "max": [2.0, 30.0]}})
    chunk = torch.cat([policy.act(OBS) for _ in range(50)]).flatten(0, 1)
    assert sorted(set(chunk[:, 0].tolist())) == [-1.5, -0.5, 0.5, 1.5]
    assert sorted(set(chunk[:, 1].tolist())) == [12.5, 17.5, 22.5, 27.5]


def test_constant_action_dimension_is_reproduced() -> None:
    bounds = {"min": [-2.0, 0.04], "max": [2.0, 0.04]}
    policy = tokens(action_normalization="minmax")
    policy.fit_normalizer({"action": bounds})
    assert float((policy.act(OBS)[..., 1] - 0.04).abs().max()) <= 1e-4
    policy.fit_normalizer({"action": bounds | {"declared": True}})
    assert policy.action_normalizer.scale.tolist() == [2.0, 1.0]


def test_tokens_depend_only_on_earlier_tokens_and_observations() -> None:
    policy = tokens()
    sampled = torch.randint(0, 8, (16, 6))
    features = policy.encoder(OBS)
    log_probs = policy.log_probs(features, sampled)
    for index in range(6):
        other = sampled.clone()
        other[:, index] = (other[:, index] + 1) % 8
        changed = (policy.log_probs(features, other) - log_probs).abs().amax((0, 2)) > 1e-6
        assert changed.tolist() == [later > index for later in range(6)]
    for step in range(2):
        seen = features.clone()
        seen[:, step] += 1
        assert bool(((policy.log_probs(seen, sampled) - log_probs).abs().amax((0, 2)) > 1e-6).all())


def test_chunk_probabilities_sum_to_one_and_match_the_entropy() -> None:
    policy = tokens(PolicySpec({"state": (1,)}, 3), bins=3)
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))
    obs = {"state": torch.full((27, 1, 1), 0.3)}
    output = policy.decisions(obs, {"tokens": every})
    probability = output.logp.detach().sum(1).exp()
    assert float(probability.sum()) == pytest.approx(1.0, abs=1e-5)
    exact = -(probability * probability.log()).sum()  # chain rule: expected sum of the conditional entropies
    assert float((probability * output.entropy.detach().sum(1)).sum()) == pytest.approx(float(exact), abs=1e-5)


def test_sampling_frequencies_equal_the_probabilities() -> None:
    policy = tokens(PolicySpec({"state": (1,)}, 2), bins=3)
    obs = {"state": torch.full((50_000, 1, 1), 0.3)}
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    every = torch.tensor(list(itertools.product(range(3), repeat=2)))
    exact = policy.decisions({"state": obs["state"][:9]}, {"tokens": every}).logp.detach().sum(1).exp()
    found = torch.bincount(sample.record["tokens"] @ torch.tensor([3, 1]), minlength=9) / 50_000
    assert bool(((found - exact).abs() < 4 * (exact * (1 - exact) / 50_000).sqrt()).all())


def test_sample_category_inverts_the_distribution_function() -> None:
    log_weight = torch.tensor([0.2, 0.5, 0.3]).log().expand(6, 3)
    assert sample_category(log_weight, torch.tensor([1e-7, 0.19, 0.21, 0.69, 0.71, 1 - 1e-7])).tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_deterministic_chunk_uses_the_most_likely_tokens() -> None:
    policy = tokens()
    sampled = policy.encode_actions(policy.act(OBS, deterministic=True))
    assert torch.equal(policy.log_probs(policy.encoder(OBS), sampled).argmax(-1), sampled)


def test_the_policy_gradient_of_a_two_mode_bandit_matches_its_closed_form() -> None:
    policy = tokens(PolicySpec({"state": (1,)}, 2), bins=3)
    every = torch.tensor(list(itertools.product(range(3), repeat=2)))  # all 9 chunks
    reward = torch.zeros(9)
    reward[2], reward[6], reward[4] = 1.0, 0.8, -0.5  # (low, high) or (high, low), not the middle
    logps = policy.decisions({"state": torch.zeros(9, 1, 1)}, {"tokens": every}).logp.sum(1)
    bias, count = policy.output.bias, 40_000
    exact = torch.autograd.grad((logps.exp() * reward).sum(), bias, retain_graph=True)[0]
    scores = torch.stack([torch.autograd.grad(logp, bias, retain_graph=True)[0] for logp in logps])  # (9, bins)

    obs = {"state": torch.zeros(count, 1, 1)}
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    index = sample.record["tokens"] @ torch.tensor([3, 1])
    logp = policy.decisions(obs, sample.record).logp.sum(1)
    found = torch.autograd.grad((reward[index] * logp).mean(), bias)[0]
    error = (reward[index, None] * scores[index]).std(0) / math.sqrt(count)
    assert bool(((found - exact).abs() < 3 * error).all()) and bool((exact.abs() > 6 * error).any())


def test_imitation_covers_both_modes_with_consistent_chunks() -> None:
    policy = tokens(PolicySpec({"state": (1,)}, 1, horizon=2, action_horizon=2), bins=32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    obs, generator = {"state": torch.zeros(128, 1, 1)}, torch.Generator().manual_seed(0)
    for _ in range(150):
        side = torch.randint(0, 2, (128, 1, 1), generator=generator) * 1.4 - 0.7
        chunk = side + 0.05 * torch.randn(128, 2, 1, generator=generator)
        loss, _ = policy.imitation_loss(obs, chunk)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    chunk = policy.act({"state": torch.zeros(4000, 1, 1)}, generator=generator).squeeze(-1)
    near = (chunk.abs() - 0.7).abs().amax(1) < 0.3
    consistent = chunk[:, 0].sign() == chunk[:, 1].sign()
    shares = [float((near & consistent & (chunk[:, 0] * sign > 0)).float().mean()) for sign in (-1, 1)]
    assert min(shares) > 0.4 and sum(shares) > 0.95


def test_imitation_loss_is_the_cross_entropy_summed_over_action_dimensions() -> None:
    policy = tokens()
    chunk = torch.rand(16, 3, 2) * 2 - 1
    logp = policy.decisions(OBS, {"tokens": policy.encode_actions(chunk)}).logp  # (B, T)
    loss, info = policy.imitation_loss(OBS, chunk)
    torch.testing.assert_close(loss, -logp.sum(1) / 3)
    assert 0 <= float(info["accuracy"]) <= 1
    torch.testing.assert_close(policy.imitation_loss(OBS, chunk, torch.full((16,), 2.0))[0], 2 * loss)


def test_padded_steps_do_not_affect_loss_or_gradient() -> None:
    policy = tokens()
    chunk, mask = torch.rand(16, 3, 2) * 2 - 1, torch.ones(16, 3)
    mask[:4, 1:], mask[4] = 0, 0
    other = chunk.clone()
    other[:4, 1:], other[4] = 0.9, -0.9

    def results(target: Tensor) -> list[Tensor]:
        loss, _ = policy.imitation_loss(OBS, target, mask=mask)
        return [loss, *torch.autograd.grad(loss.sum(), list(policy.parameters()))]

    assert all(torch.equal(first, second) for first, second in zip(results(chunk), results(other), strict=True))
    assert float(results(chunk)[0][4].detach()) == 0


def test_nan_inputs_yield_nan_outputs() -> None:
    policy = tokens()
    chunk = torch.zeros(16, 3, 2)
    chunk[5, 1, 0] = float("nan")
    assert policy.imitation_loss(OBS, chunk)[0].isnan().nonzero().flatten().tolist() == [5]
    obs = {"state": OBS["state"].clone()}
    obs["state"][3] = float("nan")
    for deterministic in (True, False):
        acted = policy.act(obs, deterministic=deterministic)
        assert acted.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [3]


def test_ppo_trains_tokens_with_initial_ratios_of_one() -> None:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=8, reward="shaped"))
    policy = tokens(PolicySpec({"state": (6,)}, 2, horizon=2, action_horizon=2), action_normalization="minmax")
    policy.fit_normalizer({"action": {"min": [-1.0, -1.0], "max": [1.0, 1.0]}})
    algorithm = PPO(PPOConfig(num_steps=8, epochs=1, batch_size=64), policy, total_updates=2)
    sampler = RolloutSampler(ChunkedSim(sim, action_horizon=2, obs_horizon=1, gamma=0.99), decisions=8, seed=0)
    before = policy.output.weight.detach().clone()
    rollout = sampler.collect(algorithm.act)
    assert rollout.logp.shape == (8, 8, 4) and not rollout.record["tokens"].is_floating_point()
    assert algorithm.update(rollout)["actor/approx_kl"] == pytest.approx(0.0, abs=1e-8)  # one epoch, one minibatch
    assert not torch.equal(before, policy.output.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_normalization": "meanstd"}, "Bins cover"),
        ({"action_normalization": "running"}, "cannot be 'running'"),
        ({"transformer_width": 10, "transformer_heads": 4}, "multiple of the number of heads"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokens(**settings)
