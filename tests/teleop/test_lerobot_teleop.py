"""Tests of LeRobot's teleoperators with stand-ins: leader arms, delta devices, events, and their registration."""

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
from scripted_device import ScriptedTeleop

from robopolicy.errors import UserError
from robopolicy.teleop.contract import DISCARD, SUCCESS, TeleopCommand
from robopolicy.teleop.devices import open_device
from robopolicy.teleop.lerobot import LeRobotTeleop


class Leader:
    """Leader arm with a joint in degrees and a gripper from 0 to 100."""

    def get_action(self):
        return {"elbow.pos": 90.0, "gripper.pos": 25.0}

    def disconnect(self):
        self.connected = False


class Gamepad(Leader):
    """Delta device with events, whose keys are members of an enumeration."""

    reported = ()

    def get_action(self):
        return {"delta_x": 0.5, "delta_y": 0.0, "delta_z": -1.0, "gripper": 0}

    def get_teleop_events(self):
        events = {"is_intervention": True, **dict.fromkeys(["success", "rerecord_episode", "terminate_episode"], False)}
        events |= dict.fromkeys(self.reported, True)
        return {EventKey(name): value for name, value in events.items()}


class EventKey(SimpleNamespace):
    """Key with a value, as a member of an enumeration."""

    def __init__(self, value):
        super().__init__(value=value)

    def __hash__(self):
        return hash(self.value)


def test_a_leader_arm_gives_joints_while_the_space_key_is_held():
    keys = ScriptedTeleop(lambda k: TeleopCommand(k > 0, events=(SUCCESS,) * k))
    device = LeRobotTeleop(Leader(), keys)
    first, second = device.read(1.0), device.read(2.0)
    assert not first.enabled and second.enabled and second.events == (SUCCESS,) and second.stamp == 2.0
    assert second.joints == pytest.approx({"elbow": math.pi / 2, "gripper": 0.25})
    device.close()
    assert keys.closed


def test_a_device_with_events_needs_no_terminal():
    command = LeRobotTeleop(Gamepad()).read(1.0)
    assert command.enabled and command.events == ()
    assert command.twist.tolist() == [0.5, 0, -1, 0, 0, 0] and command.gripper == 1.0


@pytest.mark.parametrize(
    "reported, event",
    [
        (("success",), SUCCESS),
        (("success", "terminate_episode"), SUCCESS),
        (("rerecord_episode", "terminate_episode"), DISCARD),
        (("terminate_episode",), DISCARD),
    ],
)
def test_an_event_of_lerobot_ends_the_episode_and_not_the_session(reported, event):
    pad = Gamepad()
    pad.reported = reported
    assert LeRobotTeleop(pad).read(1.0).events == (event,)


def test_a_leader_arm_without_a_terminal_is_refused():
    with pytest.raises(UserError, match="whose space key is the dead-man switch"):
        LeRobotTeleop(Leader())


@dataclass
class LeaderConfig:
    """Configuration of the stand-in."""

    port: str = ""
    use_degrees: bool = False


def test_devices_are_found_by_the_type_of_lerobot(monkeypatch):
    opened = []

    def make(config):
        opened.append(config)
        return SimpleNamespace(connect=lambda: None, get_teleop_events=dict, get_action=dict, disconnect=lambda: None)

    module = ModuleType("lerobot.teleoperators")
    module.__path__ = []
    module.TeleoperatorConfig = SimpleNamespace(get_known_choices=lambda: {"toy_leader": LeaderConfig})
    module.make_teleoperator_from_config = make
    monkeypatch.setitem(sys.modules, "lerobot", ModuleType("lerobot"))
    monkeypatch.setitem(sys.modules, "lerobot.teleoperators", module)
    open_device("lerobot:toy_leader:/dev/ttyACM0").close()
    assert opened == [LeaderConfig("/dev/ttyACM0", use_degrees=True)]
    with pytest.raises(UserError, match="Unknown teleoperator of LeRobot 'toy_leaderr'"):
        open_device("lerobot:toy_leaderr")
    motor = SimpleNamespace(norm_mode=SimpleNamespace(name="RANGE_M100_100"))
    module.make_teleoperator_from_config = lambda _: SimpleNamespace(bus=SimpleNamespace(motors={"elbow": motor}))
    with pytest.raises(UserError, match="'toy_leader' gives joints from -100 to 100"):
        open_device("lerobot:toy_leader")
