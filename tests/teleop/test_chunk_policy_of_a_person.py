"""Tests of a person as the chunk policy of a robot: taking over, and the recording of episodes."""

import numpy as np
import pytest
from scripted_device import ScriptedTeleop

from robopolicy.spec import PolicySpec
from robopolicy.teleop.chunk_policy import HumanChunkPolicy
from robopolicy.teleop.contract import DISCARD, STOP, SUCCESS, TeleopCommand
from robopolicy.teleop.operator import HumanOperator

OBS = {"state": np.arange(3, dtype=np.float32)[None]}


class Counting:
    """Policy whose chunks count its calls."""

    spec = PolicySpec({"state": (3,)}, 2, horizon=4, action_horizon=3)
    takes_prefix = False
    calls = 0

    def chunk(self, obs, prefix=None):
        self.calls += 1
        return np.full((4, 2), self.calls, np.float32) + np.arange(4, dtype=np.float32)[:, None] / 10


def person(commands, **options) -> HumanChunkPolicy:
    device = ScriptedTeleop(lambda k: commands[k])
    return HumanChunkPolicy(HumanOperator(device, -np.ones(2), np.ones(2), 0.05), "push", {"state": (3,)}, **options)


def test_the_person_takes_over_and_the_policy_plans_anew():
    base = Counting()
    held, free = TeleopCommand(True), TeleopCommand()
    policy = person([free, free, held, free, free], base=base)
    assert policy.spec.action_horizon == policy.spec.horizon == 1
    actions = [policy.chunk(OBS)[0, 0] for _ in range(5)]
    assert actions == pytest.approx([1.0, 1.1, 0.0, 2.0, 2.1])


def test_episodes_are_recorded_from_the_first_reset_on():
    episodes = []
    sink = type("Sink", (), {"add": staticmethod(episodes.append)})
    events = {3: DISCARD, 6: SUCCESS, 8: STOP}
    commands = [TeleopCommand(k > 0, events=(events[k],) if k in events else ()) for k in range(9)]
    policy = person(commands, sink=sink)
    policy.chunk(OBS)  # warm-up
    policy.reset(7)
    for _ in range(8):
        policy.chunk(OBS)
    assert policy.stopped
    policy.finish(success=False)
    assert [len(each) for each in episodes] == [3, 2] and [each.success for each in episodes] == [True, False]
    assert episodes[0].arrays["intervention"].all() and episodes[0].seed == 7
    assert set(episodes[0].arrays) == {"state", "action", "intervention", "success"}


class Recording(HumanOperator):
    """Operator that keeps the observations of its anchors."""

    def anchor(self, obs):
        self.anchors = [*getattr(self, "anchors", []), int(obs["state"][-1, 0])]


def test_the_person_starts_from_the_pose_of_a_new_episode_and_of_the_end_of_the_policy():
    held = (False, False, True, True, False, True)
    device = ScriptedTeleop(lambda k: TeleopCommand(held[k % 6]))
    operator = Recording(device, -np.ones(2), np.ones(2), 1.0)
    alone = HumanChunkPolicy(operator, "push", {"state": (3,)})
    for k in range(6):
        if k == 2:
            alone.reset(0)
        alone.chunk({"state": np.full((1, 3), k, np.float32)})
    assert operator.anchors == [0, 2]
    operator.anchors = []
    both = HumanChunkPolicy(operator, "push", {"state": (3,)}, base=Counting())
    for k in range(6):
        both.chunk({"state": np.full((1, 3), k, np.float32)})
    assert operator.anchors == [0, 1, 2, 5], "at 3 and 4 the person has acted before"


def test_a_device_shows_the_cameras_of_the_robot():
    device = ScriptedTeleop(lambda k: TeleopCommand())
    device.shows_images = True
    image = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    policy = HumanChunkPolicy(HumanOperator(device, -np.ones(2), np.ones(2), 0.05), "push", {"image.front": (3, 2, 4)})
    for _ in range(2):
        policy.chunk({"image.front": image[None]})
    (_, first), (_, second) = device.shown
    assert not second, "the period of images has not passed"
    np.testing.assert_array_equal(first["front"], image.transpose(1, 2, 0))
