"""What a composed checkpoint was made of: recorded in its manifest by content, compared with what lies there now.

A composed checkpoint holds the weights of its parents, so it plays without them. The record is its pedigree: `verify`
refuses a composition whose parents are no longer what they were, because what was measured of them says nothing then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.provenance import sha256
from robopolicy.training.manifest import MANIFEST, Parent, read_manifest

CONTENT = (MANIFEST, "model.safetensors")  # what decides which policy a checkpoint is


def record_parent(parent: Path, checkpoint: Path) -> Parent:
    """The record of `parent` for the manifest of `checkpoint`, which need not exist yet.

    Raises:
        UserError: `parent` is no checkpoint.
    """
    policy = read_manifest(parent).policy
    path = Path(os.path.relpath(parent.resolve(), checkpoint.resolve())).as_posix()
    return Parent(path, policy, {name: sha256(parent / name) for name in CONTENT if (parent / name).is_file()})


def place_of(parent: Parent, checkpoint: Path) -> Path:
    """Where the `parent` of `checkpoint` lies, seen from here."""
    return Path(os.path.relpath(checkpoint.resolve() / parent.path))


def check_parents(parents: Sequence[Parent], checkpoint: Path) -> None:
    """Refuse parents of `checkpoint` that are not what was composed.

    Raises:
        UserError: One was moved, deleted or changed.
    """
    for parent in parents:
        place = place_of(parent, checkpoint)
        if not (place / MANIFEST).is_file():
            raise UserError(
                f"{place}, of which {checkpoint} was composed, is not there any more; put it back, or compose again "
                "where it is now."
            )
        for name, digest in parent.files.items():
            found = sha256(place / name) if (place / name).is_file() else "missing"
            if found != digest:
                raise UserError(
                    f"{place} has changed since {checkpoint} was composed of it: {name} was {digest[:12]} and is "
                    f"{found[:12]}; put the old one back, or compose again."
                )


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
