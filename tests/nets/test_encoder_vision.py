"""Tests of the observation encoder: key order, crops, camera networks, embeddings of goals and instructions."""

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.nets.encoder import EmbeddingConfig, ObservationEncoder, without_embeddings
from robopolicy.nets.vision import CameraNet, PatchTransformer, SpatialSoftmax, VisionConfig

SMALL = VisionConfig(widths=(16, 32), keypoints=4, crop=0.75)
VIT = VisionConfig(kind="vit", vit_patch=4, vit_width=16, vit_features=8, crop=0.75)
both_kinds = pytest.mark.parametrize("vision", [SMALL, VIT], ids=["resnet", "vit"])


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_vector_keys_are_concatenated_in_sorted_order() -> None:
    encoder = ObservationEncoder({"state": (2,), "goal": (3,)}, normalization="identity")
    obs = {"state": torch.ones(4, 2, 2), "goal": torch.zeros(4, 2, 3)}
    features = encoder(obs)
    assert features.shape == (4, 2, 5) and encoder.feature_dim == 5
    assert features[0, 0].tolist() == [0, 0, 0, 1, 1]


def test_scalars_and_matrices_are_flattened() -> None:
    encoder = ObservationEncoder({"phase": (), "pose": (2, 2)}, normalization="identity")
    features = encoder({"phase": torch.zeros(3, 1), "pose": torch.arange(12.0).view(3, 1, 2, 2)})
    assert features[1, 0].tolist() == [0, 4, 5, 6, 7]


def test_statistics_apply_to_the_dimensions_of_their_key() -> None:
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


def test_running_statistics_start_from_dataset_statistics_if_given() -> None:
    encoder = ObservationEncoder({"state": (2,)}, normalization="running")
    encoder.fit_normalizer({"action": {"min": [-1], "max": [1]}})  # a simulator has only action bounds
    assert not bool(encoder.normalizer.fitted)
    encoder.fit_normalizer({"state": {"mean": [1, 2], "std": [3, 4], "count": [10]}})
    assert encoder({"state": torch.tensor([[[4.0, 6.0]]])}).flatten().tolist() == [1, 1]


@both_kinds
def test_image_features_are_deterministic_and_independent_of_other_rows(vision: VisionConfig) -> None:
    encoder = ObservationEncoder({"state": (2,), "image.a.b": (3, 32, 32)}, normalization="identity", vision=vision)
    obs = {"state": torch.randn(4, 2, 2), "image.a.b": images(4, 2, 3, 32, 32)}
    features = encoder(obs)
    assert features.shape == (4, 2, 2 + 8) and encoder.feature_dim == 10
    assert torch.equal(features, encoder(obs))
    alone = encoder({key: value[1:2] for key, value in obs.items()})
    torch.testing.assert_close(alone, features[1:2], atol=1e-6, rtol=1e-5)


def test_encoder_with_only_images_needs_no_statistics() -> None:
    encoder = ObservationEncoder({"image.a": (3, 32, 32)}, normalization="minmax", vision=SMALL)
    encoder.fit_normalizer({})
    assert bool(encoder.normalizer.fitted)
    assert encoder({"image.a": images(2, 1, 3, 32, 32)}).shape == (2, 1, 8)


@both_kinds
def test_each_camera_has_its_own_network_with_gradients(vision: VisionConfig) -> None:
    observation = {"image.a": (3, 32, 32), "image.b": (3, 40, 24)}
    encoder = ObservationEncoder(observation, normalization="identity", vision=vision)
    obs = {key: images(2, 1, *shape) for key, shape in observation.items()}
    first, second = encoder(obs).split(8, -1)
    assert torch.equal(encoder(obs | {"image.b": images(2, 1, 3, 40, 24) // 2})[..., :8], first)
    (first.square().sum() + second.square().sum()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in encoder.parameters())


def test_published_resnet_uses_group_norms_of_sixteen_channels_and_no_batch_norm() -> None:
    net = CameraNet((3, 64, 64), VisionConfig(widths=(64, 128, 256, 512), blocks=2))
    norms = [part for part in net.modules() if isinstance(part, torch.nn.GroupNorm)]
    assert len(norms) == 1 + 4 * 2 * 2
    assert all(norm.num_channels == 16 * norm.num_groups for norm in norms)
    assert not [part for part in net.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    assert net.feature_dim == 2 * 32


@pytest.mark.parametrize("size", [(96, 96), (64, 48), (87, 86), (16, 17)])
def test_vision_transformer_returns_one_token_per_patch(size: tuple[int, int]) -> None:
    net = PatchTransformer(3, size, VisionConfig(kind="vit", vit_width=8))
    tokens = net(torch.randn(2, 3, *size))
    assert tokens.shape == (2, net.count, 8)
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, net.count), atol=1e-5, rtol=0)  # normalised


def test_vision_transformer_features_depend_on_position() -> None:
    net = CameraNet((3, 32, 32), VisionConfig(kind="vit", vit_width=16, vit_features=8, crop=1.0))
    left, right = torch.zeros(2, 1, 3, 32, 32, dtype=torch.uint8).unbind(0)
    left[..., 8:24, :16], right[..., 8:24, 16:] = 255, 255
    assert float((net(left) - net(right)).detach().abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "vitt"}, "Did you mean 'vit'"),
        ({"widths": (20,)}, "multiples of 16"),
        ({"vit_patch": 5}, r"vision\.vit_patch must be even"),
        ({"vit_width": 10}, "multiple of vit_heads"),
    ],
)
def test_bad_camera_settings_are_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        VisionConfig(**settings)


