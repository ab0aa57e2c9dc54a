"""Tests of best-of-N, optimised and edited policies: their limits, and values never below the base."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import PerRowGenerator, repeated
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.policies.wrappers.action_optimized import (
    ActionOptimizedConfig,
    ActionOptimizedPolicy,
    ascend,
    make_action_optimized,
)
from robopolicy.policies.wrappers.best_of_n import BestOfNConfig, BestOfNPolicy, Candidates, draw_index, make_best_of_n
from robopolicy.policies.wrappers.residual_edit import (
    EditConfig,
    EditNet,
    ResidualEditConfig,
    ResidualEditPolicy,
    make_residual_edit,
)
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2)
STATE = {"min": [-2.0] * 3, "max": [2.0] * 3, "mean": [0.0] * 3, "std": [1.0] * 3, "count": [10]}
ACTION = {"min": [-0.5, -3.0], "max": [0.5, 1.0], "mean": [0.0, -1.0], "std": [0.2, 1.0]}
SCALE = torch.tensor([0.5, 2.0])  # action units per normalised unit


def flow(**config: Any) -> FlowPolicy:
    policy = FlowPolicy(FlowConfig(**{"hidden": (16, 16), "steps": 2} | config), SPEC)
    policy.fit_normalizer({"state": STATE, "action": ACTION})
    return policy


def gaussian() -> GaussianPolicy:
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), squash=True, action_normalization="minmax"), SPEC)
    policy.fit_normalizer({"state": STATE, "action": ACTION})
    return policy


def critic_of(policy: Policy, **config: Any) -> QEnsemble:
    return QEnsemble(CriticConfig(**{"members": 3, "hidden": (16, 16)} | config), policy)


SAMPLED = ("flow", "diffusion", "edm", "consistency", "autoregressive", "gaussian", "mixture")
SMALL = {"hidden": (16, 16), "transformer_width": 16, "transformer_layers": 1}


@pytest.mark.parametrize("name", SAMPLED)
def test_candidates_equal_samples_of_act_and_observations_are_encoded_once(name: str) -> None:
    torch.manual_seed(0)
    config_class = POLICIES[name].config_class
    settings = {key: value for key, value in SMALL.items() if key in {field.name for field in fields(config_class)}}
    policy: Any = make_policy(name, config_class(**settings), SPEC)
    policy.fit_normalizer({"state": STATE, "action": ACTION})
    obs, encoded = {"state": torch.randn(4, 1, 3)}, []
    rows = {"state": obs["state"].repeat_interleave(5, 0)}
    separate = policy.act(rows, generator=repeated(PerRowGenerator(range(4), [7] * 4), 5)).unflatten(0, (4, 5))
    policy.encoder.register_forward_pre_hook(lambda _, inputs: encoded.append(len(inputs[0]["state"])))
    found = policy.sample_many(obs, 5, generator=PerRowGenerator(range(4), [7] * 4))
    assert found.shape == (4, 5, 4, 2) and torch.allclose(found, separate, atol=1e-5)
    assert encoded == [4]
    assert not found.requires_grad


class Analytic(QEnsemble):
    """A critic with a known value of the executed actions, in action units."""

    def __init__(self, policy: Policy, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(CriticConfig(members=1, hidden=()), policy)
        self.function = function

    def output(self, features: Tensor, chunk: Tensor) -> Tensor:
        """Return values `(1, B, 1)` of chunks `(B, n, A)`."""
        return self.function(chunk[:, : self.steps])[None, :, None]


class TwoModes(FlowPolicy):
    """A policy that samples +-0.4 in the first action dimension with equal probability."""

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Any = None) -> Tensor:
        """Return chunks that are zero except in the first dimension."""
        noise = self.draw_noise(len(obs["state"]), generator, torch.device("cpu"))
        chunk = torch.zeros_like(noise)
        chunk[..., 0] = 0.4 * noise[:, :1, 0].sign()
        return chunk


def observations(rows: int) -> Observation:
    return {"state": torch.randn(rows, 1, 3)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wrappers(base: Policy, critic: QEnsemble) -> dict[str, BestOfNPolicy]:
    edit = EditNet(EditConfig(hidden=(16,)), base)
    return {
        "selected": make_best_of_n(base, critic, candidates=5),
        "softmax": make_best_of_n(base, critic, candidates=5, selection="softmax", temperature=0.1),
        "optimized": make_action_optimized(base, critic, candidates=5, top=3, ascent_steps=2, ascent_rate=0.1),
        "edited": make_residual_edit(base, edit, critic, candidates=3, edits=2),
    }


KINDS = ("selected", "softmax", "optimized", "edited")
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("kind", ["selected", "optimized", "edited"])
def test_candidates_of_a_policy_that_starts_from_zero_noise_differ(kind: str) -> None:
    base, obs = flow(), observations(4)
    critic, zero = critic_of(base), ZeroNoisePolicy.wrap(base)
    chunks = wrappers(zero, critic)[kind].samples(obs, generator=seeded())
    assert chunks.flatten(2).std(1).sum(1).min() > 0
    assert torch.equal(chunks, wrappers(base, critic)[kind].samples(obs, generator=seeded()))
    single = make_best_of_n(zero, critic, candidates=1)
    assert torch.equal(single.act(obs), base.decode(obs, torch.zeros(4, 4, 2)))


@pytest.mark.parametrize("make", [flow, gaussian])
@pytest.mark.parametrize("deterministic", [True, False])
def test_policy_with_one_candidate_acts_like_the_base_policy(make: Callable[[], Policy], deterministic: bool) -> None:
    base, obs = make(), observations(6)
    critic, edit = critic_of(base), EditNet(EditConfig(), base)
    expected = base.act(obs, deterministic=deterministic, generator=seeded())
    for policy in (
        make_best_of_n(base, critic, candidates=1),
        make_action_optimized(base, critic, candidates=1, top=1, ascent_steps=0),
        make_residual_edit(base, edit, critic, candidates=1, edits=0),
    ):
        assert torch.equal(policy.act(obs, deterministic=deterministic, generator=seeded()), expected)


def test_the_best_candidate_is_executed() -> None:
    base, obs = flow(), observations(7)
    policy = make_best_of_n(base, critic_of(base), candidates=16)
    found = policy.propose(obs, generator=seeded())
    assert found.chunks.shape == (7, 16, 4, 2) and found.values.shape == (7, 16)
    rows = {key: value.repeat_interleave(16, 0) for key, value in obs.items()}
    assert torch.equal(found.chunks.flatten(0, 1), base.act(rows, generator=seeded()))
    for row in range(7):  # each candidate is evaluated at its own observation
        alone = policy.critic({"state": obs["state"][row : row + 1].expand(16, 1, 3)}, found.chunks[row]).mean(0)
        torch.testing.assert_close(found.values[row], alone, atol=1e-5, rtol=1e-5)
    chosen = policy.act(obs, generator=seeded())
    torch.testing.assert_close(policy.score(obs, chosen[:, None])[:, 0], found.values.max(1).values)


def test_best_of_n_finds_the_better_mode() -> None:
    base = TwoModes(FlowConfig(hidden=(4,)), SPEC)
    base.fit_normalizer({"state": STATE, "action": ACTION})
    policy = make_best_of_n(base, Analytic(base, lambda chunk: chunk[:, 0, 0]), candidates=10)
    assert 0.3 < float((base.act(observations(400), generator=seeded())[:, 0, 0] > 0).float().mean()) < 0.7
    assert bool((policy.act(observations(200), generator=seeded())[:, 0, 0] > 0).float().mean() > 0.98)


def test_softmax_selection_samples_in_proportion_and_is_greedy_when_deterministic() -> None:
    values = torch.tensor([[0.0, 1.0, -1.0]]).expand(20_000, 3)
    counts = torch.bincount(draw_index(values, 2.0, seeded()), minlength=3) / 20_000
    torch.testing.assert_close(counts, (values[0] / 2).softmax(0), atol=0.02, rtol=0)
    base = flow()
    policy = make_best_of_n(base, critic_of(base), candidates=4, selection="softmax", temperature=100.0)
    assert policy.choose(values[:5], deterministic=True).tolist() == [1] * 5
    assert len(set(policy.choose(values[:200], generator=seeded()).tolist())) == 3


def test_the_ensemble_is_reduced_as_configured() -> None:
    base, obs = flow(), observations(4)
    critic = critic_of(base)
    chunks = torch.randn(4, 6, 4, 2)
    values = critic.candidate_values(obs, chunks)
    torch.testing.assert_close(make_best_of_n(base, critic).score(obs, chunks), values.mean(0))
    torch.testing.assert_close(make_best_of_n(base, critic, reduction="min").score(obs, chunks), values.min(0).values)


@kinds
def test_rows_do_not_depend_on_their_neighbours(kind: str) -> None:
    base = flow()
    policy = wrappers(base, critic_of(base))[kind]
    obs = observations(6)
    whole = policy.act(obs, generator=PerRowGenerator(range(10, 16), [3] * 6))
    rows = torch.tensor([4, 1])
    some = policy.act({"state": obs["state"][rows]}, generator=PerRowGenerator([14, 11], [3, 3]))
    torch.testing.assert_close(some, whole[rows], atol=1e-5, rtol=1e-5)


@kinds
def test_acting_leaves_no_graph_and_works_in_inference_mode(kind: str) -> None:
    base = flow()
    critic = critic_of(base)
    policy, obs = wrappers(base, critic)[kind], observations(5)
    plain = policy.act(obs, generator=seeded())
    with torch.inference_mode():
        torch.testing.assert_close(policy.act({"state": obs["state"].clone()}, generator=seeded()), plain)
    assert not plain.requires_grad and all(p.grad is None for p in policy.parameters())
    sample = policy.sample(obs, generator=seeded())
    assert torch.equal(sample.chunk, plain) and sample.logp.shape == (5, 0)


@kinds
@pytest.mark.parametrize("make", [flow, gaussian])
def test_checkpoints_round_trip(kind: str, make: Callable[[], Policy], tmp_path: Path) -> None:
    base, obs = make(), observations(6)
    base.update_stats(obs)
    critic = critic_of(base, bins=5, value_min=0.0, value_max=1.0)
    policy = wrappers(base, critic)[kind]
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=obs)
    loaded, manifest = load_policy(tmp_path / "c")
    assert type(loaded) is type(policy) and loaded.spec == SPEC
    assert manifest.network_calls == policy.nfe
    for deterministic in (True, False):
        chunks = [p.act(obs, deterministic=deterministic, generator=seeded()) for p in (policy, loaded)]
        assert torch.equal(chunks[0], chunks[1])
    assert verify_checkpoint(tmp_path / "c").ok


def test_network_calls_are_counted() -> None:
    base = flow(steps=3)
    critic = critic_of(base)
    edit = EditNet(EditConfig(), base)
    assert make_best_of_n(base, critic, candidates=4).nfe == 4 * 3 + 4
    optimized = make_action_optimized(base, critic, candidates=4, top=2, ascent_steps=5)
    assert optimized.nfe == 4 * 3 + 4 + 2 * (5 + 1)
    assert make_residual_edit(base, edit, critic, candidates=4, edits=2).nfe == 4 * 3 + 4 + 2 * 2


def test_imitation_loss_equals_the_base_loss() -> None:
    base, obs = flow(), observations(5)
    chunk, mask = torch.randn(5, 4, 2), torch.ones(5, 4)
    losses = [
        p.imitation_loss(obs, chunk, mask=mask, generator=seeded())[0]
        for p in (base, make_best_of_n(base, critic_of(base)))
    ]
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("rate", [1e-3, 0.3, 1e3])
@pytest.mark.parametrize("reduction", ["mean", "min"])
def test_optimised_chunks_never_have_a_lower_value_than_their_start(rate: float, reduction: str) -> None:
    base, obs = flow(), observations(9)
    critic = critic_of(base)
    policy = make_action_optimized(
        base, critic, candidates=6, top=6, ascent_steps=4, ascent_rate=rate, reduction=reduction
    )
    start = make_best_of_n(base, critic, candidates=6, reduction=reduction).propose(obs, generator=seeded())
    found = policy.propose(obs, generator=seeded())
    assert bool((found.values >= start.values.sort(1, descending=True).values).all())
    torch.testing.assert_close(policy.score(obs, found.chunks), found.values, atol=1e-5, rtol=1e-5)
    assert rate > 1 or bool((found.values > start.values.sort(1, descending=True).values).any())


def test_ascent_follows_the_normalised_gradient_only_on_executed_actions() -> None:
    base, obs = flow(), observations(3)
    slope = torch.tensor([2.0, -1.0])
    critic = Analytic(base, lambda chunk: (chunk * slope).sum((1, 2)))
    start = torch.zeros(3, 2, 4, 2)
    values = critic.candidate_values(obs, start)[0]
    found = ascend(critic, obs, Candidates(start, values), steps=3, rate=0.01)
    moved = 3 * 0.01 * slope * SCALE * SCALE  # dQ/dx = slope * scale, and a = scale * x
    torch.testing.assert_close(found.chunks[:, :, :2], moved.expand(3, 2, 2, 2), atol=1e-6, rtol=1e-5)
    assert torch.equal(found.chunks[:, :, 2:], start[:, :, 2:])
    far = ascend(critic, obs, Candidates(start, values), steps=3, rate=100.0)
    torch.testing.assert_close(far.chunks[:, :, :2], torch.tensor([0.5, -3.0]).expand(3, 2, 2, 2))  # the bounds


def test_optimising_reaches_the_maximum_of_a_quadratic() -> None:
    base, obs = flow(), observations(5)
    best = torch.tensor([0.3, -2.0])
    critic = Analytic(base, lambda chunk: -((chunk - best) / SCALE).square().sum((1, 2)))
    policy = make_action_optimized(base, critic, candidates=3, top=1, ascent_steps=40, ascent_rate=0.2)
    torch.testing.assert_close(policy.act(obs)[:, :2], best.expand(5, 2, 2), atol=1e-4, rtol=0)


def test_known_chunks_replace_the_worst_candidate() -> None:
    base, obs = flow(), observations(4)
    policy = make_action_optimized(base, critic_of(base), candidates=6, top=3, ascent_steps=0)
    plain, known = policy.propose(obs, generator=seeded()), torch.full((4, 4, 2), 0.1)
    found = policy.propose(obs, generator=seeded(), known=known)
    assert torch.equal(found.chunks[:, :2], plain.chunks[:, :2]) and torch.equal(found.chunks[:, 2], known)
    torch.testing.assert_close(found.values, policy.score(obs, found.chunks))


def test_zero_size_edits_equal_best_of_n() -> None:
    base, obs = flow(), observations(6)
    critic = critic_of(base)
    edited = make_residual_edit(base, EditNet(EditConfig(beta=0.0), base), critic, candidates=5, edits=5)
    expected = make_best_of_n(base, critic, candidates=5).act(obs, generator=seeded())
    torch.testing.assert_close(edited.act(obs, generator=seeded()), expected, atol=1e-5, rtol=1e-5)


def test_edited_candidates_do_not_lower_the_best_value_and_stay_near_the_base() -> None:
    base, obs = flow(), observations(8)
    critic, edit = critic_of(base), EditNet(EditConfig(beta=0.3), base)
    policy = make_residual_edit(base, edit, critic, candidates=5, edits=3)
    found = policy.propose(obs, generator=seeded())
    assert found.chunks.shape[1] == 8
    assert bool((found.values.max(1).values >= found.values[:, :5].max(1).values).all())
    shift = (found.chunks[:, 5:] - found.chunks[:, :3]) / SCALE
    assert 0.01 < float(shift[:, :, :2].abs().max()) <= 0.3 + 1e-5
    assert torch.equal(found.chunks[:, 5:, 2:], found.chunks[:, :3, 2:])
    assert float(((found.chunks - torch.tensor([0.0, -1.0])) / SCALE).abs().max()) <= 1 + 1e-5


def test_edit_log_probability_equals_the_tanh_gaussian_density() -> None:
    base, obs = flow(), observations(8)
    edit, chunk = EditNet(EditConfig(beta=0.2), base), torch.zeros(8, 4, 2) - torch.tensor([0.0, 1.0])
    features = edit.encode(obs)
    edited, logp = edit.rsample(features, chunk, seeded())
    mean, log_std = edit.distribution(features, chunk)
    shift = ((edited - chunk)[:, :2] / SCALE / 0.2).flatten(1)
    squash = torch.distributions.TanhTransform()
    density = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, log_std.exp()), [squash])
    torch.testing.assert_close(density.log_prob(shift).sum(1), logp, atol=1e-3, rtol=1e-3)
    assert torch.equal(edit.mode(features, chunk), edit.add(chunk, mean))


@pytest.mark.parametrize(
    "build",
    [
        lambda: BestOfNConfig(selection="best"),
        lambda: BestOfNConfig(reduction="median"),
        lambda: BestOfNConfig(candidates=0),
        lambda: BestOfNConfig(temperature=0.0),
        lambda: ActionOptimizedConfig(candidates=4, top=5),
        lambda: ActionOptimizedConfig(ascent_steps=-1),
        lambda: ResidualEditConfig(candidates=4, edits=5),
        lambda: EditConfig(beta=-0.1),
        lambda: BestOfNPolicy(BestOfNConfig(), SPEC),
        lambda: ActionOptimizedPolicy(ActionOptimizedConfig(), SPEC),
        lambda: ResidualEditPolicy(ResidualEditConfig(), SPEC),
    ],
)
def test_bad_settings_are_refused_in_one_line(build: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        build()
    assert "\n" not in str(error.value)
