"""Tests of composed policies against closed forms and against their parents."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composition_forms import (
    ACTION,
    CHUNK,
    NETWORKS,
    PLANE,
    STATE,
    exact,
    network,
    nothing,
    observations,
    parameters,
    round_,
    scaled,
)
from torch import Tensor

from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.errors import UserError
from robopolicy.nets.encoder import EmbeddingConfig, without_embeddings
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.composition.operators import (
    Affine,
    Convex,
    Operator,
    Scheduled,
    describe_operator,
    make_operator,
)
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.path import interpolate
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.composed import ComposedPolicy, compose
from robopolicy.policies.wrappers.composed_config import ComposedConfig
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.policies.wrappers.staged import make_staged
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

kinds = pytest.mark.parametrize("kind", NETWORKS)


def noise(rows: int, spec: PolicySpec = CHUNK) -> Tensor:
    return torch.randn(rows, spec.horizon, spec.action_dim, generator=torch.Generator().manual_seed(7))


@kinds
def test_composition_with_weight_one_equals_the_parent_bit_for_bit(kind: str) -> None:
    first, second, obs = network(kind, 0), network("diffusion", 1), observations(3)
    for policy, number in (
        (compose([first, second], weights=[1, 0]), 0),
        (compose([second, first], weights=[0, 1]), 0),
    ):
        assert torch.equal(policy.decode(obs, noise(3)), first.decode(obs, noise(3)))
        sampled, own = (p.act(obs, generator=PerRowGenerator(range(3), [number] * 3)) for p in (policy, first))
        assert torch.equal(sampled, own) and policy.nfe == first.nfe


def test_weight_one_of_a_shorter_parent_appends_the_longer_chunk() -> None:
    short, long = network("flow", 0, replace(CHUNK, horizon=2)), network("diffusion", 1)
    obs, z = observations(3), noise(3)
    chunk = compose([short, long], weights=[1, 0]).decode(obs, z)
    assert torch.equal(chunk[:, :2], short.decode(obs, z[:, :2])) and chunk.shape == (3, 4, 2)
    assert torch.equal(compose([short, long], weights=[0, 1]).decode(obs, z), long.decode(obs, z))


@kinds
def test_composition_of_equal_parents_equals_the_parent_at_any_weight(kind: str) -> None:
    parent, obs = network(kind, 0), observations(5)
    expected = parent.decode(obs, noise(5))
    for operator in (Convex((0.3, 0.7)), Affine((2.5, -1.5)), Scheduled(((1.0, 0.0), (0.2, 0.8)))):
        found = compose([parent, copy.deepcopy(parent)], operator).decode(obs, noise(5))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("operator", ["convex", "or", "and"])
def test_composition_does_not_depend_on_the_order_of_the_parents(operator: str) -> None:
    parents, obs, z = [network("flow", 0), network("diffusion", 1), network("edm", 2)], observations(4), noise(4)
    two = [
        compose(order, operator, w).decode(obs, z)
        for order, w in ((parents[:2], (0.3, 0.7)), (parents[1::-1], (0.7, 0.3)))
    ]
    tolerance = 0.0 if operator == "convex" else 2e-3
    torch.testing.assert_close(two[0], two[1], atol=tolerance, rtol=0)
    if operator == "convex":
        three = [
            compose([parents[i] for i in order], weights=[(0.2, 0.3, 0.5)[i] for i in order]).decode(obs, z)
            for order in ((0, 1, 2), (2, 0, 1))
        ]
        torch.testing.assert_close(three[0], three[1], atol=1e-5, rtol=0)


# Densities.


def test_composed_equal_covariance_gaussians_equal_the_interpolated_gaussian() -> None:
    cov = ((0.2, 0.05), (0.05, 0.1))
    laws = [replace(round_((0, 0), 1), mean=mean, cov=cov) for mean in ((-0.5, 0.2), (0.7, 0.4))]
    between = replace(laws[0], mean=(0.25 * -0.5 + 0.75 * 0.7, 0.25 * 0.2 + 0.75 * 0.4))
    z = noise(50, PLANE)
    for kind in ("flow", "diffusion", "edm"):
        composed = compose([exact(kind, law, steps=7) for law in laws], weights=[0.25, 0.75])
        expected = exact(kind, between, steps=7).decode(nothing(50), z)
        torch.testing.assert_close(composed.decode(nothing(50), z), expected, atol=2e-4, rtol=0)
    mixed = compose([exact("flow", laws[0]), exact("edm", laws[1], steps=300)], weights=[0.25, 0.75])
    sampled = mixed.decode(nothing(50), z)
    torch.testing.assert_close(sampled, between.draw(z), atol=2e-2, rtol=0)


def test_field_of_mixed_families_equals_the_weighted_analytic_score() -> None:
    laws = [round_((-0.5, 0.0), 0.3), round_((0.7, 0.4), 0.6)]
    policy = compose([exact("diffusion", laws[0]), exact("flow", laws[1])], weights=[0.4, 0.6])
    t = torch.linspace(0.05, 0.95, 91)
    row, x = t[:, None, None], torch.randn(91, 1, 2)
    u = policy.field(nothing(91), x, t)
    score = -(x - row * u) / (1 - row)
    analytic = sum(
        w * -law.estimate(x, row, 1 - row).noise / (1 - row).double() for w, law in zip((0.4, 0.6), laws, strict=True)
    )
    assert isinstance(analytic, Tensor)
    torch.testing.assert_close(score, analytic.float(), atol=2e-4, rtol=1e-4)


def test_normalisers_with_a_common_factor_are_converted_exactly() -> None:
    # The same two laws in env actions; the units of the second policy are three times as large and shifted.
    left, right = round_((-0.5, 0.2), 0.3), round_((0.7, -0.1), 0.3)
    inner = round_(((0.7 - 0.4) / 3, (-0.1 + 0.2) / 3), 0.1)
    other = scaled(exact("flow", inner, action_normalization="meanstd", steps=50), (0.4, -0.2), (3.0, 3.0))
    plain = scaled(exact("flow", left, action_normalization="meanstd", steps=50), (0.0, 0.0), (1.0, 1.0))
    known = compose([exact("flow", left), exact("flow", right)], weights=[0.5, 0.5])
    policy = compose([plain, other], weights=[0.5, 0.5])
    t, x = torch.linspace(0.0, 0.95, 96), torch.randn(96, 1, 2)
    row = t[:, None, None]
    units, factor = policy.action_normalizer, float(policy.action_normalizer.scale[0])
    total = row + (1 - row) * factor  # the point in env units, with `factor` times the noise
    there, time = (factor * x + row * units.offset) / total, (row / total).flatten()
    data = there + (1 - time[:, None, None]) * known.field(nothing(96), there, time)
    found = units.denormalize(x + (1 - row) * policy.field(nothing(96), x, t))
    torch.testing.assert_close(found, data, atol=1e-4, rtol=0)


def test_normalisers_with_different_factors_compose_isotropic_gaussians() -> None:
    scales = ((1.0, 1.0), (2.0, 0.7))
    parents = []
    for (x, y), (sx, sy) in zip(((0.2, 0.1), (0.2, 0.1)), scales, strict=True):
        law = replace(round_((x / sx, y / sy), 1), cov=(((0.3 / sx) ** 2, 0.0), (0.0, (0.3 / sy) ** 2)))
        parents.append(scaled(exact("flow", law, action_normalization="meanstd", steps=120), (0.0, 0.0), (sx, sy)))
    sampled = compose(parents, weights=[0.5, 0.5]).decode(nothing(4000), noise(4000, PLANE))[:, 0]
    torch.testing.assert_close(sampled.mean(0), torch.tensor([0.2, 0.1]), atol=0.02, rtol=0)
    torch.testing.assert_close(sampled.std(0), torch.tensor([0.3, 0.3]), atol=0.02, rtol=0)


def test_weights_follow_the_schedule() -> None:
    schedule = Scheduled(((1.0, 0.0), (0.5, 0.5), (0.0, 1.0)))
    parents, x = [network("flow", 0), network("edm", 1)], noise(5)
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.99])
    fields = [parent.field(observations(5), x, t) for parent in parents]
    expected = interpolate(fields[0], fields[1], t[:, None, None])
    torch.testing.assert_close(compose(parents, schedule).field(observations(5), x, t), expected, atol=1e-5, rtol=1e-5)


def test_classifier_free_guidance_evaluates_one_parent_with_and_without_its_instruction() -> None:
    spec = PolicySpec({"state": (3,), "embedding.task": (5,)}, 2, horizon=4, action_horizon=2)
    torch.manual_seed(0)
    policy = network("flow", 0, PolicySpec({"state": (3,)}, 2, 4, 2))
    conditioned = type(policy)(replace(policy.config, embedding=EmbeddingConfig(4, 0.1)), spec).eval()
    conditioned.fit_normalizer({"state": STATE, "action": ACTION})
    obs, x, t = observations(6, spec), noise(6), torch.rand(6)
    guided = compose([conditioned], Affine((2.5, -1.5)), unconditioned=(0,))
    free = conditioned.field(without_embeddings(obs), x, t)
    expected = free + 2.5 * (conditioned.field(obs, x, t) - free)
    torch.testing.assert_close(guided.field(obs, x, t), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(guided.with_weights((1, 0)).decode(obs, x), conditioned.decode(obs, x))
    with pytest.raises(UserError, match="no 'embedding"):
        compose([policy], Affine((2.5, -1.5)), unconditioned=(0,))
    bare = type(policy)(policy.config, spec).eval()
    bare.fit_normalizer({"state": STATE, "action": ACTION})
    with pytest.raises(UserError, match=r"embedding\.dropout"):
        compose([bare], Affine((2.5, -1.5)), unconditioned=(0,))


# Parents of different shapes.


def test_each_parent_receives_its_own_observations_and_history() -> None:
    left = network("flow", 0, PolicySpec({"state": (3,)}, 2, 4, 2, obs_horizon=1))
    right = network("diffusion", 1, PolicySpec({"goal": (3,), "state": (3,)}, 2, 4, 3, obs_horizon=2))
    policy = compose([left, right], weights=[0.5, 0.5])
    assert policy.spec == PolicySpec({"state": (3,), "goal": (3,)}, 2, 4, 2, obs_horizon=2)
    obs, x, t = observations(4, policy.spec), noise(4), torch.rand(4)
    expected = (left.field({"state": obs["state"][:, 1:]}, x, t) + right.field(obs, x, t)) / 2
    torch.testing.assert_close(policy.field(obs, x, t), expected, atol=1e-5, rtol=1e-5)
    assert compose([left, right], action_horizon=4).spec.action_horizon == 4


def test_cameras_and_states_compose() -> None:
    camera_spec = PolicySpec({"image.front": (3, 16, 16)}, 2, 4, 2)
    torch.manual_seed(0)
    camera_policy = DiffusionPolicy(DiffusionConfig(hidden=(16,), steps=4), camera_spec)
    camera_policy.fit_normalizer({"action": ACTION})
    policy = compose([camera_policy.eval(), network("flow", 1)])
    obs = observations(3) | {"image.front": torch.randint(0, 256, (3, 1, 3, 16, 16), dtype=torch.uint8)}
    assert policy.decode(obs, noise(3)).isfinite().all()
    critic = make_best_of_n(policy, _critic(policy), candidates=4)  # uses the state statistics of the second parent
    assert critic.act(obs).shape == (3, 4, 2)


def test_steps_beyond_the_shorter_chunk_follow_the_longer_parent() -> None:
    short, long = network("flow", 0, replace(CHUNK, horizon=2)), network("flow", 1)
    policy, obs, x, t = compose([short, long], weights=[0.5, 0.5]), observations(3), noise(3), torch.rand(3)
    assert (policy.spec.horizon, policy.spec.action_horizon) == (4, 2)
    found, own = policy.field(obs, x, t), long.field(obs, x, t)
    assert torch.equal(found[:, 2:], own[:, 2:])
    torch.testing.assert_close(found[:, :2], (short.field(obs, x[:, :2], t) + own[:, :2]) / 2)


def test_parents_are_evaluated_at_the_steps_of_the_finest_sampler() -> None:
    coarse, fine, obs = network("flow", 0), network("diffusion", 1, steps=9), observations(2)
    policy, calls = compose([coarse, fine]), [0, 0]
    for number, parent in enumerate((coarse, fine)):
        parent.backbone.register_forward_hook(lambda *_, n=number: calls.__setitem__(n, calls[n] + 1))
    policy.decode(obs, noise(2))
    assert calls == [9, 9] and policy.nfe == 18
    assert compose([coarse, fine], steps=3).nfe == 6


def test_few_step_heads_compose_with_few_steps_and_act_as_flows_among_others() -> None:
    few_step = compose([network("meanflow", 0), network("shortcut", 1, steps=2)])
    assert few_step.nfe == 2 * 2
    assert compose([network("meanflow", 0), network("flow", 1)]).nfe == 2 * 8
    with pytest.raises(UserError, match="consistency"):
        head = ConsistencyPolicy(ConsistencyConfig(hidden=(8,)), CHUNK)
        head.fit_normalizer({"state": STATE, "action": ACTION})
        compose([head, network("flow", 1)])


class Planner(FlowPolicy):
    """Denoises one additional row that is not part of its chunk, as LeRobot's networks do for past actions."""

    @property
    def noise_shape(self) -> tuple[int, int]:
        return self.spec.horizon + 1, self.spec.action_dim

    def integrate(self, features: Tensor, noise: Tensor) -> Tensor:
        return super().integrate(features, noise)[:, : self.spec.horizon]


