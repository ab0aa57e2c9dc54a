"""Manifest of a checkpoint: `manifest.json`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import robopolicy
from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy.plugins import Registry
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.migration import migrate
from robopolicy.schema import from_dict, to_dict
from robopolicy.spec import TaskMetadata
from robopolicy.training.migration import migrate_manifest
from robopolicy.versions import sha256, versions

SCHEMA = 1  # increased with every change that older readers would misinterpret
MANIFEST = "manifest.json"
OPTIONAL: dict[str, Any] = {"parents": [], "task_metadata": None}  # entries that are omitted if empty


@dataclass(frozen=True)
class ModelKind:
    """Kind of model in checkpoints; its manifests contain the name of the kind as a key."""

    noun: str
    command: str  # command of `robopolicy` that reads such checkpoints


KINDS: Registry[ModelKind] = Registry(
    "checkpoints",
    {"policy": ModelKind("policy", "eval"), "worldmodel": ModelKind("world model", "worldmodel")},
)
"""Key in a manifest -> kind of its checkpoint."""


@dataclass(frozen=True)
class Parent:
    """Checkpoint from which another one was composed."""

    path: str  # its folder, relative to the folder of the composed checkpoint
    policy: str  # key in `POLICIES`
    files: dict[str, str]  # relative path -> sha256 of the files that define the policy

    @property
    def identity(self) -> str:
        """Unique name of the content."""
        return " ".join(f"{name}:{self.files[name]}" for name in sorted(self.files))


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint."""

    schema: int  # version of this layout
    policy: str  # key in `POLICIES`
    config: dict[str, Any]  # fields of the policy's config
    spec: dict[str, Any]  # `PolicySpec.to_dict()`: observations, action size, horizons
    network_calls: int  # sampler steps: network evaluations per chunk
    task: str  # registered task id the policy was trained on
    training: dict[str, Any]  # free summary: algorithm, updates, env_steps, evaluation, ...
    versions: dict[str, str]  # robopolicy, python, torch, numpy, mujoco
    commit: str | None  # git commit of the source tree, if any
    files: dict[str, str]  # relative path -> sha256
    parents: tuple[Parent, ...] = ()  # checkpoints it was composed of; omitted in the file if empty
    task_metadata: TaskMetadata | None = None  # of a task without a simulator; omitted in the file if None

    @property
    def policy_spec(self) -> PolicySpec:
        """Specification as an object."""
        return PolicySpec.from_dict(self.spec)


