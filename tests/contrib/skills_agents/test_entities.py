"""Tests of set observations: order invariance, variable size, empty slots, and use in policies."""

from __future__ import annotations

import pytest
import torch
from composed_rules import check_what_any_parent_knows_serves_critics_and_actors
from foreign_env import check_keeps_its_shape
from torch.testing import assert_close

from robopolicy.contrib.skills_agents.set_encoder import EntityConfig, EntityNet
from robopolicy.errors import UserError
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.spec import PolicySpec

SMALL_SETTINGS = {"width": 16, "heads": 2, "layers": 2, "features": 5}
SMALL = EntityConfig(**SMALL_SETTINGS)
OBSERVATION = {"state": (2,), "entities.others": (3, 4)}


def net() -> EntityNet:
    torch.manual_seed(0)
    return EntityNet((3, 4), SMALL)


def spec() -> PolicySpec:
    return PolicySpec(observation=OBSERVATION, obs_horizon=1, action_dim=2, horizon=1)


def test_features_ignore_the_order_of_the_entities():
    entities = torch.randn(6, 3, 4)
    for order in ((2, 0, 1), (1, 0, 2)):
        assert_close(net()(entities), net()(entities[:, list(order)]), atol=1e-6, rtol=1e-5)


def test_a_network_accepts_more_entities_than_in_its_specification():
    entities = torch.randn(6, 5, 4)
    features = net()(entities)
    assert features.shape == (6, 5) and bool(features.isfinite().all())
    assert not torch.allclose(features, net()(entities[:, :3]))


def test_a_row_of_zeros_is_an_empty_slot():
    entities = torch.randn(6, 3, 4)
    padded = torch.cat([entities[:, :1], torch.zeros(6, 2, 4), entities[:, 1:]], 1)
    assert_close(net()(padded), net()(entities), atol=1e-6, rtol=1e-5)


def test_an_empty_set_has_zero_features_and_finite_gradients():
    model, entities = net(), torch.randn(4, 3, 4)
    entities[1] = 0
    features = model(entities)
    assert not features[1].any() and bool(features[0].any())
    features.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_entities_do_not_interact_without_layers():
    """Without layers, the output is a weighted mean of terms that each depend on one entity."""
    torch.manual_seed(0)
    alone, entities = EntityNet((3, 4), EntityConfig(width=16, heads=2, layers=0, features=5)), torch.randn(1, 3, 4)
    assert len(list(alone.blocks)) == 0
    embedded = alone.embed(entities)
    shares = ((alone.key(embedded) @ alone.query) / 4).softmax(-1)
    assert_close(alone(entities), alone.project((shares[..., None] * embedded).sum(1)))


def test_each_entity_feature_has_its_own_scale_from_the_data():
    model = net()
    model.fit(torch.tensor([0.0, -1, 0, 0] * 3), torch.tensor([2.0, 1, 4, 0] * 3))
    assert_close(model.centre, torch.tensor([1.0, 0, 2, 0]))
    assert_close(model.scale, torch.tensor([1.0, 1, 2, 1]))  # a constant feature has scale 1
    with pytest.raises(UserError, match="not finite"):
        model.fit(torch.zeros(12), torch.full((12,), torch.nan))


def test_set_features_are_concatenated_and_receive_gradients():
    model = ObservationEncoder(OBSERVATION, normalization="minmax", encoders={"entities": SMALL_SETTINGS})
    model.fit_normalizer(
        {"state": {"min": [-1, -1], "max": [1, 1]}, "entities.others": {"min": [-2.0] * 12, "max": [2.0] * 12}}
    )
    obs = {"state": torch.rand(4, 2, 2), "entities.others": torch.randn(4, 2, 3, 4)}
    features = model(obs)
    assert features.shape == (4, 2, 7) and model.feature_dim == 7
    assert_close(features[..., :2], obs["state"])
    features.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.entities.parameters())
    with pytest.raises(UserError, match=r"lack the observation keys \['entities.others'\]"):
        model.fit_normalizer({"state": {"min": [-1, -1], "max": [1, 1]}})


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_a_policy_accepts_more_agents_than_in_its_specification(head: str):
    torch.manual_seed(0)
    if head == "gaussian":
        policy = GaussianPolicy(GaussianConfig(encoders={"entities": SMALL_SETTINGS}), spec())
    else:
        policy = FlowPolicy(
            FlowConfig(encoders={"entities": SMALL_SETTINGS}, hidden=(16,), normalization="identity"), spec()
        )
    obs = {"state": torch.randn(4, 1, 2), "entities.others": torch.randn(4, 1, 5, 4)}
    generator = torch.Generator().manual_seed(0)
    action = policy.act(obs, deterministic=True, generator=generator)
    shuffled = obs | {"entities.others": obs["entities.others"][:, :, torch.randperm(5)]}
    again = policy.act(shuffled, deterministic=True, generator=torch.Generator().manual_seed(0))
    assert action.shape == (4, 1, 2)
    assert_close(action, again, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EntityNet((4,), SMALL), "shape"),
        (lambda: EntityConfig(width=10, heads=4), r"entities\.width 10 must be a multiple of entities\.heads 4\."),
        (lambda: EntityConfig(layers=-1), "layers must be at least 0"),
    ],
)
def test_invalid_sizes_are_refused(make, message: str):
    with pytest.raises(UserError, match=message):
        make()


def test_entity_statistics_of_any_parent_serve_critics_and_actors() -> None:
    check_what_any_parent_knows_serves_critics_and_actors(({"state": (3,)}, {"entities.e": (4, 5)}))


def test_sets_of_foreign_environments_keep_their_shape() -> None:
    check_keeps_its_shape("entities.others")
