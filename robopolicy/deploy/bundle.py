"""Deployment bundle: a policy as one folder, run with onnxruntime and numpy only.

policy.onnx     graph from observations and noise to a chunk, with normalisers and sampler
bundle.json     specification, origin, SHA-256 of every file and of itself
golden.npz      observations, noise and the chunks of torch for them

    bundle = open_bundle("runs/lift_bundle", seed=0)
    bundle.verify()
    chunk = bundle.chunk({"state": history})  # (H, A)

With a seed, decision i of an episode has the same noise as in an evaluation in simulation with that seed. A bundle
stores the hidden state of a recurrent policy; `reset` begins an episode. Neither torch nor MuJoCo is imported. Calls
must not overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.archives import read_arrays
from robopolicy.deploy.contract import Observed
from robopolicy.deploy.graph import CHUNK, NEXT_MEMORY, NOISE, PREFIX, PREFIX_WEIGHT, TYPES, open_session
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy.rng import episode_rng
from robopolicy.schema import from_dict, to_dict
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX, PolicySpec, TaskMetadata, check_dtype
from robopolicy.versions import sha256

SCHEMA = 1  # version of the layout, to increase with every incompatible change
GRAPH, GOLDEN, MANIFEST = "policy.onnx", "golden.npz", "bundle.json"
TOLERANCE = 1e-4  # largest error of the golden chunks, in normalised action units
MAX_SCALE = 1e6  # action units per normalised unit, relative to the largest golden action if that exceeds 1

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class BundleManifest:
    """Metadata of a bundle; entries that the task does not declare are empty or None."""

    schema: int  # version of the layout
    policy: str  # kind of policy
    spec: dict[str, Any]  # `PolicySpec.to_dict()`: observations, action size, horizons
    network_calls: int  # network evaluations per chunk
    noise_shape: tuple[int, ...]  # (R, A) noise of one decision; () without noise
    takes_prefix: bool  # can continue a prefix of actions (real-time chunking)
    task: str  # task it was trained on
    control_dt: float | None  # seconds between two actions
    action_names: tuple[str, ...]  # one per dimension, with units in brackets
    action_low: tuple[float, ...]  # bounds of the actions, in their units
    action_high: tuple[float, ...]
    observation_names: dict[str, list[str]]  # names of the elements of vectors, with units in brackets
    cameras: dict[str, list[int]]  # name -> [height, width] of the images (3, height, width)
    action_scale: tuple[float, ...]  # action units per normalised unit
    checkpoint: str  # SHA-256 of the manifest of the checkpoint
    parity: float  # largest difference from torch at export, in normalised units
    versions: dict[str, str]  # package versions at export
    files: dict[str, str]  # name -> SHA-256

    @property
    def policy_spec(self) -> PolicySpec:
        """Specification as an object."""
        return PolicySpec.from_dict(self.spec)

    @property
    def identity(self) -> str:
        """Hash of the whole bundle."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class BundleReport:
    """Result of the comparison with the golden chunks."""

    ok: bool
    max_error: float  # largest difference from the stored chunks, in normalised units
    tolerance: float


