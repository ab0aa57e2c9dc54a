"""Deployment bundle: a policy as one folder, run with onnxruntime and numpy only.

policy.onnx     the graph: observations and noise in, chunk out; normalisers and sampler inside
bundle.json     specification, origin, SHA-256 of every file and of itself
golden.npz      observations, noise and the chunks that torch computed for them

    bundle = open_bundle("runs/lift_bundle", seed=0)
    bundle.verify()
    chunk = bundle.chunk({"state": history})  # (H, A)

A bundle draws the noise of its policy: with a seed, decision i of an episode equals decision i of an evaluation in
simulation with that seed. It keeps the hidden state of a recurrent policy; `reset` begins an episode.
Neither torch nor MuJoCo is imported. One caller at a time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.contract import Observed
from robopolicy.deploy.graph import CHUNK, NEXT_MEMORY, NOISE, PREFIX, PREFIX_WEIGHT, TYPES, open_session
from robopolicy.errors import UserError
from robopolicy.rng import episode_rng
from robopolicy.schema import from_dict, to_dict
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX, PolicySpec
from robopolicy.versions import sha256

SCHEMA = 1  # raise it with every change that an older reader would misunderstand
GRAPH, GOLDEN, MANIFEST = "policy.onnx", "golden.npz", "bundle.json"
TOLERANCE = 1e-4  # largest error of the golden chunks, in normalised action units

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class BundleManifest:
    """Metadata of a bundle; entries that a task does not declare are empty or None."""

    schema: int  # version of this layout
    policy: str  # kind of policy
    spec: dict[str, Any]  # `PolicySpec.to_dict()`: observations, action size, horizons
    network_calls: int  # network evaluations per chunk
    noise_shape: tuple[int, ...]  # (R, A) numbers that one decision draws; () where it draws none
    takes_prefix: bool  # continues given actions (real-time chunking)
    task: str  # task it was trained on
    control_dt: float | None  # seconds between two actions
    action_names: tuple[str, ...]  # one per dimension, with units in brackets
    action_low: tuple[float, ...]  # bounds of the actions, in their units
    action_high: tuple[float, ...]
    observation_names: dict[str, list[str]]  # names of the elements of vectors, with units in brackets
    cameras: dict[str, list[int]]  # name -> [height, width] of the images (3, height, width)
    action_scale: tuple[float, ...]  # action units per normalised unit, in which errors are measured
    checkpoint: str  # SHA-256 of the manifest of the checkpoint it was made from
    parity: float  # largest difference from torch where it was made, normalised units
    versions: dict[str, str]  # package versions at export
    files: dict[str, str]  # name -> SHA-256

    @property
    def policy_spec(self) -> PolicySpec:
        """The specification as an object."""
        return PolicySpec.from_dict(self.spec)

    @property
    def identity(self) -> str:
        """Hash of the content of the whole bundle."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class BundleReport:
    """Result of the comparison with the golden chunks."""

    ok: bool
    max_error: float  # largest difference from the stored chunks, normalised units
    tolerance: float


