"""Optional components of a control loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from robopolicy.deploy.safety.filter import SafetyFilter
from robopolicy.deploy.safety.motion import Fallback, hold
from robopolicy.deploy.safety.ood import ActionOODCheck, ObservationGate
from robopolicy.deploy.safety.watchdog import EStop
from robopolicy_robots.states import Tick


@dataclass
class LoopOptions:
    """Options of a control loop, all with defaults."""

    safety: SafetyFilter | None = None  # default: from the robot's limits
    chunk_blending: str = "replace"  # see ChunkBuffer
    gate: ObservationGate | None = None
    support: ActionOODCheck | None = None
    fallback: Fallback = hold
    estop: EStop | None = None
    dry_run: bool = False  # compute everything, send nothing
    on_tick: Callable[[Tick], None] | None = None
