"""Low-level messages of the Unitree Go2: its topics, motors and checksum, for the DDS transport.

    motors = low_command(q, kp=20.0, kd=0.5)
    publisher = transport.advertise(COMMAND_TOPIC, motors.__class__, COMMAND)

The robot has no ROS, but its DDS types have names of ROS. Every command carries the CRC-32/MPEG-2 of the C structure of
the vendor, including its padding, over words of 32 bits with the most significant bit first.

A command moves the legs only after the robot's own sport service has been released, which nothing here does: do it with
the vendor's tools, with the robot hung up. Two writers of the topic of commands fight each other, so `check_motion`
refuses to start if there is another one.
"""

from __future__ import annotations

import struct
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from robopolicy.errors import UserError
from robopolicy_robots.codecs.definitions import register
from robopolicy_robots.message import Message
from robopolicy_robots.transports.base import Publisher

COMMAND_TOPIC, STATE_TOPIC = "/lowcmd", "/lowstate"  # 500 states per second
JOINTS = tuple(f"{leg}_{joint}" for leg in ("FR", "FL", "RR", "RL") for joint in ("hip", "thigh", "calf"))
MOTORS = 20  # motors in a message, of which the first 12 exist
HEAD, LEVEL, ENABLED = (0xFE, 0xEF), 0xFF, 1
NO_POSITION, NO_VELOCITY = 2.146e9, 16000.0  # values of "no command"
# C structure with natural alignment, little endian, without the checksum at its end; "x" is padding
STRUCTURE = "<4B4IH2x" + "B3x5f3I" * MOTORS + "4B" + "55Bx" + "I"
DEFINITIONS = {
    "unitree_go/msg/MotorCmd": """
        uint8 mode
        float32 q
        float32 dq
        float32 tau
        float32 kp
        float32 kd
        uint32[3] reserve
    """,
    "unitree_go/msg/BmsCmd": """
        uint8 off
        uint8[3] reserve
    """,
    "unitree_go/msg/LowCmd": """
        uint8[2] head
        uint8 level_flag
        uint8 frame_reserve
        uint32[2] sn
        uint32[2] version
        uint16 bandwidth
        unitree_go/MotorCmd[20] motor_cmd
        unitree_go/BmsCmd bms_cmd
        uint8[40] wireless_remote
        uint8[12] led
        uint8[2] fan
        uint8 gpio
        uint32 reserve
        uint32 crc
    """,
    "unitree_go/msg/IMUState": """
        float32[4] quaternion
        float32[3] gyroscope
        float32[3] accelerometer
        float32[3] rpy
        int8 temperature
    """,
    "unitree_go/msg/MotorState": """
        uint8 mode
        float32 q
        float32 dq
        float32 ddq
        float32 tau_est
        float32 q_raw
        float32 dq_raw
        float32 ddq_raw
        int8 temperature
        uint32 lost
        uint32[2] reserve
    """,
    "unitree_go/msg/BmsState": """
        uint8 version_high
        uint8 version_low
        uint8 status
        uint8 soc
        int32 current
        uint16 cycle
        int8[2] bq_ntc
        int8[2] mcu_ntc
        uint16[15] cell_vol
    """,
    "unitree_go/msg/LowState": """
        uint8[2] head
        uint8 level_flag
        uint8 frame_reserve
        uint32[2] sn
        uint32[2] version
        uint16 bandwidth
        unitree_go/IMUState imu_state
        unitree_go/MotorState[20] motor_state
        unitree_go/BmsState bms_state
        int16[4] foot_force
        int16[4] foot_force_est
        uint32 tick
        uint8[40] wireless_remote
        uint8 bit_flag
        float32 adc_reel
        int8 temperature_ntc1
        int8 temperature_ntc2
        float32 power_v
        float32 power_a
        uint16[4] fan_frequency
        uint32 reserve
        uint32 crc
    """,
}


@cache
def message_types() -> dict[str, type[Any]]:
    """Types of the messages by their short names; needs rosbags."""
    kinds = {name: register(name, "\n".join(map(str.strip, text.split("\n")))) for name, text in DEFINITIONS.items()}
    return {name.rsplit("/", 1)[-1]: kind for name, kind in kinds.items()}


