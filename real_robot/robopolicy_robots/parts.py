"""What a control loop may be given beside the robot, a transport, an embodiment and a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from robopolicy.deploy.safety.filter import SafetyFilter
from robopolicy.deploy.safety.motion import Fallback, hold
from robopolicy.deploy.safety.ood import ObservationGate, SupportCheck
from robopolicy.deploy.safety.watchdog import EStop
from robopolicy_robots.states import Tick


@dataclass
class Parts:
    """All of it may be left out."""

    safety: SafetyFilter | None = None  # default: from the robot's limits
    join: str = "replace"  # of chunks, see ChunkBuffer
    gate: ObservationGate | None = None
    support: SupportCheck | None = None
    fallback: Fallback = hold
    estop: EStop | None = None
    dry_run: bool = False  # compute everything, send nothing
    on_tick: Callable[[Tick], None] | None = None
