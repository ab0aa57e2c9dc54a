"""Checkpoints: folders that are written atomically, contain no pickles, and verify themselves.

model.safetensors     weights and normaliser statistics
manifest.json         policy, configuration, horizons, task, versions, SHA-256 of the other files
golden.safetensors    a few observations, the noise drawn for them, and the resulting chunk
training_state/       optional: the full state for resuming training
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robopolicy.atomic import atomic_folder, read_stable, write_text
from robopolicy.device import usable_device
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import check_owned
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.nets.normalizer import Normalizer, unfitted_normalizers
from robopolicy.permissions import may_load_code
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.migration import migrate_state
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import fill_defaults, from_dict, to_dict
from robopolicy.spec import HIDDEN_STATE, PolicySpec, TaskMetadata
from robopolicy.training.manifest import (
    MANIFEST,
    Listing,
    Manifest,
    Parent,
    check_files,
    check_parents,
    describe,
    file_hashes,
    read_manifest,
    versions,
    write_manifest,
)
from robopolicy.training.resume import load_tree, portable, save_tree

MODEL, GOLDEN, STATE = "model.safetensors", "golden.safetensors", "training_state"
MAX_SMALL = 1_000_000  # numbers that a policy may have without weights
GOLDEN_ROWS = 4  # observations in the golden file
TOLERANCE = 1e-4  # largest golden error that passes, in action units; other CPUs and GPUs round differently

AnyModel = TypeVar("AnyModel", bound=nn.Module)
AnyListing = TypeVar("AnyListing", bound=Listing)


@dataclass(frozen=True)
class VerifyReport:
    """Result of recomputing the golden chunk."""

    ok: bool
    max_error: float  # largest absolute difference from the stored chunk, in action units
    tolerance: float
    manifest: Manifest
    versions: dict[str, str]  # of this installation, for comparison with the manifest


def save_checkpoint(
    path: str | Path,
    policy: Policy,
    *,
    task: str,
    obs_sample: Observation,
    task_metadata: TaskMetadata | None = None,
    training: Mapping[str, Any] | None = None,
    training_state: Mapping[str, Any] | None = None,
    parents: Sequence[Parent] = (),
) -> Manifest:
    """Write a checkpoint folder atomically, replacing an older checkpoint of the same name.

    Args:
        path: Folder to create.
        policy: Policy to save: weights, buffers and configuration.
        task: Registered task id.
        obs_sample: Policy observations `{key: (B, To, ...)}`; the first few become the golden input.
        task_metadata: Names, rate and instructions of a task without a simulator.
        training: Summary in plain JSON values.
        training_state: Nested state for exact resume (see `save_tree`).
        parents: Records of the checkpoints it was composed of (see `record_parent`).

    Raises:
        UserError: Weights are not finite, statistics are missing, the path is not ours, or writing failed.
    """
    folder = Path(path)
    check_owned(folder, MANIFEST, "a checkpoint")
    weights = {key: portable(value) for key, value in policy.state_dict().items()}
    _check_values(policy, weights, "The policy to save")
    _check_fitted(policy, "The policy to save")
    golden = _record_golden(policy, obs_sample)
    with atomic_folder(folder) as temporary:
        _write_tensors(temporary, weights, training_state)
        save_file(golden, temporary / GOLDEN)
        manifest = describe(policy, task, training or {}, file_hashes(temporary), parents, task_metadata)
        write_manifest(temporary, manifest)
    return manifest


def load_policy(path: str | Path, device: str | torch.device = "cpu") -> tuple[Policy, Manifest]:
    """Load a policy strictly, in evaluation mode; a UserError describes a missing or invalid checkpoint."""
    folder, device = Path(path), usable_device(device)
    return read_stable(folder, lambda: _load_policy(folder, device))


def _load_policy(folder: Path, device: torch.device) -> tuple[Policy, Manifest]:
    manifest = read_manifest(folder)
    for name in (MODEL, GOLDEN):
        if name not in manifest.files:
            raise UserError(f"Manifest of {folder} does not list {name}; copy the checkpoint again in full.")
        check_files(folder, manifest, name)
    if manifest.policy not in POLICIES:
        raise unknown_name("policy", manifest.policy, POLICIES, f"in {folder}")
    policy_class = POLICIES[manifest.policy]
    config_class = policy_class.config_class
    with fill_defaults() as filled:
        config = from_dict(config_class, manifest.config, f"policy config of {folder}")
        try:
            _check_size(policy_class, config, manifest.policy_spec, folder)
            policy = policy_class(config, manifest.policy_spec)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"Manifest of {folder} does not describe a valid policy: {error}") from error
    if not may_load_code() and any(isinstance(part, Policy) and part.contains_code for part in policy.modules()):
        text = "contains a Python program, which runs when the policy acts"
        raise UserError(f"Checkpoint {folder} {text}; pass --allow-code if you trust its author.")
    weights = migrate_state(_read_tensors(folder / MODEL))
    _check_weights(policy, weights, folder)
    policy.load_state_dict(weights, strict=True)
    _check_fitted(policy, f"Checkpoint {folder}")
    policy.to(device).eval()
    if filled and _golden_error(policy, folder) > TOLERANCE:
        raise UserError(
            f"Policy config of {folder} lacks '{filled[0]}', and the default gives different actions than the saved "
            "policy; load it with the version that wrote it."
        )
    return policy, manifest


def _check_size(policy_class: type[Policy], config: Any, spec: PolicySpec, folder: Path) -> None:
    """Raise a UserError if a manifest describes many more numbers than are stored, before they are allocated."""
    if policy_class.is_external:
        return
    try:
        with torch.device("meta"):
            described = sum(value.numel() for value in policy_class(config, spec).state_dict().values())
    except (RuntimeError, NotImplementedError):  # it computes while it is built, as policies of policies do
        return
    stored = (folder / MODEL).stat().st_size
    if described > 2 * stored + MAX_SMALL:
        text = f"{described} numbers, but its weights have {stored} bytes"
        raise UserError(f"Manifest of {folder} describes a policy of {text}; copy the checkpoint again.")


def save_model(folder: Path, model: nn.Module, manifest: Any, state: Mapping[str, Any] | None, what: str) -> None:
    """Write the checkpoint of a model other than a policy, replacing an older one of the same name.

    Args:
        folder: Folder to write.
        model: Weights and buffers.
        manifest: Dataclass with a field `files`, which is filled in.
        state: Training state for exact resume, or None.
        what: Kind of model for messages, e.g. "world model".

    Raises:
        UserError: The weights are not finite, the path is not ours, or writing failed.
    """
    check_owned(folder, MANIFEST, "a checkpoint")
    weights = {key: portable(value) for key, value in model.state_dict().items()}
    for key, value in weights.items():
        if not bool(value.isfinite().all()):
            raise UserError(f"The {what} to save has non-finite numbers in '{key}'; lower the learning rate.")
    with atomic_folder(folder) as temporary:
        _write_tensors(temporary, weights, state)
        complete = replace(manifest, files=file_hashes(temporary))
        write_text(temporary / MANIFEST, json.dumps(to_dict(complete), indent=2) + "\n")


def load_model(
    path: str | Path,
    device: str | torch.device,
    read: Callable[[Path], AnyListing],
    make: Callable[[AnyListing, Path], AnyModel],
) -> tuple[AnyModel, AnyListing]:
    """Load a checkpoint of `save_model` strictly, in evaluation mode.

    `read` reads its manifest, and `make(manifest, folder)` builds the model that the manifest describes. An invalid
    checkpoint raises a UserError.
    """
    folder, device = Path(path), usable_device(device)

    def load() -> tuple[AnyModel, AnyListing]:
        manifest = read(folder)
        check_files(folder, manifest, MODEL)
        model = make(manifest, folder)
        try:
            model.load_state_dict(load_file(folder / MODEL), strict=True)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{folder / MODEL} does not fit its manifest; copy the checkpoint again.") from error
        return model.to(device).eval(), manifest

    return read_stable(folder, load)


def load_training_state(path: str | Path, read: Callable[[Path], Listing] = read_manifest) -> Any:
    """Load the training state of the checkpoint `path` on the CPU, with `read` as the reader of its manifest.

    Raises:
        UserError: The state is missing or damaged.
    """
    folder = Path(path)

    def load() -> Any:
        manifest = read(folder)
        if not any(name.startswith(f"{STATE}/") for name in manifest.files):
            text = f"{folder} has no {STATE}, so training cannot resume from it"
            raise UserError(f"{text}; pass checkpoints/last of a run.")
        check_files(folder, manifest, f"{STATE}/")
        try:
            state = migrate_state(load_tree(folder / STATE))
            if not isinstance(state, dict):
                raise TypeError("no mapping")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{folder / STATE} is damaged ({error}); resume from another checkpoint.") from error
        return state

    return read_stable(folder, load)


def golden_observations(path: str | Path) -> Observation:
    """Load the observations `{key: (B, To, ...)}` stored in a checkpoint; invalid files raise a UserError."""
    folder = Path(path)

    def load() -> Observation:
        check_files(folder, read_manifest(folder), GOLDEN)
        return _observations(_read_tensors(folder / GOLDEN))

    return read_stable(folder, load)


def verify_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> VerifyReport:
    """Check every file of a checkpoint and recompute its golden chunk.

    Raises:
        UserError: The checkpoint cannot be loaded, or a parent it was composed of was moved or changed.
    """
    folder, device = Path(path), usable_device(device)

    def verify() -> VerifyReport:
        policy, manifest = _load_policy(folder, device)
        check_files(folder, manifest)
        check_parents(manifest.parents, folder)
        error = _golden_error(policy, folder)
        return VerifyReport(error <= TOLERANCE, error, TOLERANCE, manifest, versions())

    return read_stable(folder, verify)


def _write_tensors(folder: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> None:
    """Write the weights and the optional training state."""
    save_file(dict(weights), folder / MODEL)
    if state is not None:
        (folder / STATE).mkdir()
        save_tree(folder / STATE, state)


def _golden_error(policy: Policy, folder: Path) -> float:
    """Return the largest absolute difference from the golden chunk; infinite if the chunk is not finite."""
    golden = _read_tensors(folder / GOLDEN)
    obs = {key: value.to(policy.device) for key, value in _observations(golden).items()}
    _check_golden(golden, obs, policy, folder)
    expected = golden["chunk"]
    noise = [golden[f"noise.{index}"] for index in range(sum(key.startswith("noise.") for key in golden))]
    with torch.no_grad():
        chunk = policy.act(obs, deterministic=True, generator=_Replay(len(expected), noise)).cpu()
    same = chunk.shape == expected.shape and bool(torch.isfinite(chunk).all())
    return float((chunk.double() - expected.double()).abs().max()) if same else float("inf")


def _observations(golden: Mapping[str, Tensor]) -> Observation:
    return {key[4:]: value for key, value in golden.items() if key.startswith("obs.")}


def _check_golden(golden: Mapping[str, Tensor], obs: Observation, policy: Policy, folder: Path) -> None:
    """Raise a UserError if the golden observations or the golden chunk do not fit `policy`."""
    spec = policy.spec
    steps = {key: 1 if key == HIDDEN_STATE else spec.obs_horizon for key in spec.observation}
    expected = {key: (steps[key], *shape) for key, shape in spec.observation.items()}
    found = {key: tuple(value.shape[1:]) for key, value in obs.items()}
    rows = {len(value) for value in [*obs.values(), golden.get("chunk", torch.empty(0))]}
    if found != expected or len(rows) != 1 or rows == {0}:
        raise UserError(f"{folder / GOLDEN} does not fit the policy of the checkpoint; save the checkpoint again.")


class _Recorder(PerRowGenerator):
    """Per-row generator that records its draws."""

    def __init__(self, rows: int) -> None:
        super().__init__(seeds=range(rows), steps=[0] * rows)
        self.draws: list[Tensor] = []

    def normal(self, shape: Sequence[int]) -> Tensor:
        self.draws.append(super().normal(shape))
        return self.draws[-1]


class _Replay(PerRowGenerator):
    """Per-row generator that returns stored noise, so that the golden chunk depends on no random generator."""

    def __init__(self, rows: int, draws: list[Tensor]) -> None:
        super().__init__(seeds=range(rows), steps=[0] * rows)
        self.draws = list(draws)

    def normal(self, shape: Sequence[int]) -> Tensor:
        if not self.draws or tuple(self.draws[0].shape) != tuple(shape):
            raise UserError(
                "The policy requests different noise than the golden file contains; its sampler has changed."
            )
        return self.draws.pop(0)


@torch.no_grad()
def _record_golden(policy: Policy, obs_sample: Observation) -> dict[str, Tensor]:
    seen = {key: value for key, value in obs_sample.items() if key in policy.spec.observation}
    obs = {key: value[:GOLDEN_ROWS].to(policy.device) for key, value in seen.items()}
    rows = int(next(iter(obs.values())).shape[0])
    recorder = _Recorder(rows)
    with evaluation_mode(policy):
        chunk = policy.act(obs, deterministic=True, generator=recorder)
    if not bool(torch.isfinite(chunk).all()):
        raise UserError(
            "The policy to save returns actions that are not finite numbers; lower the learning rate, check the data, "
            "or correct the formulas of its program."
        )
    tensors = {f"obs.{key}": value for key, value in obs.items()} | {"chunk": chunk}
    tensors |= {f"noise.{index}": draw for index, draw in enumerate(recorder.draws)}
    return {key: portable(value) for key, value in tensors.items()}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy the checkpoint again.") from error


def _check_weights(policy: Policy, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise a UserError if the weights do not fit `policy` exactly; statistics are checked first."""
    expected = policy.state_dict()
    missing = sorted(expected.keys() - weights.keys())
    statistics = [key for key in missing if key in _statistics(policy)]
    if statistics:
        raise UserError(
            f"Checkpoint {folder} has no normaliser statistics ('{statistics[0]}' is missing), so its actions would be "
            "wrong; save it again from the training run."
        )
    if missing:
        raise UserError(f"Checkpoint {folder} lacks weight '{missing[0]}'; save it again from the training run.")
    extra = sorted(weights.keys() - expected.keys())
    if extra:
        raise UserError(f"Checkpoint {folder} has weight '{extra[0]}', which policy '{policy.name}' does not have.")
    for key, value in weights.items():
        if value.is_complex() and not expected[key].is_complex():
            raise UserError(f"'{key}' of {folder} holds complex numbers; save the checkpoint again from the run.")
        if value.shape != expected[key].shape:
            shapes = f"{tuple(value.shape)}, but its manifest implies {tuple(expected[key].shape)}"
            raise UserError(f"Weight '{key}' of {folder} has shape {shapes}.")
    _check_values(policy, weights, f"Checkpoint {folder}")


def _statistics(policy: Policy) -> set[str]:
    """Return the state dict keys of the normalisers."""
    parts = [(name, part) for name, part in policy.named_modules() if isinstance(part, Normalizer)]
    return {f"{name}.{key}" for name, part in parts for key in part.state_dict()}


def _check_values(policy: Policy, weights: Mapping[str, Tensor], what: str) -> None:
    for key, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            kind = "normaliser statistics" if key in _statistics(policy) else "weights"
            raise UserError(f"{what} has non-finite {kind} in '{key}'; use an earlier checkpoint.")


def _check_fitted(policy: Policy, what: str) -> None:
    unfitted = unfitted_normalizers(policy)
    if unfitted:
        raise UserError(
            f"{what} has no normaliser statistics: '{unfitted[0]}' is not fitted; fit it to a dataset and save again."
        )