class Bundle:
    """An open bundle, a `ChunkPolicy`; created by `open_bundle`."""

    def __init__(self, folder: Path, manifest: BundleManifest, session: Any, seed: int | None) -> None:
        self.folder, self.manifest = folder, manifest
        whole = manifest.policy_spec
        self._inputs = {entry.name: entry for entry in session.get_inputs()}
        self._session = session
        seen = {key: shape for key, shape in whole.observation.items() if key != HIDDEN_STATE}
        self._spec = replace(whole, observation=seen)
        self._memory_shape = (1, 1, whole.hidden_dim)
        self._seed = secrets.randbits(63) if seed is None else seed
        self.reset()

    @property
    def spec(self) -> PolicySpec:
        """Specification of the policy without the hidden state of a recurrent policy."""
        return self._spec

    @property
    def takes_prefix(self) -> bool:
        """Whether `chunk` can continue given actions."""
        return self.manifest.takes_prefix

    def reset(self, seed: int | None = None) -> None:
        """Begin an episode: clear the state and restart the noise, with a new `seed` if given."""
        self._seed = self._seed if seed is None else seed
        self._decision = 0
        self._memory = np.zeros(self._memory_shape, np.float32)

    def chunk(
        self,
        obs: Observed,
        prefix: NDArray[Any] | None = None,
        *,
        weight: NDArray[Any] | None = None,
        noise: NDArray[Any] | None = None,
    ) -> Float32:
        """The chunk `(H, A)` for one observation, in action units.

        Args:
            obs: Observation history `{key: (To, ...)}`; further keys are ignored.
            prefix: Actions `(d, A)` to continue; needs `takes_prefix`.
            weight: Weight of each prefix action `(d,)`, in [0, 1]; 1 by default (see `prefix_weights`).
            noise: Standard normal numbers `noise_shape` instead of drawn ones.

        Raises:
            UserError: Something does not fit; one line with what was expected and found.
        """
        if self._session is None:
            raise UserError(f"The bundle {self.folder} is closed; open it again.")
        feed = {key: self._checked(key, obs) for key in self._spec.observation}
        if HIDDEN_STATE in self._inputs:
            feed[HIDDEN_STATE] = self._memory
        if self.manifest.noise_shape:
            feed[NOISE] = self._noise(noise)
        elif noise is not None:
            raise UserError("This policy draws no noise; leave it out.")
        if self.takes_prefix:
            feed[PREFIX], feed[PREFIX_WEIGHT] = self._prefix(prefix, weight)
        elif prefix is not None:
            raise UserError("This bundle cannot continue given actions; export it with --rtc.")
        chunk, *memory = self._session.run([CHUNK, NEXT_MEMORY] if HIDDEN_STATE in feed else [CHUNK], feed)
        self._decision += 1
        if memory:
            self._memory = memory[0]
        return chunk[0]

    def verify(self) -> BundleReport:
        """Compute the golden chunks and compare them.

        Raises:
            UserError: They do not belong to this graph.
        """
        if self._session is None:
            raise UserError(f"The bundle {self.folder} is closed; open it again.")
        golden = read_golden(self.folder)
        error = golden_error(self._session, golden, np.array(self.manifest.action_scale), self.folder)
        return BundleReport(error <= TOLERANCE, error, TOLERANCE)

    def close(self) -> None:
        """Free the session; may be called twice."""
        self._session = None

    def _checked(self, key: str, obs: Observed) -> NDArray[Any]:
        """One observation as the graph takes it, `(1, To, ...)`."""
        if key not in obs:
            raise UserError(f"The policy needs the observation '{key}', got {', '.join(sorted(obs)) or 'none'}.")
        value = np.asarray(obs[key])
        wanted = (self._spec.obs_horizon, *self._spec.observation[key])
        if value.shape != wanted:
            raise UserError(f"Observation '{key}' must have shape {wanted}, found {value.shape}.")
        kind = TYPES[self._inputs[key].type]
        fits = value.dtype == np.uint8 if key.startswith(IMAGE_PREFIX) else value.dtype.kind in "fiub"
        if not fits:
            expected = "uint8" if key.startswith(IMAGE_PREFIX) else "numbers"
            raise UserError(f"Observation '{key}' must be {expected}, found {value.dtype}.")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise UserError(f"Observation '{key}' is not finite.")
        return value.astype(kind, copy=False)[None]

    def _noise(self, noise: NDArray[Any] | None) -> Float32:
        shape = self.manifest.noise_shape
        if noise is None:
            return episode_rng(self._seed, self._decision).standard_normal((1, *shape), dtype=np.float32)
        return _numbers("noise", noise, shape)[None]

    def _prefix(self, prefix: NDArray[Any] | None, weight: NDArray[Any] | None) -> tuple[Float32, Float32]:
        horizon, size = self._spec.horizon, self._spec.action_dim
        given, held = np.zeros((1, horizon, size), np.float32), np.zeros((1, horizon), np.float32)
        if prefix is None:
            return given, held
        count = len(np.atleast_1d(prefix))
        if not 1 <= count < horizon:
            raise UserError(f"A prefix holds 1 to {horizon - 1} actions, got {count}.")
        given[0, :count] = _numbers("prefix", prefix, (count, size))
        held[0, :count] = 1 if weight is None else _numbers("weight", weight, (count,))
        if held.min() < 0 or held.max() > 1:
            raise UserError("The weights of a prefix lie in [0, 1].")
        return given, held


