import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.data.compatibility import recorded_spec
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.statistics import QUANTILES, dataset_statistics, statistics_to_json, vector_statistics
from robopolicy.errors import UserError
from robopolicy.training.compose import compose_config
from robopolicy.training.learner import build_learner


def make_data() -> Episodes:
    rng = np.random.default_rng(0)
    arrays = {
        "state": rng.normal(3.0, 2.0, (50, 4)).astype(np.float32),
        "action": rng.normal(size=(50, 2)).astype(np.float32),
        "reward": rng.normal(size=50).astype(np.float32),
        "image.front": rng.integers(0, 200, (50, 3, 6, 5), dtype=np.uint8),
    }
    return Episodes.from_list([Episode(arrays)], 0.1)


def test_vector_statistics_equal_numpy() -> None:
    data = make_data()
    stats, state = dataset_statistics(data)["state"], data.arrays["state"].astype(np.float64)
    for name in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(stats[name], getattr(state, name)(0), rtol=1e-12)
    for name, q in QUANTILES.items():
        np.testing.assert_allclose(stats[name], np.quantile(state, q, axis=0), rtol=1e-12)
    assert stats["count"].tolist() == [50]
    assert dataset_statistics(data)["reward"]["mean"].shape == (1,)


def test_image_statistics_equal_numpy_per_channel() -> None:
    data = make_data()
    stats = dataset_statistics(data)["image.front"]
    pixels = data.arrays["image.front"].transpose(1, 0, 2, 3).reshape(3, -1) / 255.0
    for name in ("mean", "std", "min", "max"):
        assert stats[name].shape == (3, 1, 1)
        np.testing.assert_allclose(stats[name].reshape(3), getattr(pixels, name)(1), atol=1e-9)
    for name, q in QUANTILES.items():
        np.testing.assert_allclose(stats[name].reshape(3), np.quantile(pixels, q, axis=1), atol=1e-12)


def test_statistics_survive_json() -> None:
    stats = dataset_statistics(make_data())
    back = json.loads(json.dumps(statistics_to_json(stats)))
    assert all(np.array_equal(back[key][name], stats[key][name]) for key in stats for name in stats[key])


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match="finite"):
        vector_statistics(np.array([[1.0], [np.inf]]))


def test_numbers_whose_squares_overflow_are_refused() -> None:
    """Their standard deviation is infinite, which JSON cannot hold; found by mutated npz files."""
    with pytest.raises(UserError, match=r"finite squares, found 1e\+200"):
        vector_statistics(np.array([[1e200], [-1e200], [0.0]]))


@pytest.mark.parametrize("representation", ["absolute", "delta"])
def test_normalisers_are_fitted_to_the_frames_that_imitation_learns_from(representation: str) -> None:
    """Where a person took over from a policy, the actions of the policy used to set the range."""
    rng = np.random.default_rng(0)
    person = np.arange(40) % 20 >= 10
    state = rng.uniform(-1, 1, (40, 2)).astype(np.float32)
    action = (state + np.where(person[:, None], rng.uniform(-0.02, 0.02, (40, 2)), 5.0)).astype(np.float32)
    arrays = {"state": state, "action": action, "policy_action": action, "intervention": person}
    names = {"state": ("a", "b"), "action": ("a", "b")}
    mixed = Episodes(arrays, np.array([20, 40]), ("", ""), np.array([-1, -1]), 0.1, names=names)
    alone = mixed.demonstrated()

    def fitted(data: Episodes) -> dict[str, Any]:
        settings = ["task=none", "algorithm=bc", "policy=gaussian", "policy.hidden=[8]", "chunk.horizon=4"]
        settings += ["chunk.action_horizon=2", "budget.updates=1", f"task.action_representation={representation}"]
        policy, *_ = build_learner(compose_config(settings), data, recorded_spec(data), torch.device("cpu"))
        return {name: value for name, value in policy.state_dict().items() if "normalizer" in name}

    assert alone.num_episodes == 2 and fitted(mixed)
    for name, value in fitted(alone).items():
        assert torch.equal(fitted(mixed)[name], value), name
    whole = replace(mixed, arrays={key: array for key, array in arrays.items() if key in ("state", "action")})
    assert any(not torch.equal(fitted(whole)[name], value) for name, value in fitted(alone).items())