def planner(seed: int) -> Planner:
    inner = network("flow", seed, replace(CHUNK, horizon=4))
    policy = Planner(inner.config, inner.spec).eval()
    policy.load_state_dict(inner.state_dict())
    policy.spec = replace(CHUNK, horizon=3)
    return policy


def test_rows_outside_the_chunk_belong_to_their_parent() -> None:
    wide, wider, plain, obs = planner(0), planner(1), network("flow", 2), observations(3)
    policy = compose([wide, plain, wider], weights=[0.5, 0.2, 0.3])
    assert policy.noise_shape == (6, 2) and policy.spec.horizon == 4
    x, t = torch.randn(3, 6, 2), torch.rand(3)
    found = policy.field(obs, x, t)
    first = wide.field(obs, torch.cat([x[:, :3], x[:, 4:5]], 1), t)
    third = wider.field(obs, torch.cat([x[:, :3], x[:, 5:6]], 1), t)
    assert torch.equal(found[:, 4:5], first[:, 3:]) and torch.equal(found[:, 5:], third[:, 3:])
    own = plain.field(obs, x[:, :4], t)
    torch.testing.assert_close(found[:, :3], 0.5 * first[:, :3] + 0.2 * own[:, :3] + 0.3 * third[:, :3])
    z = torch.randn(3, 5, 2)
    twice = compose([wide, planner(0)], weights=[0.5, 0.5])
    assert twice.act(obs).shape == (3, 3, 2)
    same = twice.decode(obs, torch.cat([z[:, :4], z[:, 3:4]], 1))
    torch.testing.assert_close(same, wide.decode(obs, z[:, :4]), atol=1e-5, rtol=0)
    alone = compose([wide, network("flow", 2, replace(CHUNK, horizon=3))], weights=[1.0, 0.0])
    assert torch.equal(alone.decode(obs, z[:, :4]), wide.decode(obs, z[:, :4]))


