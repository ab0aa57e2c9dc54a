"""Tests of steered policies: noise spaces and their bounds, the frozen base, round trips and refused settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.black_box import CallablePolicy
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentConfig, LatentPolicy, NoiseSpace
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=5, action_horizon=3, obs_horizon=2)
ACTOR = replace(STEERING_ACTOR, hidden=(16,), normalization="identity")
STATE = {"min": [-2.0] * 3, "max": [3.0] * 3, "mean": [0.5] * 3, "std": [1.5] * 3, "count": [50]}
STATISTICS = {"state": STATE, "action": {"min": [-0.5, -3.0], "max": [0.5, 3.0]}}
SPACES = {
    "full": NoiseSpace("full", 0.7),
    "repeat": NoiseSpace("repeat", 0.1),
    "interpolate": NoiseSpace("interpolate", 0.3, steps=3),
    "truncated-zero": NoiseSpace("truncated", 1.5, steps=2),
    "truncated-draw": NoiseSpace("truncated", 0.9, steps=2, rest="draw"),
}
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


def observations(rows: int = 6) -> Observation:
    return {"state": torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(1))}


def flow() -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(hidden=(16, 16)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def spy(seen: list[Tensor]) -> CallablePolicy:
    """Return a black box that records the noise it receives."""

    def function(obs: Observation, noise: Tensor) -> Tensor:
        seen.append(noise.clone())
        return noise.cumsum(1)

    return CallablePolicy.wrap("spy", function, SPEC)


def widened(policy: LatentPolicy) -> LatentPolicy:
    """Scale the actor's weights until its output saturates the bound."""
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.mul_(300.0)
    return policy


@spaces
def test_all_noise_stays_within_the_bound_exactly(space: NoiseSpace) -> None:
    seen: list[Tensor] = []
    policy = widened(LatentPolicy.from_base(spy(seen), space, ACTOR))
    obs, bound = observations(200), torch.tensor(space.bound)
    free = [policy.sample(obs).record["noise"], policy.sample_prior(obs).record["noise"]]
    free += [policy.actor.rsample(obs)[0].detach(), policy.draw(200, None, bound.device)]
    policy.act(obs, deterministic=True)
    assert len(seen) == 3
    for noise in (*free, *seen):
        assert bool((noise.abs() <= bound).all())
    assert all(bool((noise.abs() == bound).any()) for noise in free)  # some noise reaches the bound


def test_interpolated_noise_reaches_beyond_the_bound_where_its_knots_do() -> None:
    space = NoiseSpace("interpolate", bound=1.0, steps=2)
    found = space.expand(torch.tensor([[[0.0], [3.0]]]), 4)
    torch.testing.assert_close(found.flatten(), torch.tensor([0.0, 1.0, 2.0, 3.0]))


@spaces
def test_free_noise_has_the_shape_of_its_space_and_fills_the_chunk(space: NoiseSpace) -> None:
    seen: list[Tensor] = []
    policy = LatentPolicy.from_base(spy(seen), space, ACTOR)
    w = policy.sample(observations()).record["noise"]
    rows = {"full": 5, "repeat": 1, "interpolate": 3, "truncated": 2}[space.kind]
    assert w.shape == (6, rows, 2) and seen[0].shape == (6, 5, 2)
    assert torch.equal(seen[0][:, 0], w[:, 0])
    if space.kind == "repeat":
        assert torch.equal(seen[0], w.expand(-1, 5, -1))
    if space.kind == "interpolate":
        torch.testing.assert_close(seen[0][:, ::2], w)
        torch.testing.assert_close(seen[0][:, 1], (w[:, 0] + w[:, 1]) / 2)
    if space.kind == "truncated":
        assert torch.equal(seen[0][:, :2], w)
        assert bool((seen[0][:, 2:] == 0).all()) == (space.rest == "zero")


def test_the_base_is_called_exactly_once_per_chunk() -> None:
    seen: list[Tensor] = []
    policy = LatentPolicy.from_base(spy(seen), SPACES["full"], ACTOR)
    obs = observations()
    for count, method in enumerate((policy.act, policy.sample, policy.sample_prior), 1):
        method(obs)
        assert len(seen) == count
    policy.decisions(obs, policy.sample(obs).record)
    assert len(seen) == 4  # decisions() does not call the base


@spaces
def test_zero_actor_output_gives_the_base_chunk_at_zero_noise(space: NoiseSpace) -> None:
    if space.rest == "draw":
        space = replace(space, rest="zero")
    base = flow()
    policy = LatentPolicy.from_base(base, space, ACTOR)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.zero_()
    obs = observations()
    expected = base.decode(obs, torch.zeros(6, 5, 2))
    assert torch.equal(policy.act(obs, deterministic=True), expected)


@spaces
def test_vanishing_noise_bound_gives_the_base_chunk_at_zero_noise(space: NoiseSpace) -> None:
    base = flow()
    policy = widened(LatentPolicy.from_base(base, replace(space, bound=1e-7), ACTOR))
    obs = observations()
    for chunk in (policy.act(obs), policy.sample(obs).chunk, policy.sample_prior(obs).chunk):
        torch.testing.assert_close(chunk, base.decode(obs, torch.zeros(6, 5, 2)), atol=1e-5, rtol=0)


