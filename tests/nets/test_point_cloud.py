"""Tests of point-cloud observations: one network per cloud, invariant to order and repetition, scaled by the data."""

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.point_cloud import PointCloudConfig, PointCloudNet

SMALL = PointCloudConfig(widths=(8, 16), features=5)
OBSERVATION = {"state": (2,), "point_cloud.front": (6, 3), "point_cloud.wrist": (4, 3)}


def encoder(normalization: str = "minmax") -> ObservationEncoder:
    return ObservationEncoder(OBSERVATION, normalization=normalization, point_cloud=SMALL)


def statistics() -> dict:
    clouds = {key: {"min": [0.0] * 3 * n, "max": [2.0, 1.0, 1.0] * n} for key, n in (("front", 6), ("wrist", 4))}
    return {"state": {"min": [-1, -1], "max": [1, 1]}, **{f"point_cloud.{key}": value for key, value in clouds.items()}}


def test_features_ignore_the_order_and_the_repetition_of_points() -> None:
    net = PointCloudNet((6, 3), SMALL)
    cloud = torch.randn(2, 6, 3)
    features = net(cloud)
    assert features.shape == (2, 5) and net.feature_dim == 5
    assert torch.equal(features, net(cloud[:, torch.randperm(6)]))
    assert torch.equal(features, net(torch.cat([cloud, cloud[:, :3]], 1)))
    assert not torch.allclose(features, net(cloud[:, :2]))


def test_all_coordinates_share_one_scale_from_the_data() -> None:
    net = PointCloudNet((2, 3), SMALL)
    low, high = torch.tensor([[0.0, 0, 0], [1, 0, 0]]), torch.tensor([[1.0, 1, 1], [4, 1, 1]])
    net.fit(low, high)
    assert net.centre.tolist() == [2.0, 0.5, 0.5] and float(net.scale) == 2.0  # type: ignore[operator, arg-type]
    metres = torch.rand(3, 2, 3)
    other = PointCloudNet((2, 3), SMALL)
    other.load_state_dict(net.state_dict() | {"centre": torch.zeros(3), "scale": torch.ones(())})
    torch.testing.assert_close(net(metres), other((metres - torch.tensor([2.0, 0.5, 0.5])) / 2))


def test_cloud_features_follow_vectors_and_have_gradients() -> None:
    model = encoder()
    model.fit_normalizer(statistics())
    obs = {key: torch.rand(4, 2, *shape) for key, shape in OBSERVATION.items()}
    features = model(obs)
    assert features.shape == (4, 2, 2 + 5 + 5) and model.feature_dim == 12
    assert torch.equal(features[..., :2], obs["state"])
    changed = model(obs | {"point_cloud.wrist": torch.rand(4, 2, 4, 3)})
    assert torch.equal(changed[..., :7], features[..., :7]) and not torch.equal(changed[..., 7:], features[..., 7:])
    features.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.clouds.parameters())
    torch.testing.assert_close(model({k: v[1:2] for k, v in obs.items()}), features[1:2], atol=1e-6, rtol=1e-5)


def test_cloud_statistics_are_required_for_dataset_normalisation() -> None:
    known = statistics()
    del known["point_cloud.wrist"]
    with pytest.raises(UserError, match=r"lack the observation keys \['point_cloud.wrist'\]"):
        encoder().fit_normalizer(known)
    encoder("running").fit_normalizer({})  # without data, coordinates are in metres
    encoder("identity").fit_normalizer({})


@pytest.mark.parametrize("shape", [(6,), (6, 4), (2, 6, 3)])
def test_shapes_that_are_no_point_cloud_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"shape \(points, 3\)"):
        PointCloudNet(shape, SMALL)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="at least one width"):
        PointCloudConfig(widths=())
