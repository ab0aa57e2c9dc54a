"""Tests of the action support check of a deployment: the response to actions outside the support of the data."""

import numpy as np
import pytest
import torch

from robopolicy.data.ood_detector import OODDetector, OODDetectorConfig
from robopolicy.deploy.safety.ood import ActionOODCheck, ActionOODConfig
from robopolicy.errors import UserError

OBS, KNOWN, STRANGE = {"state": np.zeros(2), "image.top": np.zeros((3, 2, 2))}, np.zeros(1), np.full(1, 9.0)


def check(**config) -> ActionOODCheck:
    points = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    gate = OODDetector.fit(points, np.arange(500) % 10, OODDetectorConfig(), ("state",))
    return ActionOODCheck(gate, ActionOODConfig(**config))


@pytest.mark.parametrize(("response", "share"), [("hold", 1.0), ("slow", 0.3), ("refuse", 0.0)])
def test_unsupported_action_gets_the_fraction_of_the_configured_response(response: str, share: float) -> None:
    support = check(response=response)
    assert support.check(OBS, KNOWN).fraction == 1.0
    result = support.check(OBS, STRANGE)
    assert result.fraction == share and not result.hold and result.score < result.threshold


@pytest.mark.parametrize("response", ["hold", "slow", "refuse"])
def test_repeated_unsupported_actions_hold_the_robot_until_a_supported_one(response: str) -> None:
    support = check(response=response)
    assert [support.check(OBS, STRANGE).hold for _ in range(4)] == [False, False, True, True]
    assert not support.check(OBS, KNOWN).hold
    assert [support.check(OBS, STRANGE).hold for _ in range(3)] == [False, False, True]


def test_nan_actions_have_no_support() -> None:
    assert check(response="refuse").check(OBS, np.full(1, np.nan)).fraction == 0.0


def test_an_unknown_response_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'slow'"):
        ActionOODConfig(response="slo")