def open_bundle(folder: str | Path, *, seed: int | None = None, threads: int = 1) -> Bundle:
    """Check every file of a bundle and open it.

    Args:
        folder: Path of the bundle.
        seed: Seed of the noise, for reproducible chunks; random by default.
        threads: Threads per operator; one suits small networks and leaves the other cores to the control loop.

    Raises:
        UserError: It is damaged, was changed, or cannot be run here; one line.
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
        raise UserError(
            f"A delay of {delay} does not fit {horizon} actions of which {action_horizon} are executed at a time."
        )
    index = np.arange(left)
    fade = (left - index) / (left - delay + 1)
    return np.where(index < delay, 1.0, fade * np.expm1(fade) / np.expm1(1.0)).astype(np.float32)


def golden_error(session: Any, golden: Mapping[str, NDArray[Any]], scale: NDArray[Any], folder: Path) -> float:
    """Largest difference of what `session` computes from the golden outputs; chunks in normalised units.

    Raises:
        UserError: The golden inputs do not fit the graph.
    """
    inputs, outputs = [entry.name for entry in session.get_inputs()], [entry.name for entry in session.get_outputs()]
    if not {*inputs, *outputs} <= golden.keys():
        raise UserError(f"{folder / GOLDEN} does not belong to the graph in the same folder; export it again.")
    largest = 0.0
    for row in range(len(golden[CHUNK])):
        found = session.run(outputs, {name: golden[name][row : row + 1] for name in inputs})
        for name, value in zip(outputs, found, strict=True):
            error = np.abs(value.astype(np.float64) - golden[name][row : row + 1]) / (scale if name == CHUNK else 1.0)
            largest = max(largest, float(error.max()) if np.isfinite(error).all() else float("inf"))
    return largest


def read_golden(folder: Path) -> dict[str, NDArray[Any]]:
    """Golden inputs and outputs of the graph by name, one row per decision."""
    try:
        with np.load(folder / GOLDEN, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise UserError(f"{folder / GOLDEN} cannot be read ({error}); copy the bundle again.") from error


def write_manifest(folder: Path, manifest: BundleManifest) -> None:
    """Write `bundle.json`, with its own hash."""
    content = {**to_dict(manifest), "identity": manifest.identity}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> BundleManifest:
    """Read and check `bundle.json`.

    Raises:
        UserError: It is missing, of another version, damaged or was changed.
    """
    place = folder / MANIFEST
    try:
        content = json.loads(place.read_text(encoding="utf-8"))  # `robopolicy.files` needs more than numpy
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{place} cannot be read ({reason}); pass a folder that 'robopolicy export' wrote.") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        raise UserError(f"{place} has schema {found}, expected {SCHEMA}; export the checkpoint again.")
    identity = content.pop("identity", None)
    manifest = from_dict(BundleManifest, content, str(place))
    if identity != manifest.identity or manifest.files.keys() != {GRAPH, GOLDEN}:
        raise UserError(f"{place} is damaged or was changed after the export; copy the bundle again.")
    try:
        actions = manifest.policy_spec.action_dim
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place} does not describe a policy ({error}); export the checkpoint again.") from error
    if len(manifest.action_scale) != actions:
        raise UserError(f"{place} has {len(manifest.action_scale)} scales for {actions} actions; export it again.")
    return manifest


def _check_graph(session: Any, manifest: BundleManifest, folder: Path) -> None:
    """Check inputs and outputs of the graph against the manifest."""
    spec = manifest.policy_spec
    horizon, size = spec.horizon, spec.action_dim
    seen = {key: shape for key, shape in spec.observation.items() if key != HIDDEN_STATE}
    takes: dict[str, tuple[int, ...]] = {key: (1, spec.obs_horizon, *shape) for key, shape in seen.items()}
    gives: dict[str, tuple[int, ...]] = {CHUNK: (1, horizon, size)}
    if spec.hidden_dim:
        takes[HIDDEN_STATE] = gives[NEXT_MEMORY] = (1, 1, spec.hidden_dim)
    if manifest.noise_shape:
        takes[NOISE] = (1, *manifest.noise_shape)
    if manifest.takes_prefix:
        takes |= {PREFIX: (1, horizon, size), PREFIX_WEIGHT: (1, horizon)}
    for expected, entries in ((takes, session.get_inputs()), (gives, session.get_outputs())):
        found = {entry.name: tuple(entry.shape) for entry in entries}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"{folder / MANIFEST} does not belong to {GRAPH}: '{name}' is {expected.get(name, 'absent')} there "
                    f"and {found.get(name, 'absent')} in the graph; export it again."
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
