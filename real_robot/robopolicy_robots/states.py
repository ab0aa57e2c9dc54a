"""States of the control loop, why it holds, and what one tick did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from robopolicy.deploy.safety.interventions import Intervention
from robopolicy.deploy.safety.motion import Array


class State(StrEnum):
    """`DISCONNECTED -> WAIT_OBS -> ARMED -> RUN <-> HOLD -> STOPPED`, and `ESTOP` from anywhere."""

    DISCONNECTED = "DISCONNECTED"  # nobody publishes the robot's state, or nobody takes commands
    WAIT_OBS = "WAIT_OBS"  # not yet everything that arming demands
    ARMED = "ARMED"  # waiting for the first chunk
    RUN = "RUN"  # following the policy
    HOLD = "HOLD"  # stopped within limits, for a reason
    ESTOP = "ESTOP"  # the same, until an operator resets it
    STOPPED = "STOPPED"  # over


class Reason(StrEnum):
    """Why the robot is held."""

    STALE_OBSERVATION = "stale observation"
    STALE_CAMERA = "stale camera"
    BAD_OBSERVATION = "bad observation"
    STRANGE_OBSERVATION = "strange observation"
    UNSUPPORTED = "action without support in the data"
    CHUNK_EXHAUSTED = "chunk exhausted"
    NON_FINITE = "non-finite action"
    WRONG_SHAPE = "wrong shape"
    UNAVAILABLE = "policy unavailable"
    OVERRUN = "overrun"
    PEER_LOST = "peer lost"
    PUBLISHER = "publisher changed"
    TRACKING = "tracking error"
    FIRST_COMMAND = "first command too far"
    SATURATION = "limit saturation"
    OPERATOR = "operator"


LASTING = frozenset(
    {Reason.PUBLISHER, Reason.TRACKING, Reason.FIRST_COMMAND, Reason.SATURATION, Reason.OPERATOR}
)  # an operator has to arm the robot again
IN_PLACE = frozenset(
    {Reason.CHUNK_EXHAUSTED, Reason.NON_FINITE, Reason.WRONG_SHAPE, Reason.UNAVAILABLE, Reason.OVERRUN}
)  # the robot was under control all the time, and goes on from where it was held, not from where it is measured


class Held(Exception):
    """The robot has to be held; `found` is for the record."""

    def __init__(self, reason: Reason, detail: str = "", found: Intervention | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason, self.found = reason, found


@dataclass(frozen=True)
class Tick:
    """What one tick did, for recorders and viewers."""

    now: float  # [s] on the monotonic clock
    state: State
    reason: str  # of a hold or a stop, with details; else what arming still waits for
    measured: Array | None  # (J,) positions
    wanted: Array | None  # (J,) before the filter
    command: Array | None  # (J,) sent; None while nothing is
    interventions: tuple[Intervention, ...]
