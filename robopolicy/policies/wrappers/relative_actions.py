"""Policies whose network predicts differences of actions, while the policy takes and returns the actions of the task.

Joint or end-effector targets follow the measured positions closely, so differences have a smaller range and do not
depend on the place in the workspace. `relative` subtracts the newest measured position from all actions of a chunk
(as UMI, Chi et al. 2024); `delta` subtracts the measured position from the first action, and from each later action
the one before. Both are inverted when the policy acts, so that evaluation, export and deployment need no further code.
Poses with a rotation are relative to the measured pose, see `relative_poses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import NonNegativeInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.base import DecisionOutput, Info, Observation, PolicySpec, Record, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.nested import WrappingPolicy, rebuild
from robopolicy.policies.wrappers.relative_poses import ROT6D, PoseConfig, PoseEntries

REPRESENTATIONS = ("absolute", "delta", "relative")


@dataclass(frozen=True)
class ActionRepresentation(Validated):
    """Entries of an action that are differences, and the measured positions from which they differ."""

    kind: str = "relative"  # delta | relative
    key: str = "state"  # observation with the positions
    actions: tuple[NonNegativeInt, ...] = ()  # entries of the action
    positions: tuple[NonNegativeInt, ...] = ()  # entries of the observation, one per entry of the action
    poses: tuple[PoseEntries, ...] = ()  # relative end-effector poses

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in REPRESENTATIONS[1:]:
            raise unknown_name("representation of actions", self.kind, REPRESENTATIONS)
        if len(self.actions) != len(self.positions):
            raise UserError(f"{self.kind} actions need as many entries of the observation as of the action.")
        if self.poses and self.kind != "relative":
            raise UserError("Poses are relative to the measured pose; set task.action_representation=relative.")

    @property
    def rotations(self) -> tuple[int, ...]:
        """Entries of the action that are rotations, which differences replace by `ROT6D` entries per pose."""
        return tuple(entry for pose in self.poses for entry in pose.rotation)

    def encoded_dim(self, action_dim: int) -> int:
        """Number of entries of the differences of actions with `action_dim` entries."""
        return action_dim - len(self.rotations) + ROT6D * len(self.poses)

    def entry_names(self, action_dim: int) -> tuple[str, ...]:
        """Names of the entries of actions without names, so that no robot takes a pose for joints; () without poses."""
        if not self.poses:
            return ()
        names = {entry: f"entry {entry}" for entry in range(action_dim)}
        for pose in self.poses:
            names |= {entry: f"{axis} [m]" for axis, entry in zip("xyz", pose.position, strict=True)}
            names |= {entry: f"{pose.rotation_type} {index}" for index, entry in enumerate(pose.rotation)}
        return tuple(names.values())

    def encode(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Differences `(B, H, D)` of actions `(B, H, A)` at observations `{key: (B, To, ...)}`.

        They are the entries of the action without its rotations, and then the rotations of all poses.
        """
        columns = dict(enumerate(chunk.unbind(-1)))
        if self.actions:
            targets, start = chunk[..., list(self.actions)], self._start(obs)
            before = start.expand_as(targets) if self.kind == "relative" else torch.cat([start, targets[:, :-1]], 1)
            columns |= _columns(self.actions, targets - before)
        turned: list[Tensor] = []
        for pose in self.poses:
            positions, rotations = pose.encode(obs[self.key][:, -1], chunk)
            columns |= _columns(pose.position, positions)
            turned += rotations.unbind(-1)
        kept = [column for entry, column in columns.items() if entry not in self.rotations]
        return torch.stack([*kept, *turned], -1)

    def decode(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Inverse of `encode`."""
        given, poses = list(chunk.unbind(-1)), len(self.poses)
        size = len(given) - ROT6D * poses + len(self.rotations)
        columns = dict(zip([entry for entry in range(size) if entry not in self.rotations], given, strict=False))
        if self.actions:
            found = torch.stack([columns[entry] for entry in self.actions], -1)
            found = self._start(obs) + (found if self.kind == "relative" else found.cumsum(1))
            columns |= _columns(self.actions, found)
        for index, pose in enumerate(self.poses, -poses):
            positions = torch.stack([columns[entry] for entry in pose.position], -1)
            turned = chunk[..., chunk.shape[-1] + ROT6D * index :][..., :ROT6D]
            positions, rotations = pose.decode(obs[self.key][:, -1], positions, turned)
            columns |= _columns(pose.position, positions) | _columns(pose.rotation, rotations)
        return torch.stack([columns[entry] for entry in range(size)], -1)

    def nearest(self, actions: Tensor, references: Tensor) -> Tensor:
        """Actions `(..., A)` with equal rotations nearest to `references` `(..., A)`, to compare both by entry."""
        columns = dict(enumerate(actions.unbind(-1)))
        for pose in self.poses:
            columns |= _columns(pose.rotation, pose.nearest(actions, references))
        return torch.stack([columns[entry] for entry in range(len(columns))], -1)

    def _start(self, obs: Observation) -> Tensor:
        return obs[self.key][:, -1:, list(self.positions)]  # (B, 1, n)


def _columns(entries: Sequence[int], values: Tensor) -> dict[int, Tensor]:
    """`values` `(B, H, n)` by entry."""
    return dict(zip(entries, values.unbind(-1), strict=True))


def match_entries(
    kind: str,
    key: str,
    actions: Sequence[str],
    positions: Sequence[str],
    sizes: tuple[int, int],
    keep: Sequence[str],
    poses: Sequence[PoseConfig] = (),
) -> ActionRepresentation:
    """Pair the entries of actions and positions by name, or by index without names.

    Args:
        kind: `delta` or `relative`.
        key: Observation with the positions.
        actions: Names of the entries of the action; may be empty.
        positions: Names of the entries of the observation; may be empty.
        sizes: Sizes of action and observation.
        keep: Names or indices of entries of the action that stay absolute, such as a gripper.
        poses: End-effector poses among the entries.

    Raises:
        UserError: No entry has a position, or an entry of `keep` or of a pose does not exist, or is in two poses.
    """
    known = [*actions, *map(str, range(sizes[0]))]
    for entry in keep:
        if entry not in known:
            raise unknown_name("entry", entry, known, "in task.absolute_entries")
    if actions and positions:
        pairs = [(i, list(positions).index(name)) for i, name in enumerate(actions) if name in positions]
    else:
        pairs = [(i, i) for i in range(min(sizes))]
    kept = {*keep}
    found = tuple(pose.match(actions, positions, sizes) for pose in poses)
    posed = [entry for pose in found for entry in (*pose.position, *pose.rotation)]
    if twice := next((entry for entry in posed if posed.count(entry) > 1), None):
        raise UserError(f"Entry {twice} of the action is in task.poses twice.")
    pairs = [(i, j) for i, j in pairs if i not in posed and not {str(i), *(actions[i : i + 1])} & kept]
    if not pairs and not found:
        raise UserError(f"No entry of the action has the name of an entry of '{key}', so {kind} actions do not exist.")
    return ActionRepresentation(kind, key, tuple(i for i, _ in pairs), tuple(j for _, j in pairs), found)


@dataclass(frozen=True)
class RelativeActionConfig:
    """Settings of a `RelativeActionPolicy`, which `task.action_representation` creates."""

    base: dict[str, Any] = field(default_factory=dict)  # description of the inner policy, see `nested`
    representation: ActionRepresentation = field(default_factory=ActionRepresentation)


class RelativeActionPolicy(WrappingPolicy):
    """Policy whose inner policy predicts differences of actions."""

    name: ClassVar[str] = "relative_actions"
    config_class: ClassVar[type[Any]] = RelativeActionConfig

    def __init__(self, config: RelativeActionConfig, spec: PolicySpec) -> None:
        """Build the inner policy; raise a UserError if the observation lacks the positions."""
        super().__init__()
        found, size = config.representation, spec.observation.get(config.representation.key, (0,))
        measured = [
            *found.positions,
            *(i for pose in found.poses for i in (*pose.state_position, *pose.state_rotation)),
        ]
        changed = [*found.actions, *(i for pose in found.poses for i in (*pose.position, *pose.rotation))]
        fits = len(size) == 1 and max(measured, default=0) < size[0]
        if not fits or max(changed, default=0) >= spec.action_dim:
            raise UserError(f"{found.kind} actions need '{found.key}' among the observations of the policy.")
        self.config, self.spec, self.representation = config, spec, found
        self.base = rebuild(config.base)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Actions of the task."""
        chunk = self.base.act(obs, deterministic=deterministic, generator=generator)
        return self.representation.decode(obs, chunk)

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Loss of the inner policy towards the differences."""
        differences = self.representation.encode(obs, chunk)
        return self.base.imitation_loss(obs, differences, weight, mask=mask, generator=generator)

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample of the inner policy with the actions of the task."""
        found = self.base.sample(obs, generator=generator)
        return replace(found, chunk=self.representation.decode(obs, found.chunk))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Score the decisions of the inner policy."""
        return self.base.decisions(obs, record)

    def next_hidden(self, obs: Observation) -> Tensor:
        """Memory of the inner policy."""
        return self.base.next_hidden(obs)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the inner policy; `action` has the statistics of the differences."""
        self.base.fit_normalizer(statistics)

    @property
    def nfe(self) -> int:
        """Network evaluations of the inner policy."""
        return self.base.nfe
