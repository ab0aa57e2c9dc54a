"""Test of the control loop with an out-of-distribution check on actions."""

import numpy as np
import pytest
import torch
from rig import Rig, wave

from robopolicy.data.ood_detector import OODDetector, OODDetectorConfig
from robopolicy.deploy.safety.ood import ActionOODCheck, ActionOODConfig
from robopolicy_robots.loop import LoopOptions
from robopolicy_robots.states import State


@pytest.mark.parametrize("response", ["hold", "slow", "refuse"])
def test_unsupported_actions_end_in_a_hold_for_every_response(monkeypatch: pytest.MonkeyPatch, response: str) -> None:
    """The data covers the wave up to 0.25 rad of its first joint; beyond it, every response ends in a hold."""
    path = np.stack([wave(t) for t in np.linspace(0.0, 0.8, 400)]).astype(np.float32)  # first joint: 0 to 0.25 rad
    noise = np.random.default_rng(0).normal(0.0, 0.02, (400, 3)).astype(np.float32)
    points = torch.from_numpy(np.concatenate([path, path + noise], 1))
    gate = OODDetector.fit(points, np.arange(400) % 10, OODDetectorConfig(outside=0.0), ("state",))
    check = ActionOODCheck(gate, ActionOODConfig(response=response, max_consecutive=4))
    rig = Rig(monkeypatch, options=LoopOptions(support=check)).running(0.2)
    tick = rig.until(1.5)
    assert tick.state is State.HOLD and tick.reason.startswith("out-of-distribution action: score")
    assert rig.loop.log.counts["support"] == (1 if response == "hold" else 4)
    assert rig.at_rest()
    rig.check_limits()
