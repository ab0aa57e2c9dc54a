"""Checkpoints: a folder that is complete, readable without unpickling, and able to prove that it still works.

model.safetensors     weights and normaliser statistics
manifest.json         policy, configuration, horizons, task, versions, SHA-256 of the other files
golden.safetensors    a few observations, the noise drawn for them, and the chunk that came out
training_state/       optional: everything that decides how training goes on
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

from robopolicy.device import usable_device
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import atomic_folder, check_owned, restore_partial, write_text
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.nets.normalizer import Normalizer, unfitted_normalizers
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.migration import migrate_state
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import fill_defaults, from_dict, to_dict
from robopolicy.spec import HIDDEN_STATE
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
GOLDEN_ROWS = 4  # observations kept in the golden file
TOLERANCE = 1e-4  # largest golden error that passes, in action units; other CPUs and GPUs round differently

AnyModel = TypeVar("AnyModel", bound=nn.Module)
AnyListing = TypeVar("AnyListing", bound=Listing)


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of recomputing the golden chunk."""

    ok: bool
    max_error: float  # largest absolute difference from the stored chunk, in action units
    tolerance: float
    manifest: Manifest
    versions: dict[str, str]  # of this installation, to compare with the manifest's


def save_checkpoint(
    path: str | Path,
    policy: Policy,
    *,
    task: str,
    obs_sample: Observation,
    training: Mapping[str, Any] | None = None,
    training_state: Mapping[str, Any] | None = None,
    parents: Sequence[Parent] = (),
) -> Manifest:
    """Write a checkpoint folder atomically, replacing an older checkpoint of the same name.

    Args:
        path: Folder to create.
        policy: What to save: its weights, buffers and configuration.
        task: Registered task id.
        obs_sample: Observations `{key: (B, To, ...)}` as the policy sees them; the first few become the golden input.
        training: Summary for people and reports, plain JSON values.
        training_state: Nested state for exact resume (see `statetree`).
        parents: Records of the checkpoints it was composed of (see `parents`).

    Raises:
        UserError: The policy is not finite or lacks statistics, the place holds something else, or writing failed.
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
        manifest = describe(policy, task, training or {}, file_hashes(temporary), parents)
        write_manifest(temporary, manifest)
    return manifest


def load_policy(path: str | Path, device: str | torch.device = "cpu") -> tuple[Policy, Manifest]:
    """Load a policy strictly, in evaluation mode.

    Raises:
        UserError: One sentence that says what is wrong with the checkpoint and what to do.
    """
    folder, device = Path(path), usable_device(device)
    restore_partial(folder)
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
            policy = policy_class(config, manifest.policy_spec)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"Manifest of {folder} does not describe a valid policy: {error}") from error
    weights = migrate_state(_read_tensors(folder / MODEL))
    _check_weights(policy, weights, folder)
    policy.load_state_dict(weights, strict=True)
    _check_fitted(policy, f"Checkpoint {folder}")
    policy.to(device).eval()
    if filled and _golden_error(policy, folder) > TOLERANCE:
        raise UserError(
            f"Policy config of {folder} lacks '{filled[0]}', and its default computes other actions than it was saved "
            "with; load it with the version that wrote it."
        )
    return policy, manifest


def save_model(folder: Path, model: nn.Module, manifest: Any, state: Mapping[str, Any] | None, what: str) -> None:
    """Write the checkpoint of a model that is no policy, replacing an older one of the same name.

    Args:
        folder: To write.
        model: Its weights and buffers.
        manifest: Dataclass with a field `files`, which is filled in.
        state: Training state for exact resume, where there is one.
        what: "world model", for messages.

    Raises:
        UserError: The weights are not finite, the place holds something else, or writing failed.
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
    """Load such a checkpoint strictly, in evaluation mode.

    Args:
        path: Of its folder.
        device: Of the model.
        read: Reader of its manifest.
        make: `make(manifest, folder)` builds the model that the manifest describes.

    Raises:
        UserError: One sentence that says what is wrong with the checkpoint.
    """
    folder, device = Path(path), usable_device(device)
    restore_partial(folder)
    manifest = read(folder)
    check_files(folder, manifest, MODEL)
    model = make(manifest, folder)
    try:
        model.load_state_dict(load_file(folder / MODEL), strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / MODEL} does not fit its manifest; copy the checkpoint again.") from error
    return model.to(device).eval(), manifest


def load_training_state(path: str | Path, read: Callable[[Path], Listing] = read_manifest) -> Any:
    """Read the training state saved beside the weights; tensors come back on the CPU.

    Args:
        path: Folder of the checkpoint.
        read: Reader of its manifest.

    Raises:
        UserError: There is none, or it is damaged.
    """
    folder = Path(path)
    restore_partial(folder)
    manifest = read(folder)
    if not any(name.startswith(f"{STATE}/") for name in manifest.files):
        raise UserError(f"{folder} has no {STATE}, so training cannot resume from it; pass checkpoints/last of a run.")
    check_files(folder, manifest, f"{STATE}/")
    return migrate_state(load_tree(folder / STATE))