@spaces
def test_ratio_of_fresh_noise_is_one(space: NoiseSpace) -> None:
    policy = LatentPolicy.from_base(flow(), space, ACTOR)
    obs = observations(40)
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    index = torch.randperm(40)[:13]
    output = policy.decisions({"state": obs["state"][index]}, {k: v[index] for k, v in sample.record.items()})
    assert float((torch.exp(output.logp.detach() - sample.logp[index]) - 1).abs().max()) < 1e-5


def test_log_probability_is_of_noise_divided_by_the_bound() -> None:
    policy = LatentPolicy.from_base(flow(), NoiseSpace("repeat", 0.5), ACTOR)
    obs = observations()
    sample = policy.sample(obs)
    mean, log_std = policy.actor.distribution(obs)
    gaussian = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(gaussian, torch.distributions.TanhTransform())
    expected = squashed.log_prob(sample.record["noise"] / 0.5).flatten(1).sum(1)
    torch.testing.assert_close(sample.logp[:, 0], expected, atol=1e-3, rtol=1e-3)


def test_the_base_gets_no_gradient_and_does_not_change() -> None:
    base = flow()
    policy = LatentPolicy.from_base(base, SPACES["full"], ACTOR).train()
    assert not policy.base.training and policy.actor.training
    before = {key: value.clone() for key, value in policy.base.state_dict().items()}
    noise = torch.zeros(6, 5, 2, requires_grad=True)
    assert not policy.decode(observations(), noise).requires_grad
    assert not policy.decode_free_noise(observations(), noise).requires_grad
    assert [name for name, p in policy.named_parameters() if p.requires_grad and name.startswith("base")] == []
    policy.update_stats(observations())
    after = policy.base.state_dict()
    assert all(torch.equal(value, after[key]) and value.equal(base.state_dict()[key]) for key, value in before.items())
    assert all(p.requires_grad for p in base.parameters())  # the caller's policy stays trainable


def test_only_the_actor_updates_statistics() -> None:
    base = FlowPolicy(FlowConfig(hidden=(8,), normalization="running"), SPEC)
    base.fit_normalizer(STATISTICS)
    base.update_stats(observations())
    policy = LatentPolicy.from_base(base, SPACES["repeat"], ACTOR)
    assert policy.actor.config.normalization == "running"
    assert torch.equal(policy.actor.encoder.normalizer.scale, base.encoder.normalizer.scale)
    policy.update_stats({"state": 10 + observations()["state"]})
    assert torch.equal(policy.base.state_dict()["encoder.normalizer.scale"], base.encoder.normalizer.scale)
    assert not torch.equal(policy.actor.encoder.normalizer.scale, base.encoder.normalizer.scale)


def test_network_calls_count_base_and_actor() -> None:
    assert LatentPolicy.from_base(flow(), SPACES["full"], ACTOR).nfe == flow().nfe + 1


@spaces
def test_rows_do_not_depend_on_their_neighbours(space: NoiseSpace) -> None:
    policy = LatentPolicy.from_base(flow(), space, ACTOR)
    obs = observations()
    whole = policy.act(obs, generator=PerRowGenerator(range(6), [2] * 6))
    some = policy.act({"state": obs["state"][[4, 1]]}, generator=PerRowGenerator([4, 1], [2, 2]))
    torch.testing.assert_close(some, whole[[4, 1]], atol=1e-5, rtol=1e-5)


def diffusion() -> DiffusionPolicy:
    policy = DiffusionPolicy(DiffusionConfig(hidden=(16, 16)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


@spaces
@pytest.mark.parametrize("make", [flow, diffusion])
def test_a_checkpoint_of_a_steered_policy_round_trips(
    space: NoiseSpace, make: Callable[[], Policy], tmp_path: Path
) -> None:
    policy = LatentPolicy.from_base(make(), space, ACTOR)
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=observations())
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, manifest = load_policy(tmp_path / "c")
    assert isinstance(loaded, LatentPolicy) and loaded.config.space == space
    assert manifest.network_calls == policy.nfe
    assert not any(p.requires_grad for p in loaded.base.parameters())
    chunks = [p.act(observations(), generator=torch.Generator().manual_seed(3)) for p in (policy, loaded)]
    assert torch.equal(*chunks)


def test_steered_black_box_checkpoint_requires_its_function_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = LatentPolicy.from_base(spy([]), SPACES["repeat"], ACTOR)
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=observations())
    assert verify_checkpoint(tmp_path / "c").ok
    monkeypatch.setattr("robopolicy.policies.wrappers.black_box.PROVIDED", {})
    with pytest.raises(
        UserError, match=r"function 'spy', which a checkpoint cannot contain; pass it with .*register_callable"
    ):
        load_policy(tmp_path / "c")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoiseSpace("fulll"), "Did you mean 'full'"),
        (lambda: NoiseSpace(rest="zeros"), "Did you mean 'zero'"),
        (lambda: NoiseSpace(bound=-1.0), "bound must not be negative"),
        (lambda: NoiseSpace("interpolate", steps=1), "A noise space that interpolates needs steps >= 2"),
        (lambda: LatentConfig(space=NoiseSpace(bound=0.0)), "actor.squash=false"),
        (lambda: LatentPolicy.from_base(flow(), NoiseSpace("truncated", steps=6), ACTOR), "lower space.steps"),
        (lambda: LatentPolicy.from_base(GaussianPolicy(GaussianConfig(), SPEC), NoiseSpace(), ACTOR), "takes none"),
        (lambda: LatentPolicy(LatentConfig(), SPEC), "build the wrapper from a checkpoint"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)
