"""Tests of the out-of-distribution detector: share of data inside, rejected points, and storage in a file."""

import math

import numpy as np
import pytest
import torch

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.data.ood_detector import KINDS, OODDetector, OODDetectorConfig, fit_ood_detector, load_ood_detector
from robopolicy.errors import UserError


def normal_points(count: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) + shift


def make_data(episodes: int = 20, seed: int = 0) -> Episodes:
    rng = np.random.default_rng(seed)

    def one() -> Episode:
        state, action = rng.normal(size=(60, 2)).astype(np.float32), rng.normal(size=(60, 1)).astype(np.float32)
        return Episode({"state": state, "pose": 5 + state, "action": action, "reward": np.zeros(60, np.float32)})

    return Episodes.from_list([one() for _ in range(episodes)], 0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [20, 1])
def test_in_distribution_points_are_inside_and_shifted_points_outside(kind: str, groups: int) -> None:
    """With many episodes some episodes are held out; with a single one each point is held out in turn."""
    data = normal_points(2000, 0)
    gate = OODDetector.fit(data, np.arange(2000) % groups, OODDetectorConfig(kind=kind))
    assert float(gate.inside(normal_points(2000, 1)).float().mean()) == pytest.approx(0.95, abs=0.025)
    assert float(gate.inside(normal_points(500, 2, shift=4.0)).float().mean()) < 0.01
    assert not gate.inside(torch.full((1, 3), 100.0)).any()


def test_scores_equal_hand_computed_values() -> None:
    """After scaling the two points are 2 apart, so each adds 1 to its own support and exp(-4) to the other's."""
    points = torch.tensor([[0.0, 0.0], [10.0, 0.0]])
    config = OODDetectorConfig(bandwidth=math.sqrt(0.5), neighbours=1, points=2)
    gate = OODDetector(config, (), points.min(0).values, points.max(0).values, torch.tensor([[-1.0, 0], [1, 0]]), 0.0)
    assert gate.score(points).exp() == pytest.approx([(1 + math.exp(-4)) / 2] * 2)
    gate.config = OODDetectorConfig(kind="neighbours", neighbours=2)
    assert gate.score(points).tolist() == [-2.0, -2.0]


def test_non_finite_points_are_outside() -> None:
    gate = OODDetector.fit(normal_points(100, 0), np.zeros(100, np.int64), OODDetectorConfig())
    assert gate.inside(torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, 0, 0]])).tolist() == [False, False, True]


def test_detector_does_not_depend_on_units() -> None:
    data, new = normal_points(500, 0), normal_points(100, 1)
    scale, shift = torch.tensor([1e3, 1e-2, 1.0]), torch.tensor([5.0, 0.0, -7.0])
    groups = np.arange(500) % 10
    plain = OODDetector.fit(data, groups, OODDetectorConfig()).inside(new)
    assert torch.equal(
        plain, OODDetector.fit(data * scale + shift, groups, OODDetectorConfig()).inside(new * scale + shift)
    )


def test_detector_survives_a_file_and_a_state_dict(tmp_path) -> None:
    data = make_data()
    gate, new = fit_ood_detector(data, OODDetectorConfig(kind="neighbours", points=100)), torch.randn(50, 5)
    gate.save(tmp_path / "gate.safetensors")
    other = OODDetector.load(tmp_path / "gate.safetensors")
    again = fit_ood_detector(make_data(seed=3))
    again.load_state_dict(gate.state_dict())
    for copy in (other, again):
        assert torch.equal(copy.score(new), gate.score(new)) and copy.threshold == gate.threshold
        assert copy.keys == ("pose", "state") and copy.config == gate.config


def test_points_have_the_layout_of_the_data(tmp_path) -> None:
    write_lerobot(make_data(), tmp_path / "data")
    gate = load_ood_detector(tmp_path / "data", keys=["pose"])
    obs = {"state": torch.zeros(1, 2), "pose": torch.tensor([[1.0, 2.0]])}
    assert gate.point(obs, torch.tensor([[3.0]])).tolist() == [[1.0, 2.0, 3.0]]


def test_mismatched_inputs_are_refused(tmp_path) -> None:
    data = make_data(2)
    gate = fit_ood_detector(data)
    with pytest.raises(UserError, match="'pose' is not observed"):
        gate.point({"state": torch.zeros(1, 2)}, torch.zeros(1, 1))
    with pytest.raises(UserError, match="needs 5 numbers, got 6"):
        gate.point({"state": torch.zeros(1, 2), "pose": torch.zeros(1, 2)}, torch.zeros(1, 2))
    with pytest.raises(UserError, match="the data has state, pose, expected image"):
        fit_ood_detector(data, keys=["image.top"])
    with pytest.raises(UserError, match="Did you mean 'kernel'"):
        OODDetectorConfig(kind="kernal")
    with pytest.raises(UserError, match="more than 5 data points"):
        OODDetector.fit(normal_points(3, 0), np.zeros(3, np.int64), OODDetectorConfig())
    (tmp_path / "other.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not an OOD detector"):
        load_ood_detector(tmp_path / "other.safetensors")
