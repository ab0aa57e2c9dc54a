"""The advantage pipeline: small stages `(advantage, decisions) -> advantage`, composed left to right.

Group-relative policy optimisation, for instance, is
`Pipeline([Baseline("mean", Scope(by_group)), Scale(Scope(by_group))])(outcome(decisions), decisions)`.
"""

from robopolicy.core.advantages.factors import DepthDiscount
from robopolicy.core.advantages.pipeline import Pipeline, Scope, Stage, outcome
from robopolicy.core.advantages.stages import (
    Baseline,
    Broadcast,
    Clip,
    ConstantScale,
    GivenBaseline,
    Mix,
    Modulate,
    RunningScale,
    Scale,
    Shape,
    TrackerBaseline,
)
from robopolicy.core.advantages.trackers import BetaTracker, MeanTracker, RunningMoments, Tracker

__all__ = [
    "Baseline",
    "BetaTracker",
    "Broadcast",
    "Clip",
    "ConstantScale",
    "DepthDiscount",
    "GivenBaseline",
    "MeanTracker",
    "Mix",
    "Modulate",
    "Pipeline",
    "RunningMoments",
    "RunningScale",
    "Scale",
    "Scope",
    "Shape",
    "Stage",
    "Tracker",
    "TrackerBaseline",
    "outcome",
]