def golden_observations(path: str | Path) -> Observation:
    """The observations `{key: (B, To, ...)}` stored beside a checkpoint.

    Raises:
        UserError: There are none, or they are damaged.
    """
    folder = Path(path)
    check_files(folder, read_manifest(folder), GOLDEN)
    return _observations(_read_tensors(folder / GOLDEN))


def verify_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> VerifyReport:
    """Check every file of a checkpoint and recompute its golden chunk.

    Raises:
        UserError: The checkpoint cannot be loaded at all, or a parent it was composed of was moved or changed.
    """
    folder, device = Path(path), usable_device(device)
    policy, manifest = load_policy(folder, device)
    check_files(folder, manifest)
    check_parents(manifest.parents, folder)
    error = _golden_error(policy, folder)
    return VerifyReport(error <= TOLERANCE, error, TOLERANCE, manifest, versions())


def _write_tensors(folder: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any] | None) -> None:
    """Write the weights and, where there is one, the training state."""
    save_file(dict(weights), folder / MODEL)
    if state is not None:
        (folder / STATE).mkdir()
        save_tree(folder / STATE, state)


def _golden_error(policy: Policy, folder: Path) -> float:
    """Largest difference of what `policy` does from the golden chunk; infinite where it is not finite."""
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
    """Refuse a golden file whose observations or chunk are not those of `policy`."""
    spec = policy.spec
    steps = {key: 1 if key == HIDDEN_STATE else spec.obs_horizon for key in spec.observation}
    wanted = {key: (steps[key], *shape) for key, shape in spec.observation.items()}
    found = {key: tuple(value.shape[1:]) for key, value in obs.items()}
    rows = {len(value) for value in [*obs.values(), golden.get("chunk", torch.empty(0))]}
    if found != wanted or len(rows) != 1 or rows == {0}:
        raise UserError(f"{folder / GOLDEN} does not fit the policy beside it; save the checkpoint again.")


class _Recorder(PerRowGenerator):
    """Row streams that keep what they handed out."""

    def __init__(self, rows: int) -> None:
        super().__init__(seeds=range(rows), steps=[0] * rows)
        self.draws: list[Tensor] = []

    def normal(self, shape: Sequence[int]) -> Tensor:
        self.draws.append(super().normal(shape))
        return self.draws[-1]


class _Replay(PerRowGenerator):
    """Hands out stored noise, so that the golden chunk depends on no random generator."""

    def __init__(self, rows: int, draws: list[Tensor]) -> None:
        super().__init__(seeds=range(rows), steps=[0] * rows)
        self.draws = list(draws)

    def normal(self, shape: Sequence[int]) -> Tensor:
        if not self.draws or tuple(self.draws[0].shape) != tuple(shape):
            raise UserError("The policy asks for other noise than the golden file holds; its sampler has changed.")
        return self.draws.pop(0)


@torch.no_grad()
def _record_golden(policy: Policy, obs_sample: Observation) -> dict[str, Tensor]:
    obs = {key: value[:GOLDEN_ROWS].to(policy.device) for key, value in obs_sample.items()}
    rows = int(next(iter(obs.values())).shape[0])
    recorder = _Recorder(rows)
    with evaluation_mode(policy):
        chunk = policy.act(obs, deterministic=True, generator=recorder)
    if not bool(torch.isfinite(chunk).all()):
        raise UserError("The policy to save returns non-finite actions; lower the learning rate or check the data.")
    tensors = {f"obs.{key}": value for key, value in obs.items()} | {"chunk": chunk}
    tensors |= {f"noise.{index}": draw for index, draw in enumerate(recorder.draws)}
    return {key: portable(value) for key, value in tensors.items()}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy the checkpoint again.") from error


def _check_weights(policy: Policy, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse weights that do not fit `policy` exactly, statistics first."""
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
        raise UserError(f"Checkpoint {folder} has weight '{extra[0]}', which policy '{policy.name}' does not know.")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            found, wanted = tuple(value.shape), tuple(expected[key].shape)
            raise UserError(f"Weight '{key}' of {folder} has shape {found}, but its manifest implies {wanted}.")
    _check_values(policy, weights, f"Checkpoint {folder}")


def _statistics(policy: Policy) -> set[str]:
    """Keys of the state dict that belong to normalisers."""
    parts = [(name, part) for name, part in policy.named_modules() if isinstance(part, Normalizer)]
    return {f"{name}.{key}" for name, part in parts for key in part.state_dict()}


def _check_values(policy: Policy, weights: Mapping[str, Tensor], what: str) -> None:
    for key, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            kind = "normaliser statistics" if key in _statistics(policy) else "weights"
            raise UserError(f"{what} has non-finite {kind} in '{key}'; go back to an earlier checkpoint.")


def _check_fitted(policy: Policy, what: str) -> None:
    unfitted = unfitted_normalizers(policy)
    if unfitted:
        raise UserError(
            f"{what} has no normaliser statistics: '{unfitted[0]}' never saw data; fit it to a dataset and save again."
        )