class Bundle:
    """Open bundle, which is a `ChunkPolicy`; created by `open_bundle`."""

    def __init__(self, folder: Path, manifest: BundleManifest, session: Any, seed: int | None) -> None:
        self.folder, self.manifest = folder, manifest
        spec = manifest.policy_spec
        self._inputs = {entry.name: entry for entry in session.get_inputs()}
        self._session = session
        shapes = {key: shape for key, shape in spec.observation.items() if key != HIDDEN_STATE}
        self._spec = replace(spec, observation=shapes)
        self._hidden_shape = (1, 1, spec.hidden_dim)
        self._seed = secrets.randbits(63) if seed is None else seed
        self.reset()

    @property
    def spec(self) -> PolicySpec:
        """Specification of the policy, without the hidden state."""
        return self._spec

    @property
    def takes_prefix(self) -> bool:
        """Whether `chunk` accepts a prefix."""
        return self.manifest.takes_prefix

    @property
    def task_metadata(self) -> TaskMetadata:
        """Names, rate and bounds of the task that the policy was trained on."""
        found = self.manifest
        bounds = found.action_low, found.action_high
        return TaskMetadata(found.task, found.control_dt, found.action_names, *bounds, found.observation_names)

    def reset(self, seed: int | None = None) -> None:
        """Begin an episode: reset the hidden state and the noise, with a new `seed` if given."""
        self._seed = self._seed if seed is None else seed
        self._decision = 0
        self._hidden = np.zeros(self._hidden_shape, np.float32)

    def chunk(
        self,
        obs: Observed,
        prefix: NDArray[Any] | None = None,
        *,
        weight: NDArray[Any] | None = None,
        noise: NDArray[Any] | None = None,
    ) -> Float32:
        """Compute the chunk `(H, A)` for one observation, in action units.

        Args:
            obs: Observation history `{key: (To, ...)}`; other keys are ignored.
            prefix: Actions `(d, A)` to continue; requires `takes_prefix`.
            weight: Weight of each prefix action `(d,)`, in [0, 1]; 1 by default (see `prefix_weights`).
            noise: Standard normal noise of shape `noise_shape`; drawn by default.

        Raises:
            UserError: An argument does not fit the policy; the error states what was expected and found.
        """
        if self._session is None:
            raise UserError(f"The bundle {self.folder} is closed; open it again.")
        feed = {key: self._checked(key, obs) for key in self._spec.observation}
        if HIDDEN_STATE in self._inputs:
            feed[HIDDEN_STATE] = self._hidden
        if self.manifest.noise_shape:
            feed[NOISE] = self._noise(noise)
        elif noise is not None:
            raise UserError("This policy has no noise; leave out the argument.")
        if self.takes_prefix:
            feed[PREFIX], feed[PREFIX_WEIGHT] = self._prefix(prefix, weight)
        elif prefix is not None:
            raise UserError("This bundle cannot continue a prefix; export it with --rtc.")
        chunk, *memory = self._session.run([CHUNK, NEXT_MEMORY] if HIDDEN_STATE in feed else [CHUNK], feed)
        self._decision += 1
        if memory:
            self._hidden = memory[0]
        return chunk[0]

    def verify(self) -> BundleReport:
        """Compute the golden chunks here and compare; raises `UserError` if they do not fit the graph."""
        if self._session is None:
            raise UserError(f"The bundle {self.folder} is closed; open it again.")
        golden = read_golden(self.folder)
        error = golden_error(self._session, golden, np.array(self.manifest.action_scale), self.folder)
        return BundleReport(error <= TOLERANCE, error, TOLERANCE)

    def close(self) -> None:
        """Free the session; safe to call twice."""
        self._session = None

    def _checked(self, key: str, obs: Observed) -> NDArray[Any]:
        """Convert an observation to an input `(1, To, ...)` of the graph."""
        if key not in obs:
            raise UserError(f"The policy needs the observation '{key}', got {', '.join(sorted(obs)) or 'none'}.")
        value = np.asarray(obs[key])
        expected = (self._spec.obs_horizon, *self._spec.observation[key])
        if value.shape != expected:
            raise UserError(f"Observation '{key}' must have shape {expected}, found {value.shape}.")
        check_dtype(key, value.dtype)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise UserError(f"Observation '{key}' is not finite.")
        return value.astype(TYPES[self._inputs[key].type], copy=False)[None]

    def _noise(self, noise: NDArray[Any] | None) -> Float32:
        shape = self.manifest.noise_shape
        if noise is None:
            return episode_rng(self._seed, self._decision).standard_normal((1, *shape), dtype=np.float32)
        return _numbers("noise", noise, shape)[None]

    def _prefix(self, prefix: NDArray[Any] | None, weight: NDArray[Any] | None) -> tuple[Float32, Float32]:
        horizon, size = self._spec.horizon, self._spec.action_dim
        actions, weights = np.zeros((1, horizon, size), np.float32), np.zeros((1, horizon), np.float32)
        if prefix is None:
            return actions, weights
        count = len(np.atleast_1d(prefix))
        if not 1 <= count < horizon:
            raise UserError(f"A prefix must have 1 to {horizon - 1} actions, got {count}.")
        actions[0, :count] = _numbers("prefix", prefix, (count, size))
        weights[0, :count] = 1 if weight is None else _numbers("weight", weight, (count,))
        if weights.min() < 0 or weights.max() > 1:
            raise UserError("The weights of a prefix must lie in [0, 1].")
        return actions, weights