def describe(
    policy: Policy,
    task: str,
    training: Mapping[str, Any],
    files: Mapping[str, str],
    parents: Sequence[Parent] = (),
    task_metadata: TaskMetadata | None = None,
) -> Manifest:
    """Create the manifest of `policy` in its present state."""
    return Manifest(
        schema=SCHEMA,
        policy=policy.name,
        config=policy.config_dict(),
        spec=policy.spec.to_dict(),
        network_calls=policy.nfe,
        task=task,
        training=dict(training),
        versions=versions(),
        commit=git_commit(),
        files=dict(files),
        parents=tuple(parents),
        task_metadata=task_metadata,
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`."""
    content = {key: value for key, value in to_dict(manifest).items() if key not in OPTIONAL or value}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json` of a policy, migrated to present names.

    Raises:
        UserError: The folder is not a checkpoint, or its manifest is damaged, of a newer schema, or invalid.
    """
    data = migrate_manifest(manifest_content(folder, SCHEMA, "policy"))
    manifest = from_dict(Manifest, {**OPTIONAL, **data}, str(folder / MANIFEST))
    try:
        _ = manifest.policy_spec
    except (TypeError, ValueError) as error:
        raise UserError(f"Manifest of {folder} does not describe a valid policy: {error}") from error
    return replace(manifest, config=migrate(manifest.config))


def manifest_content(folder: Path, newest: int, kind: str) -> dict[str, Any]:
    """Read the plain values of the `manifest.json` of a model of `kind` (key in `KINDS`), of schema <= `newest`.

    Raises:
        UserError: As in `read_manifest`; for another kind, the message names the command that reads it.
    """
    file = folder / MANIFEST
    if not folder.exists():
        raise UserError(f"Checkpoint {folder} does not exist; pass a folder that contains {MANIFEST}.")
    if not file.is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {MANIFEST}; pass e.g. runs/NAME/checkpoints/best.")
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); copy the checkpoint again or repeat the training.") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int):
        raise UserError(f"{file} has no schema version; copy the checkpoint again or repeat the training.")
    if schema > newest:
        raise UserError(
            f"Checkpoint {folder} has schema {schema}, newer than {newest}, the newest that robopolicy "
            f"{robopolicy.__version__} reads; upgrade robopolicy."
        )
    if kind not in data:
        expected, other = KINDS[kind].noun, next((KINDS[name] for name in KINDS if name in data), None)
        if other is None:
            raise UserError(f"{file} does not describe a {expected}; copy the checkpoint again or repeat the training.")
        raise UserError(f"{folder} contains a {other.noun}, not a {expected}; pass it to 'robopolicy {other.command}'.")
    return data


class Listing(Protocol):
    """Interface of manifests: a list of files."""

    @property
    def files(self) -> Mapping[str, str]:
        """Relative path -> sha256."""
        ...


def check_files(folder: Path, manifest: Listing, prefix: str = "") -> None:
    """Raise a UserError if a listed file whose path starts with `prefix` is missing or its SHA-256 differs."""
    for name, expected in manifest.files.items():
        if not name.startswith(prefix):
            continue
        if not (folder / name).is_file():
            raise UserError(f"Checkpoint {folder} lacks {name}; copy it again in full.")
        if sha256(folder / name) != expected:
            raise UserError(f"{folder / name} is corrupted or truncated (SHA-256 differs); copy the checkpoint again.")


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by relative path."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return {name: sha256(folder / name) for name in names}


@cache  # the code that runs was imported at the start
def git_commit() -> str | None:
    """Return the commit of the source tree, with `+` for modified tracked files; None outside a git repository."""
    root = Path(robopolicy.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *args: str) -> str:
    command = ["git", "-C", str(root), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


CONTENT = (MANIFEST, "model.safetensors")  # files that define the policy of a checkpoint


def record_parent(parent: Path, checkpoint: Path) -> Parent:
    """Create the record of `parent` for the manifest of `checkpoint`, which need not exist yet."""
    policy = read_manifest(parent).policy
    path = Path(os.path.relpath(parent.resolve(), checkpoint.resolve())).as_posix()
    return Parent(path, policy, {name: sha256(parent / name) for name in CONTENT if (parent / name).is_file()})


def parent_path(parent: Parent, checkpoint: Path) -> Path:
    """Return the path of the `parent` of `checkpoint`, relative to the working directory."""
    return Path(os.path.relpath(checkpoint.resolve() / parent.path))


def check_parents(parents: Sequence[Parent], checkpoint: Path) -> None:
    """Raise a UserError if a parent of `checkpoint` was moved, deleted or changed since the composition."""
    for parent in parents:
        path = parent_path(parent, checkpoint)
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path}, of which {checkpoint} was composed, no longer exists; restore it, or compose again with its "
                "new path."
            )
        for name, digest in parent.files.items():
            found = sha256(path / name) if (path / name).is_file() else "missing"
            if found != digest:
                raise UserError(
                    f"{path} has changed since {checkpoint} was composed of it: {name} was {digest[:12]} and is "
                    f"{found[:12]}; restore the old version, or compose again."
                )


def shared_observations(samples: Sequence[Observation], spec: PolicySpec) -> Observation:
    """Join observations `{key: (B, To, ...)}` of several policies for a policy `spec` with all their keys.

    The first sample with a key provides it; histories are truncated or padded with copies of the first step.
    """
    found: dict[str, Tensor] = {}
    for sample in samples:
        found = {**sample, **found}
    rows = min(len(value) for value in found.values())
    return {key: _history(found[key][:rows], spec.obs_horizon) for key in spec.observation}


def _history(value: Tensor, length: int) -> Tensor:
    missing = length - value.shape[1]
    if missing > 0:
        value = torch.cat([value[:, :1].repeat_interleave(missing, 1), value], 1)
    return value[:, -length:]
