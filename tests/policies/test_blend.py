"""Tests of the joint velocity of parents with different horizons, and of chunks integrated along it."""

import pytest
import torch
from composition_forms import network, observations
from torch import Tensor

from robopolicy.policies.composition.joint_field import JointField
from robopolicy.policies.wrappers.composed import compose


def double(x: Tensor, t: Tensor) -> Tensor:
    return 2 * x


def later(x: Tensor, t: Tensor) -> Tensor:
    return x + t[:, None, None]


@pytest.mark.parametrize("horizons", [(4, 4), (2, 4)])
@pytest.mark.parametrize("weight", [1.0, 0.0, 0.3, -0.5])
def test_velocities_are_weighted_on_the_common_horizon(horizons: tuple[int, int], weight: float) -> None:
    blend = JointField([double, later], horizons, private=(0, 0), nominal=(0.3, 0.7))
    x, t = torch.randn(3, 4, 2), torch.rand(3)
    mixed, shared = blend.mix(blend.velocities(x, t), (weight, 1 - weight)), slice(0, horizons[0])
    expected = weight * 2 * x + (1 - weight) * (x + t[:, None, None])
    torch.testing.assert_close(mixed[:, shared], expected[:, shared])
    assert torch.equal(mixed[:, horizons[0] :], later(x, t)[:, horizons[0] :])
    if weight == 1.0:
        assert torch.equal(mixed[:, shared], double(x, t)[:, shared])


@torch.no_grad()
@pytest.mark.parametrize("weight", [0.3, 1 - 1e-5])  # with weight 1 the parent acts alone
def test_chunk_is_integrated_along_the_weighted_parent_velocities(weight: float) -> None:
    parents, obs, noise = [network("flow", 0), network("flow", 1)], observations(3), torch.randn(3, 4, 2)
    found, x = compose(parents, weights=(weight, 1 - weight)).decode(obs, noise), noise
    for k in range(4):
        first, second = (parent.field(obs, x, torch.full((3,), k / 4)) for parent in parents)
        assert float((first - second).abs().mean()) > 0.1
        x = parents[0].clip(x + (weight * first + (1 - weight) * second) / 4)
    torch.testing.assert_close(found, parents[0].action_normalizer.denormalize(x), atol=1e-5, rtol=1e-5)
    near, far = (float((parent.decode(obs, noise) - found).abs().max()) for parent in parents)
    assert far > 0.05 and (near < 1e-3) == (weight > 0.9)