def open_bundle(folder: str | Path, *, seed: int | None = None, threads: int = 1) -> Bundle:
    """Check all files of a bundle and open it.

    Args:
        folder: Path of the bundle.
        seed: Seed of the noise, for reproducible chunks; random by default.
        threads: Threads per operator; 1 is fast for small networks and leaves the other cores to the control loop.

    Raises:
        UserError: The bundle is damaged, was changed, or cannot be run here.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        if sha256(folder / name) != expected:
            raise UserError(f"{folder / name} is damaged or was changed after the export; copy the bundle again.")
    session = open_session(folder / GRAPH, threads)
    _check_graph(session, manifest, folder)
    return Bundle(folder, manifest, session, seed)


def prefix_weights(horizon: int, delay: int, action_horizon: int) -> Float32:
    """Soft weights `(H - s,)` of the remaining actions of an old chunk after s executed ones (arXiv 2506.07339).

    The first `delay` actions will be executed in any case, so their weight is 1; the weights of the others decay.

    Raises:
        UserError: Not 0 <= delay <= horizon - action_horizon.
    """
    left = horizon - action_horizon
    if not 0 <= delay <= left or action_horizon < 1:
        chunk = f"chunks of {counted(horizon, 'action')} of which {action_horizon} are executed"
        raise UserError(f"A delay of {delay} does not fit {chunk}.")
    index = np.arange(left)
    fade = (left - index) / (left - delay + 1)
    return np.where(index < delay, 1.0, fade * np.expm1(fade) / np.expm1(1.0)).astype(np.float32)


def golden_error(session: Any, golden: Mapping[str, NDArray[Any]], scale: NDArray[Any], folder: Path) -> float:
    """Largest difference between the outputs of `session` and the golden outputs; chunks in normalised units.

    Raises:
        UserError: The golden file has no rows or does not fit the graph, or the scale does not fit its chunks.
    """
    inputs, outputs = [entry.name for entry in session.get_inputs()], [entry.name for entry in session.get_outputs()]
    foreign = UserError(f"{folder / GOLDEN} does not belong to the graph in the same folder; export it again.")
    if not {*inputs, *outputs} <= golden.keys() or golden[CHUNK].ndim != 3:
        raise foreign
    if not golden[CHUNK].size:
        raise UserError(f"{folder / GOLDEN} has no chunks to compare; export it again.")
    rows = len(golden[CHUNK])
    for entry in (*session.get_inputs(), *session.get_outputs()):
        array = golden[entry.name]
        if array.shape != (rows, *entry.shape[1:]) or array.dtype != TYPES.get(entry.type):
            raise foreign
    action = float(np.abs(golden[CHUNK]).max())
    if scale.max() > MAX_SCALE * max(action, 1.0):
        text = f"{folder / MANIFEST} has a scale of {scale.max():g} for golden actions of at most {action:g}"
        raise UserError(f"{text}; export the bundle again.")
    largest = 0.0
    for row in range(rows):
        found = session.run(outputs, {name: golden[name][row : row + 1] for name in inputs})
        for name, value in zip(outputs, found, strict=True):
            if value.shape != (1, *golden[name].shape[1:]):  # the runtime does not check the declared shapes
                raise foreign
            error = np.abs(value.astype(np.float64) - golden[name][row : row + 1]) / (scale if name == CHUNK else 1.0)
            largest = max(largest, float(error.max()) if np.isfinite(error).all() else float("inf"))
    return largest


def read_golden(folder: Path) -> dict[str, NDArray[Any]]:
    """Golden inputs and outputs of the graph by name, one row per decision."""
    try:
        return read_arrays(folder / GOLDEN)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / GOLDEN} cannot be read ({error}); copy the bundle again.") from error


def write_manifest(folder: Path, manifest: BundleManifest) -> None:
    """Write `bundle.json` with its own hash."""
    content = {**to_dict(manifest), "identity": manifest.identity}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> BundleManifest:
    """Read `bundle.json`; raises `UserError` if it is missing, damaged, changed, or of another version."""
    path = folder / MANIFEST
    try:
        content = json.loads(
            path.read_text(encoding="utf-8")
        )  # without `robopolicy.files`, which needs more packages than numpy
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} cannot be read ({reason}); pass a folder that 'robopolicy export' wrote.") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        raise UserError(f"{path} has schema {found}, expected {SCHEMA}; export the checkpoint again.")
    identity = content.pop("identity", None)
    manifest = from_dict(BundleManifest, content, str(path))
    if identity != manifest.identity or manifest.files.keys() != {GRAPH, GOLDEN}:
        raise UserError(f"{path} is damaged or was changed after the export; copy the bundle again.")
    actions, scales = PolicySpec.read(manifest.spec, str(path)).action_dim, manifest.action_scale
    if len(scales) != actions:
        raise UserError(f"{path} has {len(scales)} scales for {actions} actions; export the bundle again.")
    if not all(0 < scale < math.inf for scale in scales):
        raise UserError(f"{path} has scales that are not finite and positive; export the bundle again.")
    return manifest


def _check_graph(session: Any, manifest: BundleManifest, folder: Path) -> None:
    """Check shapes and types of the inputs and outputs of the graph against the manifest."""
    spec = manifest.policy_spec
    horizon, size = spec.horizon, spec.action_dim
    shapes = {key: shape for key, shape in spec.observation.items() if key != HIDDEN_STATE}
    inputs: dict[str, tuple[int, ...]] = {key: (1, spec.obs_horizon, *shape) for key, shape in shapes.items()}
    outputs: dict[str, tuple[int, ...]] = {CHUNK: (1, horizon, size)}
    if spec.hidden_dim:
        inputs[HIDDEN_STATE] = outputs[NEXT_MEMORY] = (1, 1, spec.hidden_dim)
    if manifest.noise_shape:
        inputs[NOISE] = (1, *manifest.noise_shape)
    if manifest.takes_prefix:
        inputs |= {PREFIX: (1, horizon, size), PREFIX_WEIGHT: (1, horizon)}
    for expected, entries in ((inputs, session.get_inputs()), (outputs, session.get_outputs())):
        found = {entry.name: tuple(entry.shape) for entry in entries}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"{folder / MANIFEST} does not belong to {GRAPH}: '{name}' is {expected.get(name, 'absent')} there "
                    f"and {found.get(name, 'absent')} in the graph; export it again."
                )
        for entry in entries:
            image = entry.name.startswith(IMAGE_PREFIX)
            allowed = [kind for kind, number in TYPES.items() if image or np.issubdtype(number, np.floating)]
            allowed = allowed if entry.name in shapes else ["tensor(float)"]
            if entry.type not in allowed:
                raise UserError(
                    f"'{entry.name}' of {folder / GRAPH} is {entry.type}, expected {' or '.join(allowed)}; export it "
                    "again."
                )


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of graph and golden file."""
    return {name: sha256(folder / name) for name in (GRAPH, GOLDEN)}


def _numbers(what: str, value: NDArray[Any], shape: tuple[int, ...]) -> Float32:
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"The {what} must be numbers of shape {shape}, found {type(value).__name__}.") from error
    if array.shape != shape or not np.isfinite(array).all():
        raise UserError(f"The {what} must be finite numbers of shape {shape}, found shape {array.shape}.")
    return array