def test_images_too_small_for_the_patches_are_refused() -> None:
    with pytest.raises(UserError, match="at least 16 pixels"):
        CameraNet((3, 16, 16), VisionConfig(kind="vit"))


@pytest.mark.parametrize(
    ("size", "widths"),
    [((4, 4), (32, 64, 128)), ((16, 16), (32, 64, 128)), ((12, 96), (32,) * 3), ((32, 32), (16,) * 4)],
)
def test_keypoint_features_of_small_images_differ_between_images(
    size: tuple[int, int], widths: tuple[int, ...]
) -> None:
    net = CameraNet((3, *size), VisionConfig(widths=widths))
    features = net(torch.randint(0, 256, (4, 3, *size), dtype=torch.uint8))
    assert float(features.std(0).min()) > 0


@both_kinds
def test_crops_are_random_with_augmentation_and_central_otherwise(vision: VisionConfig) -> None:
    encoder = ObservationEncoder({"image.a": (3, 32, 32)}, normalization="identity", vision=vision)
    obs = {"image.a": images(4, 1, 3, 32, 32)}
    augmented = [encoder(obs, augment=True, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(augmented[0], augmented[1]) and not torch.equal(augmented[0], augmented[2])
    margin = {"image.a": obs["image.a"].clone()}
    margin["image.a"][..., :4, :] = 0  # outside the central 24 pixels
    assert torch.equal(encoder(margin), encoder(obs))
    assert not torch.equal(encoder(margin, augment=True), encoder(obs, augment=True))


def test_random_crops_are_windows_of_the_image_and_follow_the_generator() -> None:
    camera = CameraNet((3, 16, 16), SMALL)
    image = images(5, 3, 16, 16)
    crop = camera._random_crop(image, torch.Generator().manual_seed(3))
    assert torch.equal(crop, camera._random_crop(image, torch.Generator().manual_seed(3)))
    for i in range(5):
        windows = image[i].unfold(1, 12, 1).unfold(2, 12, 1)  # (3, 5, 5, 12, 12)
        assert bool((windows == crop[i][:, None, None]).flatten(3).all(3).all(0).any())


def test_centre_crop_is_central() -> None:
    camera = CameraNet((3, 16, 16), SMALL)
    image = images(1, 3, 16, 16)
    assert torch.equal(camera._centre_crop(image), image[..., 2:14, 2:14])


def test_spatial_softmax_finds_the_brightest_pixel() -> None:
    pool = SpatialSoftmax(1, 1)
    torch.nn.init.constant_(pool.heads.weight, 1.0)
    x = torch.zeros(1, 1, 5, 9)
    x[0, 0, 4, 2] = 50.0
    torch.testing.assert_close(pool(x), torch.tensor([[-0.5, 1.0]]), atol=1e-4, rtol=0)


LANGUAGE = {"state": (2,), "embedding.task": (5,), "embedding.goal": (2, 2)}


def language(**config: float) -> tuple[ObservationEncoder, dict[str, torch.Tensor]]:
    settings = EmbeddingConfig(**({"width": 3} | config))  # type: ignore[arg-type]
    encoder = ObservationEncoder(LANGUAGE, normalization="minmax", embedding=settings)
    encoder.fit_normalizer({"state": {"min": [-2, -2], "max": [2, 2]}})
    return encoder, {key: torch.randn(64, 2, *shape) for key, shape in LANGUAGE.items()}


def test_each_embedding_has_its_own_projection_and_is_not_normalised() -> None:
    encoder, obs = language()
    features = encoder(obs)
    assert features.shape == (64, 2, 2 + 2 * 3) and encoder.feature_dim == 8
    goal, task = (encoder.projections[key] for key in ("embedding/goal", "embedding/task"))
    assert torch.equal(features[..., :2], obs["state"] / 2)
    torch.testing.assert_close(features[..., 2:5], goal(obs["embedding.goal"].flatten(2)))
    torch.testing.assert_close(features[..., 5:], task(obs["embedding.task"]))


def test_encoder_with_only_embeddings_needs_no_statistics() -> None:
    encoder = ObservationEncoder({"embedding.task": (5,)}, normalization="running")
    encoder.fit_normalizer({})
    encoder.update_stats({"embedding.task": torch.randn(3, 1, 5)})
    assert bool(encoder.normalizer.fitted) and encoder({"embedding.task": torch.randn(3, 1, 5)}).shape == (3, 1, 64)


def test_dropout_drops_all_embeddings_of_a_row_and_only_with_augmentation() -> None:
    encoder, obs = language(dropout=0.25)
    full, empty = encoder(obs), encoder(without_embeddings(obs))
    assert torch.equal(full, encoder(obs)) and torch.equal(full[..., :2], empty[..., :2])
    dropped = []
    for seed in range(40):
        seen = encoder(obs, augment=True, generator=torch.Generator().manual_seed(seed))
        hidden = (seen == empty).flatten(1).all(1)
        assert bool((hidden | (seen == full).flatten(1).all(1)).all())
        dropped.append(hidden)
    fraction = torch.stack(dropped).float().mean()
    assert abs(float(fraction) - 0.25) < 3 * (0.25 * 0.75 / (40 * 64)) ** 0.5
    again = encoder(obs, augment=True, generator=torch.Generator().manual_seed(0))
    assert torch.equal((again == empty).flatten(1).all(1), dropped[0])


def test_dropout_does_not_hide_nan_embeddings() -> None:
    encoder, obs = language(dropout=0.99)
    obs["embedding.task"][3] = float("nan")
    assert encoder(obs, augment=True).isnan().flatten(1).any(1).nonzero().flatten().tolist() == [3]
