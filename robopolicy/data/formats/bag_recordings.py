"""Mapping of recordings of `robopolicy deploy --record`, from the topics that its safety filter and loop write.

Each step of the safety filter while the robot runs is a frame. `state` is the measured position of the joints, `action`
the target of the policy and `executed` the command that was sent. Cameras and other sources are added by their topics.
"""

from __future__ import annotations

from dataclasses import replace

from robopolicy.data.formats.bag_files import BagFile, RepairedMcap
from robopolicy.data.formats.bag_messages import IMAGE_TYPES, field_value, joint_names
from robopolicy.data.formats.mapping import DatasetMapping, EpisodeMapping, FeatureMapping
from robopolicy.errors import UserError
from robopolicy.spec import IMAGE_PREFIX

FILTER, STATUS = "/robopolicy/filter", "/robopolicy/status"  # topics of JSON text
_TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
_JOINTS = ("state", "action", "executed")  # keys with one entry per joint
_SOURCES = {  # types of sources other than joints and cameras
    f"{package}/msg/{name}"
    for package, names in {
        "geometry_msgs": ("PoseStamped", "TwistStamped", "WrenchStamped"),
        "sensor_msgs": ("Imu",),
        "nav_msgs": ("Odometry",),
    }.items()
    for name in names
}
_ENDINGS = ("/image_raw", "/image", "/compressed", "/image_raw/compressed")  # of the topics of cameras


def is_deployment(bag: BagFile | RepairedMcap) -> bool:
    """Whether a recording has the topics of `deploy`."""
    return {FILTER, STATUS} <= set(bag.topics)


def mapping_of_deployment(bag: BagFile | RepairedMcap, mapping: DatasetMapping) -> DatasetMapping:
    """Complete a mapping without features; raises a `UserError` if the filter never acted."""
    features = {
        "state": FeatureMapping((FILTER,), field="measured.1"),
        "action": FeatureMapping((FILTER,), field="asked"),
        "executed": FeatureMapping((FILTER,), field="sent"),
    }
    for topic, kind in bag.topics.items():
        if kind in IMAGE_TYPES:
            features[f"{IMAGE_PREFIX}{_camera(topic)}"] = FeatureMapping((topic,))
        elif kind in _SOURCES:
            features[topic.strip("/").replace("/", ".")] = FeatureMapping((topic,))
    return replace(
        mapping,
        features=features,
        rate=mapping.rate or 1 / _step(bag),
        frames="" if mapping.rate else FILTER,
        episodes=EpisodeMapping(STATUS, "state", "RUN"),
        clock="receive",
    )


def joints_of_deployment(bag: BagFile | RepairedMcap) -> dict[str, tuple[str, ...]]:
    """Names of the joints by key, from the commands of a deployment; empty if its commands have no names."""
    topics = [topic for topic, kind in bag.topics.items() if kind == _TRAJECTORY]
    first = next(iter(bag.messages(topics)), None) if topics else None
    return dict.fromkeys(_JOINTS, joint_names(first.content)) if first is not None else {}


def _step(bag: BagFile | RepairedMcap) -> float:
    """Duration of a tick [s]."""
    for message in bag.messages([FILTER]):
        step = field_value(message.content, message.kind, "dt")
        if isinstance(step, float) and step > 0:
            return step
    raise UserError("The safety filter of this recording never acted, so it has no actions.")


def _camera(topic: str) -> str:
    name = topic.strip("/")
    for ending in sorted(_ENDINGS, key=len, reverse=True):
        name = name.removesuffix(ending)
    return name.replace("/", ".")
