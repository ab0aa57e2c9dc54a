"""Tests of the keyboard of a terminal through a pseudo-terminal: holding, releasing, tapping, and events."""

import os
import pty
import termios
from collections.abc import Iterator

import pytest

from robopolicy.errors import UserError
from robopolicy.teleop.contract import DISCARD, SUCCESS, SessionStatus
from robopolicy.teleop.devices import open_device
from robopolicy.teleop.terminal import FIRST, REPEAT, TerminalTeleop


@pytest.fixture
def terminal() -> Iterator[tuple[int, TerminalTeleop]]:
    keyboard, file = pty.openpty()
    before = termios.tcgetattr(file)
    device = TerminalTeleop(file)
    yield keyboard, device
    device.close()
    assert termios.tcgetattr(file) == before
    os.close(keyboard)
    os.close(file)


def test_a_key_is_held_while_it_repeats(terminal):
    keyboard, device = terminal
    presses = [0.0, *(0.5 + k / 30 for k in range(30))]  # the delay of a keyboard, then 30 repetitions per second
    seen: list[tuple[float, bool]] = []
    for tick in range(220):
        now = tick / 100
        while presses and presses[0] <= now:
            os.write(keyboard, b"w")
            presses.pop(0)
        command = device.read(now)
        assert command.twist[0] == float(command.enabled)
        seen.append((now, command.enabled))
    last = 0.5 + 29 / 30
    assert all(held for now, held in seen if now < last)
    assert not any(held for now, held in seen if now > last + REPEAT + 0.02)


def test_a_tap_holds_for_the_time_before_repetitions(terminal):
    keyboard, device = terminal
    os.write(keyboard, b"a")
    assert device.read(0.0).twist[1] == 1 and device.read(FIRST - 0.01).enabled and not device.read(FIRST).enabled


def test_other_keys_are_events_or_ignored(terminal):
    keyboard, device = terminal
    os.write(keyboard, b"\n\x7fz\xff")
    command = device.read(0.0)
    assert command.events == (SUCCESS, DISCARD) and not command.enabled
    os.write(keyboard, b" ")
    command = device.read(0.0)
    assert command.enabled and not command.twist.any(), "space holds the switch without motion"
    os.write(keyboard, b"c")
    assert device.read(0.0).gripper == 1


def test_the_status_is_one_line(terminal, capsys):
    _, device = terminal
    for actor in ("you", "you", "paused"):
        device.show(SessionStatus("push", actor, (("kept", "1 of 2"),)), {})
    assert capsys.readouterr().out == "\r\x1b[Kpush, you, kept 1 of 2\r\x1b[Kpush, paused, kept 1 of 2"


def test_a_program_without_a_terminal_is_reported():
    with pytest.raises(UserError, match="run it in one"):
        open_device("terminal")
