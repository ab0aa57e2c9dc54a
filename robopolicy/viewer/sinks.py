"""Files of episodes for other viewers: MCAP for Foxglove and rosbag tools, and RRD for Rerun.

Both contain the meshes and poses of bodies, images as JPEG, the chunk and its predicted path, observation vectors,
actions, rewards, success and safety events, on one time axis on which episodes follow each other.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import mujoco
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from robopolicy.atomic import atomic_file
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.plurals import counted
from robopolicy.sim.physics_state import BodyPositions, MujocoState, PhysicsState
from robopolicy.viewer.foxglove_schemas import IMAGE, INFO, LOG, NUMBERS, SCENE, TRANSFORMS, WARNING
from robopolicy.viewer.frames import EpisodeFrame, EpisodeSource
from robopolicy.viewer.scene import PATH_START, end_effector

Poses = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
"""Position `(3,)` [m] and orientation `(4,)` (w, x, y, z) of each body in world coordinates, by name."""
JPEG_QUALITY = 90
GAP = 0.5  # [s] between the last frame of an episode and the next episode
VISIBLE_GROUPS = 3  # groups of geoms that MuJoCo shows by default


class FrameSink(Protocol):
    """Receiver of the frames of episodes, and a context manager that completes the file."""

    def begin(self, time: float, label: str, meshes: Mapping[str, bytes]) -> None:
        """Start an episode named `label` at `time` [s]; `meshes` are the GLB files of its bodies."""
        ...

    def write(self, time: float, frame: EpisodeFrame, poses: Poses, path: NDArray[np.float64]) -> None:
        """Write a frame at `time` [s], with the poses of its bodies and its predicted path `(S, 3)` [m]."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


def open_sink(path: Path) -> FrameSink:
    """Open a file whose suffix is in `SINKS`; a missing package raises a `UserError`."""
    return SINKS[path.suffix](path)


def write_episodes(source: EpisodeSource, sink: FrameSink, episodes: int) -> int:
    """Write the first episodes of a source and return the number of frames."""
    if source.num_episodes is not None and episodes > source.num_episodes:
        raise UserError(
            f"{source.title} has {counted(source.num_episodes, 'episode')}, not {episodes}; lower --episodes."
        )
    writer = FrameWriter(sink)
    for episode in range(episodes):
        for index, frame in enumerate(source.frames(episode)):
            writer.write(source.label(episode), index * source.control_dt, frame)
    return writer.count


class FrameWriter:
    """Writer of episodes to a sink, one after another on its time axis."""

    def __init__(self, sink: FrameSink) -> None:
        self.count = 0  # frames written
        self._sink = sink
        self._label: str | None = None  # of the current episode
        self._start = self._end = 0.0  # [s] of the current episode
        self._model: mujoco.MjModel | None = None  # whose meshes the sink has

    def write(self, label: str, time: float, frame: EpisodeFrame) -> None:
        """Write a frame at `time` [s] of the episode `label`, which starts if the last frame had another label."""
        if label != self._label:
            self._label, self._start = label, self._end + GAP if self.count else 0.0
            meshes: dict[str, bytes] = {}
            if isinstance(frame.state, MujocoState) and self._model is None:
                self._model = frame.state.model
                meshes = body_meshes(self._model)
            self._sink.begin(self._start, label, meshes)
        self._end = self._start + time
        self._sink.write(self._end, frame, poses_of(frame.state), path_of(frame.plan))
        self.count += 1


def poses_of(state: PhysicsState | None) -> Poses:
    """Poses of the bodies of a state; without orientations in simulators other than MuJoCo."""
    if isinstance(state, BodyPositions):
        upright = np.array([1.0, 0.0, 0.0, 0.0])
        return {name: (position, upright) for name, position in zip(state.names, state.positions, strict=True)}
    if state is None:
        return {}
    data = mujoco.MjData(state.model)
    state.apply(data)
    return {
        body_name(state.model, body): (data.xpos[body].copy(), data.xquat[body].copy())
        for body in range(1, state.model.nbody)
    }