def test_staged_diffusion_can_be_a_parent() -> None:
    first, second = network("diffusion", 0), network("diffusion", 1)
    staged, obs = make_staged((0, 3), [first, second]), observations(3)
    found = compose([staged, staged], weights=[0.4, 0.6]).decode(obs, noise(3))
    torch.testing.assert_close(found, staged.decode(obs, noise(3)), atol=2e-4, rtol=1e-4)


# Wrappers, files and refusals.


def _critic(policy: Policy) -> QEnsemble:
    torch.manual_seed(3)
    return QEnsemble(CriticConfig(members=2, hidden=(8,)), policy)


def test_best_of_n_wraps_a_composition() -> None:
    policy, obs = compose([network("flow", 0), network("edm", 1)]), observations(3)
    best = make_best_of_n(policy, _critic(policy), candidates=8)
    found = best.propose(obs, generator=torch.Generator().manual_seed(0))
    rows = {key: value.repeat_interleave(8, 0) for key, value in obs.items()}
    sampled = policy.act(rows, generator=torch.Generator().manual_seed(0)).unflatten(0, (3, 8))
    assert torch.equal(found.chunks, sampled) and best.nfe == 8 * (policy.nfe + 1)
    assert torch.equal(best.act(obs, generator=torch.Generator().manual_seed(0)), found.best())


