"""Tests of the low-level messages of the Go2 against a simulated one over DDS."""

import struct
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")

from networks import free_domain, until

from robopolicy.errors import UserError
from robopolicy_robots import unitree
from robopolicy_robots.codecs import cdr
from robopolicy_robots.codecs.definitions import type_hash
from robopolicy_robots.transports.base import COMMAND, SENSOR

HASHES = {
    "LowCmd": "RIHS01_0da1142c994d184f6102948c3acf52b9557836cfe5062b924a1f08ac8b72dc34",
    "LowState": "RIHS01_db5172cac933e3cfc0e705903343eb4eea42e65e224e9d726d3e672aec0caf0f",
}


def by_bits(data: bytes) -> int:
    """CRC-32/MPEG-2 of words, bit by bit, as the vendor computes it."""
    crc = 0xFFFFFFFF
    for word in struct.unpack(f"<{len(data) // 4}I", data):
        for bit in range(31, -1, -1):
            top = crc >> 31
            crc = crc << 1 & 0xFFFFFFFF
            crc ^= 0x04C11DB7 if top != word >> bit & 1 else 0
    return crc


def test_checksum_is_crc32_mpeg2_over_words() -> None:
    assert unitree.mpeg2(b"4321") == by_bits(b"4321") and unitree.mpeg2(b"") == 0xFFFFFFFF
    catalogue = b"4321" + b"8765"  # the words of "12345678"
    assert unitree.mpeg2(catalogue) == by_bits(catalogue)
    rng = np.random.default_rng(0)
    for _ in range(5):
        data = rng.integers(0, 256, 808, np.uint8).tobytes()
        assert unitree.mpeg2(data) == by_bits(data)


def test_messages_have_the_sizes_and_hashes_of_the_vendor() -> None:
    kinds = unitree.message_types()
    assert {name: type_hash(kinds[name]) for name in HASHES} == HASHES
    assert struct.calcsize(unitree.STRUCTURE) == 808
    assert len(cdr.encode(kinds["LowCmd"]())) == 812


def test_a_command_moves_twelve_motors() -> None:
    command: Any = unitree.low_command(np.arange(12) / 10, kp=20.0, kd=0.5)
    assert bytes(command.head) == b"\xfe\xef" and command.level_flag == 0xFF
    motors = command.motor_cmd
    assert [motor.mode for motor in motors] == [1] * 12 + [0] * 8
    assert motors[3].q == pytest.approx(0.3) and motors[3].kp == 20 and motors[3].kd == 0.5
    assert motors[15].q == pytest.approx(2.146e9) and motors[15].dq == 16000
    assert command.crc == unitree.checksum(command) != unitree.checksum(unitree.low_command(0.0, kp=20.0, kd=0.5))
    again = cdr.decode(type(command), cdr.encode(command))
    assert unitree.checksum(again) == command.crc
    for bad in ({"q": np.zeros(11), "kp": 1, "kd": 1}, {"q": np.nan, "kp": 1, "kd": 1}, {"q": 0, "kp": -1, "kd": 1}):
        with pytest.raises(UserError, match="The Go2 needs one finite number or 12"):
            unitree.low_command(**bad)


class Go2:
    """A simulated robot: its joints follow commands whose checksum is right."""

    def __init__(self, transport: Any) -> None:
        kinds = unitree.message_types()
        self.kinds, self.tick, self.refused, self.q = kinds, 0, 0, np.zeros(12)
        self._states = transport.advertise(unitree.STATE_TOPIC, kinds["LowState"], SENSOR)
        self._commands = transport.subscribe(unitree.COMMAND_TOPIC, kinds["LowCmd"], SENSOR)

    def step(self) -> None:
        for received in self._commands.unread():
            if received.message.crc == unitree.checksum(received.message):
                self.q = np.array([motor.q for motor in received.message.motor_cmd[:12]])
            else:
                self.refused += 1
        self.tick += 2
        motors = [self.kinds["MotorState"](mode=1, q=float(q)) for q in self.q] + [self.kinds["MotorState"]()] * 8
        self._states.publish(self.kinds["LowState"](tick=self.tick, motor_state=motors))


def test_a_simulated_go2_follows_commands_over_dds() -> None:
    pytest.importorskip("cyclonedds", reason="needs robopolicy[ros]")
    from robopolicy_robots.transports.dds import DdsTransport

    kinds = unitree.message_types()
    with DdsTransport(free_domain()) as transport:
        robot = Go2(transport)
        publisher = transport.advertise(unitree.COMMAND_TOPIC, kinds["LowCmd"], COMMAND)
        states = transport.subscribe(unitree.STATE_TOPIC, kinds["LowState"], SENSOR)
        until(lambda: publisher.matched and states.publishers)
        seen: list[Any] = []

        def states_seen() -> bool:
            robot.step()
            seen.extend(received.message for received in states.unread())
            return len(seen) > 1

        until(states_seen)
        unitree.check_motion(publisher, seen, 0)
        with pytest.raises(UserError, match="others write /lowcmd; release the sport service"):
            unitree.check_motion(publisher, seen, 1)
        with pytest.raises(UserError, match=r"The counter of /lowstate does not advance \(\[2, 2\]\)"):
            unitree.check_motion(publisher, [seen[0], seen[0]], 0)
        command: Any = unitree.low_command(0.25, kp=20.0, kd=0.5)
        publisher.publish(kinds["LowCmd"](**{**vars(command), "crc": command.crc ^ 1}))
        until(lambda: robot.step() or robot.refused)
        assert not robot.q.any()
        publisher.publish(command)
        until(lambda: robot.step() or robot.q.any())
        np.testing.assert_allclose(robot.q, 0.25)
        until(lambda: states.latest() is not None and states.latest().message.motor_state[0].q == 0.25)  # type: ignore[union-attr]
