"""Tests of Q ensembles against separate networks, HL-Gauss against a numerical reference, targets in closed form."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robopolicy.critics.q import C51, CriticConfig, HLGauss, QEnsemble, TargetUpdate, random_members, random_subset_min
from robopolicy.errors import UserError
from robopolicy.nets.mlp import EnsembleLayerNorm, EnsembleLinear, EnsembleMLP, make_activation
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SPEC = PolicySpec({"state": (3,), "goal": (2,)}, action_dim=2, horizon=5, action_horizon=3, obs_horizon=2)


def policy(spec: PolicySpec = SPEC, **config: Any) -> GaussianPolicy:
    settings = {"normalization": "meanstd", "action_normalization": "minmax", "squash": True} | config
    made = GaussianPolicy(GaussianConfig(**settings), spec)
    statistics = {
        key: {"mean": [0.5] * shape[0], "std": [2.0] * shape[0], "count": [9]}
        for key, shape in spec.observation.items()
    }
    made.fit_normalizer({**statistics, "action": {"min": [-2.0, 0.0], "max": [2.0, 4.0]}})
    return made


def observations(rows: int, spec: PolicySpec = SPEC) -> dict[str, Tensor]:
    return {key: torch.randn(rows, spec.obs_horizon, *shape) for key, shape in spec.observation.items()}


def separate(ensemble: EnsembleMLP, member: int) -> nn.Sequential:
    """One member as a network of ordinary layers."""
    layers: list[nn.Module] = []
    for part in ensemble.layers:
        if isinstance(part, EnsembleLinear):
            layer: Any = nn.Linear(part.weight.shape[1], part.weight.shape[2])
            layer.weight.data, layer.bias.data = part.weight.data[member].t(), part.bias.data[member, 0]
        elif isinstance(part, EnsembleLayerNorm):
            layer = nn.LayerNorm(part.scale.shape[-1])
            layer.weight.data, layer.bias.data = part.scale.data[member, 0], part.shift.data[member, 0]
        else:
            layer = copy.deepcopy(part)
        layers.append(layer)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("activation", ["relu", "silu", "tanh"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("outputs", [1, 4])
def test_ensemble_equals_separate_networks(activation: str, layer_norm: bool, outputs: int) -> None:
    ensemble = EnsembleMLP(3, 6, (8, 7), outputs, activation=activation, layer_norm=layer_norm)
    for parameter in ensemble.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(9, 6, requires_grad=True)
    result = ensemble(x)
    weight = torch.randn(3, 9, outputs)
    gradient = torch.autograd.grad((result * weight).sum(), [x, *ensemble.parameters()])
    alone = [separate(ensemble, member) for member in range(3)]
    torch.testing.assert_close(result, torch.stack([network(x) for network in alone]))
    expected = torch.autograd.grad((torch.stack([network(x) for network in alone]) * weight).sum(), x)[0]
    torch.testing.assert_close(gradient[0], expected)
    first = torch.autograd.grad((alone[1](x) * weight[1]).sum(), next(alone[1].parameters()))[0]
    torch.testing.assert_close(gradient[1][1], first.t())  # the loss of a member has a gradient only for that member
    some = torch.tensor([2, 0])
    torch.testing.assert_close(ensemble(x, some), result[some])


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("hidden", [(8,), (16, 16)])
def test_min_output_has_the_value_and_gradient_of_the_minimum(members: int, hidden: tuple[int, ...]) -> None:
    ensemble = EnsembleMLP(members, 6, hidden, 1, activation="relu")
    for layer in ensemble.layers:
        if isinstance(layer, EnsembleLinear):
            layer.bias.data.zero_()  # makes the members cross
    x, weight = torch.randn(40, 6, requires_grad=True), torch.randn(40)
    least = ensemble.min_output(x)
    expected = ensemble(x).squeeze(-1).min(0).values
    torch.testing.assert_close(least, expected)
    actual = torch.autograd.grad((least * weight).sum(), x)[0]
    torch.testing.assert_close(actual, torch.autograd.grad((expected * weight).sum(), x)[0])
    assert len(ensemble(x).argmin(0).unique()) >= min(members, 2)


@pytest.mark.parametrize(
    "config", [{"layer_norm": True}, {"activation": "silu"}, {"bins": 11, "value_min": -100.0, "value_max": 0.0}]
)
def test_min_q_is_the_minimum_over_members(config: dict[str, Any]) -> None:
    critic = QEnsemble(
        CriticConfig(**({"hidden": (16,), "activation": "relu", "layer_norm": False} | config)), policy()
    )
    obs, chunk = observations(4), torch.rand(4, 5, 2, requires_grad=True)
    least = critic.min_q(obs, chunk)
    torch.testing.assert_close(least, critic(obs, chunk).min(0).values)
    least.sum().backward()
    assert chunk.grad is not None and bool(chunk.grad[:, :3].any()) and not bool(chunk.grad[:, 3:].any())


def test_members_are_initialised_like_torch_linear_layers() -> None:
    layer = EnsembleLinear(50, 16, 64)
    assert float(layer.weight.detach().abs().max()) == pytest.approx(0.25, rel=1e-3)
    assert float(layer.weight.detach().std()) == pytest.approx(0.25 / 3**0.5, rel=0.02)
    assert float(layer.bias.detach().abs().max()) == pytest.approx(0.25, rel=1e-2)
    assert not torch.equal(layer.weight[0], layer.weight[1])


def test_inplace_activations_equal_the_plain_ones() -> None:
    for name in ("relu", "silu", "tanh", "elu"):
        x = torch.randn(20)
        torch.testing.assert_close(make_activation(name, inplace=True)(x.clone()), make_activation(name)(x))


def test_critic_input_is_normalised_observations_and_executed_actions() -> None:
    actor = policy()
    critic = QEnsemble(CriticConfig(hidden=(16,)), actor)
    obs, chunk = observations(4), torch.rand(4, 5, 2)
    seen: list[Tensor] = []
    critic.body.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    values = critic(obs, chunk)
    assert values.shape == (2, 4)
    features = (torch.cat([obs["goal"], obs["state"]], -1) - 0.5) / 2  # keys in sorted order
    action = (chunk[:, :3] - torch.tensor([0.0, 2.0])) / 2
    torch.testing.assert_close(seen[0], torch.cat([features.flatten(1), action.flatten(1)], 1))
    chunk[:, 3:] = 9.0
    assert torch.equal(critic(obs, chunk), values)
    assert torch.equal(QEnsemble(CriticConfig(hidden=(16,)), actor, steps=5)(obs, chunk).isfinite(), values.isfinite())


def test_critic_copies_the_statistics_of_the_policy() -> None:
    actor = policy()
    critic = QEnsemble(CriticConfig(hidden=(16,)), actor)
    actor.fit_normalizer(
        {key: {"mean": [9.0] * n, "std": [1.0] * n} for key, n in (("state", 3), ("goal", 2))}
        | {"action": {"min": [-9.0] * 2, "max": [9.0] * 2}}
    )
    assert float(critic.encoder.normalizer.offset[0]) == 0.5
    assert float(critic.action_normalizer.scale[0]) == 2.0


def test_a_policy_without_normalisers_is_refused() -> None:
    class Bare(nn.Module):
        name, spec = "bare", SPEC

    with pytest.raises(UserError, match="'bare' has none"):
        QEnsemble(CriticConfig(), Bare())  # type: ignore[arg-type]


def test_candidate_values_equal_separate_evaluations() -> None:
    critic = QEnsemble(CriticConfig(hidden=(16, 16), members=3), policy())
    obs, chunks = observations(4), torch.rand(4, 6, 5, 2)
    values = critic.candidate_values(obs, chunks)
    assert values.shape == (3, 4, 6)
    for c in range(6):
        torch.testing.assert_close(values[:, :, c], critic(obs, chunks[:, c]))


def test_images_pass_through_the_critics_own_camera_network() -> None:
    spec = PolicySpec({"state": (3,), "image.front": (3, 24, 24)}, action_dim=2, action_horizon=1)
    vision = VisionConfig(widths=(16,), keypoints=4)
    actor = GaussianPolicy(GaussianConfig(vision=vision, normalization="identity"), spec)
    critic = QEnsemble(CriticConfig(hidden=(16,), vision=vision), actor)
    obs = {"state": torch.randn(3, 1, 3), "image.front": torch.randint(0, 255, (3, 1, 3, 24, 24)).to(torch.uint8)}
    values = critic(obs, torch.zeros(3, 1, 2))
    values.sum().backward()
    assert values.shape == (2, 3)
    assert all(p.grad is not None and bool(p.grad.any()) for p in critic.encoder.cameras.parameters())
    assert all(p.grad is None for p in actor.parameters())
    brighter = {**obs, "image.front": obs["image.front"] // 2}
    assert not torch.equal(critic(brighter, torch.zeros(3, 1, 2)), values)


@pytest.mark.parametrize("bins", [0, 21])
def test_losses_are_finite_under_autocast_and_propagate_nan(bins: int) -> None:
    critic = QEnsemble(CriticConfig(hidden=(16,), bins=bins, value_min=-100.0, value_max=0.0), policy())
    obs, chunk = observations(4), torch.rand(4, 5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = critic.regression(critic.output(critic.encode(obs), chunk), torch.randn(4))
    assert bool(loss.isfinite().all())
    obs["state"][2] = torch.nan
    loss = critic.regression(critic.output(critic.encode(obs), chunk), torch.randn(4))
    assert loss.isnan().any(0).nonzero().flatten().tolist() == [2]


# Subsets and targets.


@pytest.mark.parametrize("outputs", [1, 2, 51])
def test_autocast_outputs_have_float32_resolution(outputs: int) -> None:
    torch.manual_seed(0)
    ensemble, x = EnsembleMLP(2, 5, (16,), outputs), torch.randn(256, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ensemble.layers[-1].bias.fill_(100.0)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        assert len(ensemble(x)[0, :, 0].unique()) > 200  # in bfloat16 the next number after 100 is 100.5


def test_subsets_are_distinct_members_and_follow_the_generator() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [random_members(10, 2, generator) for _ in range(200)]
    assert all(draw is not None and len(draw.unique()) == 2 for draw in draws)
    assert len({tuple(draw.tolist()) for draw in draws if draw is not None}) > 50
    assert random_members(2, 2, generator) is None and random_members(2, 5, generator) is None


def test_the_subset_minimum_is_the_minimum_of_a_subset() -> None:
    values = torch.randn(5, 7)
    generator, again = (torch.Generator().manual_seed(1) for _ in range(2))
    members = torch.randperm(5, generator=again)[:2]
    assert torch.equal(random_subset_min(values, 2, generator), values[members].min(0).values)
    assert torch.equal(random_subset_min(values, 5, generator), values.min(0).values)


def test_a_target_moves_by_tau_and_copies_statistics() -> None:
    source = QEnsemble(CriticConfig(hidden=(8,)), policy(normalization="running"))
    target = copy.deepcopy(source)
    update = TargetUpdate(target, source)
    before = [p.detach().clone() for p in target.parameters()]
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    source.encoder.update_stats(observations(50))
    update.step(0.25)
    for moved, old in zip(target.parameters(), before, strict=True):
        torch.testing.assert_close(moved, old + 0.25)
    assert float(target.encoder.normalizer.offset[0]) == 0.5
    update.copy_buffers()
    assert float(target.encoder.normalizer.offset[0]) == float(source.encoder.normalizer.offset[0]) != 0.5
    update.step(1.0)
    for moved, new in zip(target.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(moved, new)


# HL-Gauss.


def test_histogram_masses_equal_the_truncated_gaussian() -> None:
    head = HLGauss(20, -2.0, 3.0)
    target = torch.tensor([-2.0, -0.4, 0.0, 1.7, 3.0])
    normal = torch.distributions.Normal(target.double()[:, None], 0.75 * 5 / 20)
    cdf = normal.cdf(torch.linspace(-2, 3, 21).double())
    expected = (cdf[:, 1:] - cdf[:, :-1]) / (cdf[:, -1:] - cdf[:, :1])
    torch.testing.assert_close(head.probabilities(target).double(), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(head.probabilities(target).sum(1), torch.ones(5))


def test_histogram_mean_inverts_the_encoding() -> None:
    head = HLGauss(101, -10.0, 10.0)
    target = torch.linspace(-9, 9, 37)
    torch.testing.assert_close(head.mean(head.probabilities(target).log()), target, atol=1e-3, rtol=0)
    beyond = head.mean(head.probabilities(torch.tensor([-50.0, 50.0])).log())
    assert -10 <= float(beyond[0]) < -9.5 and 9.5 < float(beyond[1]) <= 10


def test_autocast_histogram_means_have_float32_resolution() -> None:
    head, logits = HLGauss(101, -100.0, 0.0), 0.1 * torch.randn(512, 101)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(head.mean(logits).unique()) > 500  # near -50 bfloat16 has steps of 0.25
        torch.testing.assert_close(head.mean(logits.bfloat16()), head.mean(logits), atol=0.2, rtol=0)


def test_cross_entropy_is_least_at_the_target() -> None:
    head = HLGauss(31, -1.0, 1.0)
    target = torch.tensor([0.3, -0.8])
    best = head.probabilities(target).clamp_min(1e-30).log().requires_grad_()
    loss = head.loss(best, target)
    assert torch.autograd.grad(loss.sum(), best)[0].abs().max() < 1e-5
    assert bool((head.loss(best + torch.randn_like(best), target) > loss).all())
    logits = torch.randn(2, 31)
    expected = torch.nn.functional.cross_entropy(logits, head.probabilities(target), reduction="none")
    torch.testing.assert_close(head.loss(logits, target), expected)


def test_a_distributional_critic_regresses_every_member() -> None:
    critic = QEnsemble(CriticConfig(hidden=(32,), bins=51, value_min=-2.0, value_max=2.0), policy())
    obs, chunk, target = observations(16), torch.rand(16, 5, 2), torch.linspace(-1.5, 1.5, 16)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(150):
        loss = critic.regression(critic.output(critic.encode(obs), chunk), target)
        assert loss.shape == (2, 16)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    torch.testing.assert_close(critic(obs, chunk), target.expand(2, -1), atol=0.1, rtol=0)


# C51.


def test_the_projection_shares_mass_by_distance_and_clamps_to_the_support() -> None:
    head = C51(5, -2.0, 2.0)  # atoms -2, -1, 0, 1, 2
    probabilities = torch.tensor([[[0.1, 0.2, 0.3, 0.2, 0.2]]])
    atoms = torch.tensor([[-5.0, -0.75, 0.0, 0.5, 9.0]])
    found = head.project(probabilities, atoms)
    expected = [0.1, 0.2 * 0.75, 0.2 * 0.25 + 0.3 + 0.2 * 0.5, 0.2 * 0.5, 0.2]
    torch.testing.assert_close(found, torch.tensor([[expected]]))


def test_the_projection_keeps_mass_and_mean_of_atoms_within_the_support() -> None:
    head, probabilities = C51(101, -10.0, 10.0), torch.randn(3, 64, 101).softmax(-1)
    atoms = torch.randn(64, 1) + 0.7 * head.centers
    found = head.project(probabilities, atoms)
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 64))
    torch.testing.assert_close(head.expected(found), (probabilities * atoms).sum(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(head.project(probabilities, head.centers.expand(64, -1)), probabilities)


def test_a_scalar_target_is_a_mixture_of_its_neighbouring_atoms() -> None:
    head = C51(3, 0.0, 4.0)
    expected = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(head.probabilities(torch.tensor([1.5, 7.0])), expected)


# Other networks and inputs.


def test_a_critic_of_inverted_residuals_scores_chunks() -> None:
    critic = QEnsemble(CriticConfig(backbone="inverted_residual", hidden=(16, 16)), policy())
    obs, chunk = observations(4), torch.rand(4, 5, 2)
    values = critic(obs, chunk)
    assert values.shape == (2, 4) and not torch.equal(values[0], values[1])
    torch.testing.assert_close(critic.min_q(obs, chunk), values.amin(0))


def test_a_critic_may_observe_more_than_the_policy() -> None:
    critic = QEnsemble(CriticConfig(hidden=(16,), privileged_obs={"mass": 1}), policy(normalization="running"))
    obs = {"mass": torch.rand(4, 2, 1)}
    critic.encoder.update_stats(obs)
    assert critic(obs, torch.rand(4, 5, 2)).shape == (2, 4)
    with pytest.raises(UserError, match="no statistics"):
        QEnsemble(CriticConfig(privileged_obs={"mass": 1}), policy())


def test_privileged_observations_are_normalised_for_a_policy_that_sees_only_images() -> None:
    spec = PolicySpec({"image.front": (3, 24, 24)}, action_dim=2, action_horizon=1)
    actor = GaussianPolicy(GaussianConfig(vision=VisionConfig(widths=(16,), keypoints=4)), spec)
    critic = QEnsemble(CriticConfig(hidden=(16,), privileged_obs={"mass": 1}), actor)
    critic.encoder.update_stats({"mass": torch.tensor([5.0, 6.0]).view(2, 1, 1)})
    assert float(critic.encoder.normalizer.normalize(torch.tensor([[6.0]]))) == pytest.approx(1.0)


def test_invalid_critics_are_refused() -> None:
    for name in ("histogram", "backbone"):
        with pytest.raises(UserError, match=name):
            CriticConfig(**{name: "other"})
    for settings in ((1, 0.0, 1.0), (10, 1.0, 1.0)):
        with pytest.raises(UserError, match="at least 2 bins"):
            HLGauss(*settings)
    supports: list[dict[str, Any]] = [{}, {"value_min": 0.0}, {"value_max": 1.0}]
    for support in supports:
        with pytest.raises(UserError, match=r"critic.bins=11 needs critic.value_min and critic.value_max"):
            QEnsemble(CriticConfig(bins=11, **support), policy())