def path_of(plan: Sequence[PhysicsState]) -> NDArray[np.float64]:
    """Path `(S, 3)` [m] of the end effector in the states of a plan."""
    points: list[NDArray[np.float64]] = []
    for state in plan:
        if isinstance(state, MujocoState):
            poses = poses_of(state)
            tool = [poses[body_name(state.model, body)][0] for body in end_effector(state.model)]
            points.append(np.mean(tool, 0))
        else:
            points.append(state.positions[0])
    return np.array(points).reshape(-1, 3)


def body_name(model: mujoco.MjModel, body: int) -> str:
    """Name of a body, or its number."""
    return model.body(body).name or f"body_{body}"


def body_meshes(model: mujoco.MjModel) -> dict[str, bytes]:
    """GLB files of the visible geoms of each body, by name; planes are left out."""
    conversions = require("mjviser.conversions", "viewer")
    meshes: dict[str, bytes] = {}
    for body in range(model.nbody):
        geoms = [
            geom
            for geom in np.flatnonzero(model.geom_bodyid == body).tolist()
            if model.geom_group[geom] < VISIBLE_GROUPS
            and model.geom_rgba[geom, 3] > 0
            and model.geom_type[geom] != mujoco.mjtGeom.mjGEOM_PLANE
        ]
        if geoms:
            scene = require("trimesh", "viewer").Scene()
            for part in conversions.group_geoms_by_visual_compat(model, geoms):
                scene.add_geometry(conversions.merge_geoms(model, part))
            meshes["world" if body == 0 else body_name(model, body)] = scene.export(file_type="glb")
    return meshes