def test_composition_is_steered_through_its_noise_with_frozen_parents() -> None:
    parents = [network("flow", 0), network("diffusion", 1)]
    policy, obs = compose(parents, weights=[0.4, 0.6]), observations(4)
    latent = LatentPolicy.from_base(policy, NoiseSpace(bound=1.5), replace(STEERING_ACTOR, hidden=(8,)))
    before = parameters(latent.base)
    optimizer = torch.optim.Adam(latent.actor.parameters(), lr=1e-2)
    loss = -latent.decisions(obs, latent.sample(obs).record).logp.mean()
    loss.backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(latent.base), strict=True))
    z = noise(4).requires_grad_()
    policy.decode(obs, z).square().sum().backward()
    assert z.grad is not None and float(z.grad.abs().min()) > 0


OPERATORS: list[Operator] = [
    Convex((0.3, 0.7)),
    Affine((1.5, -0.5)),
    Scheduled(((1.0, 0.0), (0.0, 1.0))),
    make_operator({"name": "or", "weights": [0.3, 0.7], "sampler": "sde"}),
    make_operator({"name": "and", "sampler": "ode"}),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_checkpoint_of_a_composition_is_complete(operator: Operator, tmp_path: Path) -> None:
    parents = [network("flow", 0), network("diffusion", 1, replace(CHUNK, horizon=2))]
    parents[0].action_normalizer.scale.mul_(1.5)  # the common normaliser must be recomputed on load
    policy, obs = compose(parents, operator, origins=("ab12", "cd34")), observations(4)
    save_checkpoint(tmp_path / "both", policy, task="toy/point_mass", obs_sample=obs)
    again, manifest = load_policy(tmp_path / "both")
    assert isinstance(again, ComposedPolicy) and manifest.config["origins"] == ["ab12", "cd34"]
    assert torch.equal(again.decode(obs, noise(4)), policy.decode(obs, noise(4)))
    assert again.operator == operator and verify_checkpoint(tmp_path / "both").ok
    assert describe_operator(again.operator) == describe_operator(operator)


def test_other_weights_share_the_parents() -> None:
    policy = compose([network("flow", 0), network("edm", 1)], weights=[0.5, 0.5])
    other = policy.with_weights([0.2, 0.8])
    assert other.parents[0] is policy.parents[0] and other.operator == Convex((0.2, 0.8))
    assert not torch.equal(other.decode(observations(3), noise(3)), policy.decode(observations(3), noise(3)))


def _unfitted() -> Any:
    parent = network("flow", 0)
    parent.action_normalizer.fitted.fill_(False)
    return parent


def _uneven() -> Any:
    return scaled(network("flow", 0), (0.0, 0.0), (100.0, 1.0))


REFUSED: dict[str, tuple[Any, str]] = {
    "no parents": (lambda: compose([]), "needs parents"),
    "no velocity": (lambda: compose([GaussianPolicy(GaussianConfig(), CHUNK)]), "Parent 1 is a policy 'gaussian'"),
    "no statistics": (lambda: compose([network("flow"), _unfitted()]), "Parent 2 has no normaliser statistics"),
    "other actions": (
        lambda: compose([network("flow"), network("flow", 0, replace(CHUNK, action_dim=3))]),
        "Parent 2 has 3 action dimensions, Parent 1 has 2",
    ),
    "other observations": (
        lambda: compose([network("flow"), exact("flow", round_((0, 0), 1))]),
        r"expects 'state' of shape \(1,\), Parent 1 expects \(3,\)",
    ),
    "nested": (lambda: compose([compose([network("flow")])]), "itself a composition"),
    "units": (lambda: compose([network("flow"), _uneven()]), "normalises action dimension"),
    "count": (lambda: compose([network("flow")] * 2, weights=[1.0]), "2 parents need 2 weights"),
    "sum": (lambda: compose([network("flow")] * 2, weights=[1.0, 1.0]), "must sum to 1"),
    "sign": (lambda: compose([network("flow")] * 2, weights=[1.5, -0.5]), "none of them negative"),
    "operator": (lambda: compose([network("flow")] * 2, "xor"), "Unknown operator 'xor'"),
    "action_horizon": (lambda: compose([network("flow")] * 2, action_horizon=5), r"must lie in \[1, 4\]"),
    "statistics": (lambda: compose([network("flow")] * 2).fit_normalizer({}), "keep their training statistics"),
    "field": (lambda: compose([network("flow")] * 2, "or").field({}, noise(1), torch.zeros(1)), "has no field"),
    "bare": (lambda: ComposedPolicy(ComposedConfig(), CHUNK), "needs parents"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_compositions_are_refused(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as refusal:
        build()
    assert len(str(refusal.value).splitlines()) == 1
