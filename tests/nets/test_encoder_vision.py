"""The observation encoder: key order, crops, spatial softmax."""

from __future__ import annotations

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.vision import CameraNet, SpatialSoftmax, VisionConfig

SMALL = VisionConfig(widths=(16, 32), keypoints=4, crop=0.75)


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_vector_keys_are_concatenated_in_sorted_order_whatever_the_dictionary() -> None:
    encoder = ObservationEncoder({"state": (2,), "goal": (3,)}, normalization="identity")
    obs = {"state": torch.ones(4, 2, 2), "goal": torch.zeros(4, 2, 3)}
    features = encoder(obs)
    assert features.shape == (4, 2, 5) and encoder.feature_dim == 5
    assert features[0, 0].tolist() == [0, 0, 0, 1, 1]


def test_scalars_and_matrices_are_flattened() -> None:
    encoder = ObservationEncoder({"phase": (), "pose": (2, 2)}, normalization="identity")
    features = encoder({"phase": torch.zeros(3, 1), "pose": torch.arange(12.0).view(3, 1, 2, 2)})
    assert features[1, 0].tolist() == [0, 4, 5, 6, 7]


def test_statistics_go_to_the_dimensions_of_their_key() -> None:
    encoder = ObservationEncoder({"state": (2,), "goal": (1,)}, normalization="minmax")
    encoder.fit_normalizer({"state": {"min": [0, 10], "max": [2, 30]}, "goal": {"min": [-4], "max": [4]}})
    features = encoder({"state": torch.tensor([[[2.0, 20.0]]]), "goal": torch.tensor([[[-4.0]]])})
    assert features.flatten().tolist() == [-1, 1, 0]


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({}, "lack the observation keys"),
        ({"state": {"min": [0, 0]}}, "lack 'max'"),
        ({"state": {"min": [0], "max": [1]}}, "has 1 values, expected 2"),
        ({"state": {"min": [0, 0], "max": [1, float("nan")]}}, "not finite"),
    ],
)
def test_bad_statistics_are_refused_in_one_line(statistics: dict, message: str) -> None:
    encoder = ObservationEncoder({"state": (2,)}, normalization="minmax")
    with pytest.raises(UserError, match=message):
        encoder.fit_normalizer(statistics)


def test_running_statistics_start_from_a_dataset_where_there_is_one() -> None:
    encoder = ObservationEncoder({"state": (2,)}, normalization="running")
    encoder.fit_normalizer({"action": {"min": [-1], "max": [1]}})  # a simulator knows the action bounds only
    assert not bool(encoder.normalizer.fitted)
    encoder.fit_normalizer({"state": {"mean": [1, 2], "std": [3, 4], "count": [10]}})
    assert encoder({"state": torch.tensor([[[4.0, 6.0]]])}).flatten().tolist() == [1, 1]


def test_image_features_do_not_depend_on_batch_neighbours_and_are_deterministic() -> None:
    encoder = ObservationEncoder({"state": (2,), "image.a.b": (3, 32, 32)}, normalization="identity", vision=SMALL)
    obs = {"state": torch.randn(4, 2, 2), "image.a.b": images(4, 2, 3, 32, 32)}
    features = encoder(obs)
    assert features.shape == (4, 2, 2 + 8) and encoder.feature_dim == 10
    assert torch.equal(features, encoder(obs))
    alone = encoder({key: value[1:2] for key, value in obs.items()})
    torch.testing.assert_close(alone, features[1:2], atol=1e-6, rtol=1e-5)


def test_an_encoder_of_images_alone_needs_no_statistics() -> None:
    encoder = ObservationEncoder({"image.a": (3, 32, 32)}, normalization="minmax", vision=SMALL)
    encoder.fit_normalizer({})
    assert bool(encoder.normalizer.fitted)
    assert encoder({"image.a": images(2, 1, 3, 32, 32)}).shape == (2, 1, 8)


def test_random_crops_are_windows_of_the_image_and_follow_the_generator() -> None:
    camera = CameraNet((3, 16, 16), SMALL)
    image = images(5, 3, 16, 16)
    crop = camera._random_crop(image, torch.Generator().manual_seed(3))
    assert torch.equal(crop, camera._random_crop(image, torch.Generator().manual_seed(3)))
    for i in range(5):
        windows = image[i].unfold(1, 12, 1).unfold(2, 12, 1)  # (3, 5, 5, 12, 12)
        assert bool((windows == crop[i][:, None, None]).flatten(3).all(3).all(0).any())


def test_the_centre_crop_is_central() -> None:
    camera = CameraNet((3, 16, 16), SMALL)
    image = images(1, 3, 16, 16)
    assert torch.equal(camera._centre_crop(image), image[..., 2:14, 2:14])


def test_spatial_softmax_finds_the_brightest_pixel() -> None:
    pool = SpatialSoftmax(1, 1)
    torch.nn.init.constant_(pool.heads.weight, 1.0)
    x = torch.zeros(1, 1, 5, 9)
    x[0, 0, 4, 2] = 50.0
    torch.testing.assert_close(pool(x), torch.tensor([[-0.5, 1.0]]), atol=1e-4, rtol=0)