class McapSink:
    """MCAP file with the JSON schemas of Foxglove; written completely or not at all.

    Topics: `/scene`, `/tf`, `/path`, `/camera/NAME`, `/numbers` with all vectors and actions, and `/outcome`.
    Numbers that are not finite become null.
    """

    def __init__(self, path: Path) -> None:
        mcap = require("mcap.writer", "record")
        self._files = atomic_file(path)
        self._stream = self._files.__enter__().open("wb")
        self._writer: Any = mcap.Writer(self._stream)
        self._writer.start(library="robopolicy")
        self._channels: dict[str, int] = {}

    def begin(self, time: float, label: str, meshes: Mapping[str, bytes]) -> None:
        """Start an episode; the meshes become one entity per body."""
        pose = {"position": _vector(np.zeros(3)), "orientation": _quaternion(np.array([1.0, 0.0, 0.0, 0.0]))}
        model = {"pose": pose, "scale": _vector(np.ones(3)), "color": _colour((255, 255, 255)), "override_color": False}
        entities = [
            {
                **_entity(time, name, name),
                "models": [{**model, "media_type": "model/gltf-binary", "data": base64.b64encode(mesh).decode()}],
            }
            for name, mesh in meshes.items()
        ]
        if entities:
            self._log("/scene", SCENE, time, {"entities": entities})
        self._log("/outcome", NUMBERS, time, {"episode": label})

    def write(self, time: float, frame: EpisodeFrame, poses: Poses, path: NDArray[np.float64]) -> None:
        """Write the messages of a frame."""
        transforms = [
            {
                "timestamp": _stamp(time),
                "parent_frame_id": "world",
                "child_frame_id": name,
                "translation": _vector(position),
                "rotation": _quaternion(orientation),
            }
            for name, (position, orientation) in poses.items()
        ]
        if transforms:
            self._log("/tf", TRANSFORMS, time, {"transforms": transforms})
        line = {"type": 0, "thickness": 3.0, "scale_invariant": True, "color": _colour(PATH_START)}
        points = [_vector(point) for point in path]
        entity = _entity(time, "path", "world") | {"lines": [line | {"points": points}]}
        self._log("/path", SCENE, time, {"entities": [entity]})
        for camera, image in frame.images.items():
            data = base64.b64encode(_jpeg(image)).decode()
            message = {"timestamp": _stamp(time), "frame_id": camera, "format": "jpeg", "data": data}
            self._log(f"/camera/{camera}", IMAGE, time, message)
        self._log("/numbers", NUMBERS, time, {key: values.tolist() for key, values in frame.vectors.items()})
        if frame.chunk is not None:
            self._log("/chunk", NUMBERS, time, {"actions": frame.chunk.tolist()})
        for event in frame.events:
            level = WARNING if event.is_warning else INFO
            message = {"timestamp": _stamp(time), "level": level, "message": event.text, "name": "safety"}
            self._log("/events", LOG, time, message)
        outcome = {"reward": frame.reward} | ({} if frame.success is None else {"success": frame.success})
        self._log("/outcome", NUMBERS, time, outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.finish()
        self._stream.close()
        self._files.__exit__(*error)

    def _log(self, topic: str, schema: Mapping[str, Any], time: float, message: Mapping[str, Any]) -> None:
        if topic not in self._channels:
            text = json.dumps(schema).encode()
            number = self._writer.register_schema(name=schema["title"], encoding="jsonschema", data=text)
            self._channels[topic] = self._writer.register_channel(topic, "json", number)
        nanoseconds = round(time * 1e9)
        data = json.dumps(_finite(message), allow_nan=False).encode()
        self._writer.add_message(self._channels[topic], nanoseconds, data, nanoseconds)


class RerunSink:
    """RRD file of Rerun; written completely or not at all."""

    def __init__(self, path: Path) -> None:
        self._rerun = require("rerun", "rerun")
        self._files = atomic_file(path)
        self._stream = self._rerun.RecordingStream("robopolicy")
        self._stream.save(str(self._files.__enter__()))

    def begin(self, time: float, label: str, meshes: Mapping[str, bytes]) -> None:
        """Start an episode; the meshes become static assets."""
        self._stream.set_time("time", duration=time)
        for name, mesh in meshes.items():
            asset = self._rerun.Asset3D(contents=mesh, media_type="model/gltf-binary")
            self._stream.log(f"world/{name}/mesh", asset, static=True)
        self._stream.log("episode", self._rerun.TextLog(label))

    def write(self, time: float, frame: EpisodeFrame, poses: Poses, path: NDArray[np.float64]) -> None:
        """Write the components of a frame."""
        rerun, stream = self._rerun, self._stream
        stream.set_time("time", duration=time)
        for name, (position, orientation) in poses.items():
            rotation = rerun.Quaternion(xyzw=np.roll(orientation, -1))
            stream.log(f"world/{name}", rerun.Transform3D(translation=position, rotation=rotation))
        stream.log("world/predicted_path", rerun.LineStrips3D([path] if len(path) else [], colors=[PATH_START]))
        for camera, image in frame.images.items():
            stream.log(f"camera/{camera}", rerun.EncodedImage(contents=_jpeg(image), media_type="image/jpeg"))
        for key, values in frame.vectors.items():
            stream.log(f"numbers/{key}", rerun.Scalars(values))
        if frame.chunk is not None:
            stream.log("chunk", rerun.Tensor(frame.chunk, dim_names=("step", "action")))
        for event in frame.events:
            stream.log("events", rerun.TextLog(event.text, level="WARN" if event.is_warning else "INFO"))
        stream.log("outcome/reward", rerun.Scalars(frame.reward))
        if frame.success is not None:
            stream.log("outcome/success", rerun.Scalars(float(frame.success)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stream.flush()
        self._stream.disconnect()
        self._files.__exit__(*error)


SINKS: dict[str, Callable[[Path], FrameSink]] = {".mcap": McapSink, ".rrd": RerunSink}
"""Sink by the suffix of its file."""


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None; JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _jpeg(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _entity(time: float, name: str, frame: str) -> dict[str, Any]:
    lifetime = {"sec": 0, "nsec": 0}  # until it is replaced
    return {"timestamp": _stamp(time), "frame_id": frame, "id": name, "lifetime": lifetime, "frame_locked": True}


def _stamp(time: float) -> dict[str, int]:
    seconds, nanoseconds = divmod(round(time * 1e9), 10**9)
    return {"sec": seconds, "nsec": nanoseconds}


def _vector(values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip("xyz", map(float, values), strict=True))


def _quaternion(values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip("wxyz", map(float, values), strict=True))


def _colour(rgb: Sequence[int]) -> dict[str, float]:
    return dict(zip("rgb", (value / 255 for value in rgb), strict=True)) | {"a": 1.0}
