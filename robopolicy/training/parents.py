"""What a composed checkpoint was made of: recorded in its manifest, compared by `verify` with what lies there now.

A composed checkpoint holds the weights of its parents, so it needs them no longer. The record says what it was made of,
and whether that is still what lies at its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.training.manifest import MANIFEST, Parent, read_manifest, sha256

CONTENT = (MANIFEST, "model.safetensors")  # what decides which policy a checkpoint is


@dataclass(frozen=True)
class ParentState:
    """A recorded parent as it is now."""

    parent: Parent
    path: str  # seen from here
    state: str  # unchanged | changed | missing


def record_parent(parent: Path, checkpoint: Path) -> Parent:
    """The record of `parent` for the manifest of `checkpoint`, which need not exist yet.

    Raises:
        UserError: `parent` is no checkpoint.
    """
    policy = read_manifest(parent).policy
    path = Path(os.path.relpath(parent.resolve(), checkpoint.resolve())).as_posix()
    return Parent(path, policy, {name: sha256(parent / name) for name in CONTENT if (parent / name).is_file()})


def parent_states(parents: Sequence[Parent], checkpoint: Path) -> tuple[ParentState, ...]:
    """Compare every parent recorded in `checkpoint` with what lies at its place."""
    return tuple(_state(parent, checkpoint) for parent in parents)


def shared_observations(samples: Sequence[Observation], spec: PolicySpec) -> Observation:
    """Join observations `{key: (B, To, ...)}` of several policies to those of one that sees all their keys.

    A key that several have comes from the first of them; histories are cut, or begun with copies, to fit `spec`.
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


def _state(parent: Parent, checkpoint: Path) -> ParentState:
    place = Path(os.path.relpath(checkpoint.resolve() / parent.path))
    if not (place / MANIFEST).is_file():
        return ParentState(parent, str(place), "missing")
    same = all((place / name).is_file() and sha256(place / name) == digest for name, digest in parent.files.items())
    return ParentState(parent, str(place), "unchanged" if same else "changed")
