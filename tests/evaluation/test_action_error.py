"""Tests of the errors of predicted actions on recorded episodes, computed by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.action_error import action_error
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.spec import HIDDEN_STATE


class Repeat(Policy):
    """Predicts that the state, which is the action at the time, stays as it is."""

    name = "repeat"

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {"state": (1,)} | ({HIDDEN_STATE: (1,)} if hidden else {})
        self.spec = PolicySpec(shapes, 1, horizon=3, action_horizon=2)
        self.seen: list[Any] = []

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Any = None) -> Tensor:
        assert deterministic
        if HIDDEN_STATE in obs:
            self.seen.append(obs[HIDDEN_STATE][:, 0, 0].tolist())
        return obs["state"][:, -1:].expand(-1, 3, -1)

    def next_hidden(self, obs: Observation) -> Tensor:
        return obs[HIDDEN_STATE] + 1


def ramps(*lengths: int) -> Episodes:
    """Episodes whose state and action count the frames."""
    frames = [np.arange(length, dtype=np.float32)[:, None] for length in lengths]
    return Episodes.from_list([Episode({"state": x, "action": x}) for x in frames], 0.1, {"action": ("lift [m]",)})


def test_every_recorded_action_is_predicted_once_from_the_state_of_its_decision() -> None:
    """Two actions per decision on a ramp: errors 0, 1, 0, 1, ...; an episode of five frames ends within a chunk."""
    error = action_error(Repeat(), ramps(4, 5))
    np.testing.assert_allclose(error.errors, [[2 / 4], [2 / 5]])
    (interval,) = error.by_entry().values()
    assert list(error.by_entry()) == ["lift [m]"] and interval.estimate == pytest.approx(0.45)
    assert interval.low < 0.45 < interval.high
    spread = np.std([0, 1, 2, 3, 0, 1, 2, 3, 4])
    assert error.summary()["action_error"] == pytest.approx(0.45 / spread)


def test_a_recurrent_policy_keeps_its_memory_within_an_episode() -> None:
    policy = Repeat(hidden=True)
    action_error(policy, ramps(2, 5))
    assert policy.seen == [[0.0, 0.0], [1.0], [2.0]]


def test_one_episode_has_no_interval_and_a_constant_entry_keeps_its_unit() -> None:
    data = ramps(4)
    still = action_error(Repeat(), Episodes(**{**vars(data), "arrays": {**data.arrays, "action": np.ones((4, 1))}}))
    assert still.summary()["action_error"] == pytest.approx(np.mean([1, 1, 1, 1]) * 1.0)
    assert still.summary()["action_error_low"] is None


def test_episodes_of_other_sizes_are_refused() -> None:
    data = ramps(4)
    wide = {**data.arrays, "state": torch.zeros(4, 2).numpy()}
    with pytest.raises(UserError, match=r"requires 'state' of shape \(1,\), but the dataset has \(2,\)"):
        action_error(Repeat(), Episodes(**{**vars(data), "arrays": wide}))
