"""States of the control loop, reasons of holds, and the result of a tick."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from robopolicy.deploy.safety.interventions import SafetyIntervention
from robopolicy.deploy.safety.motion import Array


class State(StrEnum):
    """`DISCONNECTED -> WAIT_OBS -> ARMED -> RUN <-> HOLD -> STOPPED`, and `ESTOP` from anywhere."""

    DISCONNECTED = "DISCONNECTED"  # no publisher of the robot state, or no subscriber of commands
    WAIT_OBS = "WAIT_OBS"  # waiting for the conditions of arming
    ARMED = "ARMED"  # waiting for the first chunk
    RUN = "RUN"  # following the policy
    HOLD = "HOLD"  # stopped within limits, with a reason
    ESTOP = "ESTOP"  # stopped within limits, until an operator resets it
    STOPPED = "STOPPED"  # final


class Reason(StrEnum):
    """Reason of a hold."""

    STALE_OBSERVATION = "stale observation"
    STALE_CAMERA = "stale camera"
    BAD_OBSERVATION = "bad observation"
    STRANGE_OBSERVATION = "out-of-distribution observation"
    UNSUPPORTED = "out-of-distribution action"
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
    GOAL = "trajectory goal failed"
    OPERATOR = "operator"


# Holds after which an operator must arm the robot again.
LATCHED = frozenset(
    {Reason.PUBLISHER, Reason.TRACKING, Reason.FIRST_COMMAND, Reason.SATURATION, Reason.GOAL, Reason.OPERATOR}
)
# Holds after which the robot resumes from the last command instead of the measured position.
RESUME_FROM_COMMAND = frozenset(
    {Reason.CHUNK_EXHAUSTED, Reason.NON_FINITE, Reason.WRONG_SHAPE, Reason.UNAVAILABLE, Reason.OVERRUN}
)


class SafetyHold(Exception):
    """Exception for conditions in which the robot must hold; `found` is the intervention to record."""

    def __init__(self, reason: Reason, detail: str = "", found: SafetyIntervention | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason, self.found = reason, found


@dataclass(frozen=True)
class Tick:
    """Result of one tick, for recorders and displays."""

    now: float  # [s] on the monotonic clock
    state: State
    reason: str  # reason of a hold or stop, or the unmet condition of arming
    measured: Array | None  # (J,) positions
    target: Array | None  # (J,) before the filter
    command: Array | None  # (J,) sent, or None
    interventions: tuple[SafetyIntervention, ...]