def low_command(q: ArrayLike, dq: ArrayLike = 0.0, tau: ArrayLike = 0.0, *, kp: ArrayLike, kd: ArrayLike) -> Message:
    """Command for the twelve motors in the order of `JOINTS`; numbers apply to all.

    Args:
        q: Positions [rad].
        dq: Velocities [rad/s].
        tau: Feedforward torques [N m], added to the torques of the gains.
        kp: Stiffness [N m/rad].
        kd: Damping [N m s/rad].

    Raises:
        UserError: An array has another size or a number that is not finite, or a gain is negative.
    """
    kinds, rows = message_types(), np.zeros((len(JOINTS), 5), np.float32)
    for column, (name, value) in enumerate({"q": q, "dq": dq, "tau": tau, "kp": kp, "kd": kd}.items()):
        found = np.asarray(value, np.float32)
        negative_gain = name in ("kp", "kd") and bool((found < 0).any())
        if found.shape not in ((), (len(JOINTS),)) or not np.isfinite(found).all() or negative_gain:
            expected = f"one finite number or {len(JOINTS)} for '{name}', and gains from 0"
            raise UserError(f"The Go2 needs {expected}, got {value}.")
        rows[:, column] = found
    idle = kinds["MotorCmd"](0, NO_POSITION, NO_VELOCITY, 0.0, 0.0, 0.0)
    motors = [kinds["MotorCmd"](ENABLED, *map(float, row)) for row in rows] + [idle] * (MOTORS - len(JOINTS))
    command = kinds["LowCmd"](head=HEAD, level_flag=LEVEL, motor_cmd=motors)
    return kinds["LowCmd"](**{**vars(command), "crc": checksum(command)})


def checksum(command: Message) -> int:
    """CRC of a `LowCmd` without its last field."""
    c: Any = command
    motors = [number for m in c.motor_cmd for number in (m.mode, m.q, m.dq, m.tau, m.kp, m.kd, *map(int, m.reserve))]
    first = [*map(int, c.head), c.level_flag, c.frame_reserve, *map(int, c.sn), *map(int, c.version), c.bandwidth]
    last = [c.bms_cmd.off, *map(int, c.bms_cmd.reserve), *map(int, c.wireless_remote), *map(int, c.led)]
    last += [*map(int, c.fan), c.gpio, c.reserve]
    return mpeg2(struct.pack(STRUCTURE, *first, *motors, *last))


def check_motion(publisher: Publisher[Any], states: list[Any], others: int) -> None:
    """Check before the first command that the robot runs and that no other program commands it.

    Args:
        publisher: Publisher of commands.
        states: The newest states, oldest first.
        others: Other writers of the topic of commands.

    Raises:
        UserError: Nobody receives commands, another program sends some, or the counter of the states stands still.
    """
    if not publisher.matched:
        raise UserError(f"No Go2 receives {COMMAND_TOPIC}; check network interface and domain 0.")
    if others:
        raise UserError(f"{others} others write {COMMAND_TOPIC}; release the sport service and stop other programs.")
    ticks = [state.tick for state in states]
    if len(ticks) < 2 or any(after <= before for before, after in pairwise(ticks)):
        raise UserError(f"The counter of {STATE_TOPIC} does not advance ({ticks or 'no states'}); restart the robot.")


def mpeg2(data: bytes) -> int:
    """CRC-32/MPEG-2 of words of 32 bits, little endian, most significant bit first."""
    crc, table = 0xFFFFFFFF, _table()
    for word in struct.unpack(f"<{len(data) // 4}I", data):
        for byte in word.to_bytes(4, "big"):
            crc = (crc << 8 & 0xFFFFFFFF) ^ table[crc >> 24 ^ byte]
    return crc


@cache
def _table() -> list[int]:
    table: list[int] = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value & 0x80000000 else 0)) & 0xFFFFFFFF
        table.append(value)
    return table
