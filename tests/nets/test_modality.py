"""Tests of encoders by key prefix: plugin encoders join features and normaliser in a fixed order."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.nets.encoder import Layout, ObservationEncoder
from robopolicy.nets.modality import ENCODERS, ModalityEncoder
from robopolicy.policies.heads.gaussian import GaussianConfig

OBSERVATION = {"touch.left": (4,), "embedding.task": (3,), "state": (2,), "heat.a": (2, 2), "touch.b": (4,)}
OBSERVATION |= {"image": (5,)}


@dataclass(frozen=True)
class TouchConfig:
    """Settings of the test encoders."""

    width: int = 3


class Touch(ModalityEncoder):
    """One layer per key, fitted to the bounds of the key."""

    config_class = TouchConfig
    attribute = "touches"
    statistics = "box"

    def __init__(self, shapes, config):
        super().__init__(shapes, config)
        self.feature_dim = len(shapes) * config.width

    def build(self, shape, config) -> nn.Module:
        layer = nn.Linear(shape[0], config.width)
        layer.fit = lambda low, high: layer.bias.data.copy_(high[: config.width])  # type: ignore[assignment]
        return layer


class Heat(ModalityEncoder):
    """The mean of a key, as an additional vector element."""

    config_class = TouchConfig
    attribute = "heats"
    statistics = "vector"

    def build(self, shape, config) -> None:
        return None

    def forward(self, obs, *, augment=False, generator=None) -> list[Tensor]:
        return [obs[key].mean((2, 3))[..., None] for key in self.observations]

    @classmethod
    def numbers(cls, shape) -> int:
        return 1


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ENCODERS.register("touch", Touch)
    ENCODERS.register("heat", Heat)
    yield
    for name in ("touch", "heat"):
        del ENCODERS._rows[name]


def test_keys_are_grouped_by_prefix() -> None:
    layout = Layout.of(OBSERVATION)
    assert layout.vectors == ("image", "state")  # without a dot, `image` is a vector
    assert layout.encoded == (
        ("heat", ("heat.a",)),
        ("touch", ("touch.b", "touch.left")),
        ("embedding", ("embedding.task",)),
    )
    assert layout.normalized == ("image", "state", "heat.a")


def test_plugin_encoder_joins_features_statistics_and_copied_stats() -> None:
    encoder = ObservationEncoder(OBSERVATION, normalization="minmax", encoders={"touch": {"width": 2}})
    ends = {"min": [-2.0] * 4, "max": [2.0] * 4}
    statistics = {"touch.left": ends, "touch.b": ends, "heat.a": {"min": [0.0], "max": [4.0]}}
    with pytest.raises(UserError, match=r"lack the observation keys \['image', 'touch.b', 'touch.left', 'heat.a'\]"):
        encoder.fit_normalizer({"state": {"min": [-1] * 2, "max": [1] * 2}})
    encoder.fit_normalizer(
        statistics | {"state": {"min": [-1] * 2, "max": [1] * 2}, "image": {"min": [-1] * 5, "max": [1] * 5}}
    )
    obs = {key: torch.rand(6, 2, *shape) for key, shape in OBSERVATION.items()}
    features = encoder(obs)
    assert features.shape == (6, 2, encoder.feature_dim) and encoder.feature_dim == 5 + 2 + 1 + 2 * 2 + 64
    torch.testing.assert_close(features[..., 7], obs["heat.a"].mean((2, 3)) / 2 - 1)
    assert encoder.columns() == {"image": slice(0, 5), "state": slice(5, 7), "heat.a": slice(7, 8)}
    assert {"touches.touch/left.weight", "touches.touch/b.bias"} <= set(encoder.state_dict())
    assert float(encoder.touches["touch/b"].bias.detach()[0]) == 2.0
    other = ObservationEncoder(OBSERVATION, normalization="minmax")
    other.copy_stats(encoder)
    assert torch.equal(other.normalizer.offset, encoder.normalizer.offset)


@pytest.mark.parametrize(
    ("encoders", "message"),
    [
        ({"tuch": {}}, "Unknown encoder 'tuch' in encoders. Did you mean 'touch'"),
        ({"touch": {"with": 2}}, "Unknown setting 'with' in encoders.touch"),
        ({"touch": {"width": "wide"}}, "encoders.touch.width must be"),
        ({"touch": 3}, "encoders.touch must be a mapping"),
        ({"image": {"kind": "vit"}}, "Encoder 'image' is set by vision"),
    ],
)
def test_invalid_encoder_settings_are_refused(encoders: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GaussianConfig(encoders=encoders)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "mlp", "backbone_options": {"modules": 2}}, "Backbone 'mlp' takes no backbone_options"),
        ({"backbone": "mpl"}, "Unknown backbone 'mpl'"),
    ],
)
def test_invalid_backbone_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GaussianConfig(**settings)
