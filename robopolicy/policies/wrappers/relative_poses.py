"""End-effector poses of actions in the frame of the measured pose, as `relative` of UMI (Chi et al. 2024).

With the measured pose (p, R), a target (q, S) is the position R^T (q - p) and the rotation R^T S, whose first two
columns are six numbers without jumps (Zhou et al. 2019). The policy returns targets in the type of the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from robopolicy.constraints import NonNegativeInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.rotations import SIZES, deviation, from_matrix, to_matrix
from robopolicy.schema import CustomSerialization, to_dict, with_defaults

ROT6D = SIZES["rot6d"]
MAX_DEVIATION = 0.01  # of stored rotations from the unit length


@dataclass(frozen=True)
class PoseEntries(Validated):
    """Entries of a pose in the action, and of its measured pose in the observation."""

    position: tuple[NonNegativeInt, ...] = ()  # x, y, z in the action
    rotation: tuple[NonNegativeInt, ...] = ()  # in the action
    rotation_type: str = "axis_angle"  # in the action, see `nets.rotations`
    state_position: tuple[NonNegativeInt, ...] = ()  # x, y, z in the observation
    state_rotation: tuple[NonNegativeInt, ...] = ()  # in the observation
    state_rotation_type: str = "axis_angle"  # in the observation

    def encode(self, measured: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `(B, H, 3)` and rotations `(B, H, 6)` of actions `(B, H, A)` at observations `(B, D)`."""
        position, frame = self._measured(measured)
        rotation = frame.mT @ to_matrix(chunk[..., list(self.rotation)], self.rotation_type)
        return (chunk[..., list(self.position)] - position) @ frame[:, 0], from_matrix(rotation, "rot6d")

    def decode(self, measured: Tensor, positions: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse of `encode`; rotations `(B, H, n)` have the type of the action."""
        position, frame = self._measured(measured)
        near = from_matrix(frame, self.rotation_type)
        if self.state_rotation_type == self.rotation_type:
            near = measured[:, None, list(self.state_rotation)]
        found = from_matrix(frame @ to_matrix(rotations, "rot6d"), self.rotation_type, near)
        return position + positions @ frame[:, 0].mT, found

    def nearest(self, actions: Tensor, references: Tensor) -> Tensor:
        """Rotations `(..., n)` equal to the ones in `actions` `(..., A)` and nearest to `references` `(..., A)`."""
        entries = list(self.rotation)
        matrix = to_matrix(actions[..., entries], self.rotation_type)
        return from_matrix(matrix, self.rotation_type, references[..., entries])

    def check(self, state: Tensor, action: Tensor) -> None:
        """Raise a `UserError` unless the entries of observations `(F, D)` and actions `(F, A)` are rotations."""
        for key, values, entries, kind in (
            ("state", state, self.state_rotation, self.state_rotation_type),
            ("action", action, self.rotation, self.rotation_type),
        ):
            worst = deviation(values[:, list(entries)], kind)
            if not worst <= MAX_DEVIATION:
                numbers = ", ".join(map(str, entries))
                raise UserError(f"Entries {numbers} of '{key}' are no rotations of type {kind}; correct task.poses.")

    def _measured(self, measured: Tensor) -> tuple[Tensor, Tensor]:
        """Position `(B, 1, 3)` and rotation `(B, 1, 3, 3)`."""
        rotation = to_matrix(measured[:, list(self.state_rotation)], self.state_rotation_type)
        return measured[:, None, list(self.state_position)], rotation[:, None]


@dataclass(frozen=True)
class PoseConfig(CustomSerialization):
    """Pose among the entries of the action, by name or number; `state` has the same ones, or those named here."""

    position: tuple[str, ...] = ()  # x, y, z
    rotation: tuple[str, ...] = ()  # entries of the rotation
    rotation_type: str = "axis_angle"  # axis_angle | quaternion_xyzw | quaternion_wxyz | rot6d | rot6d_rows
    state_position: tuple[str, ...] = ()  # empty: as position
    state_rotation: tuple[str, ...] = ()  # empty: as rotation
    state_rotation_type: str = ""  # empty: as rotation_type

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Self:
        """Read a mapping of settings; entries may be numbers."""
        if not isinstance(value, Mapping):
            raise UserError(f"{where} must be a pose, {{position: [x, y, z], rotation: [...]}}, found {value!r}.")
        settings = {
            key: [*map(str, entry)] if isinstance(entry, list | tuple) else entry for key, entry in value.items()
        }
        return with_defaults(cls, settings, where)

    def to_dict(self) -> dict[str, Any]:
        """Inverse of `from_dict`."""
        return to_dict(self)

    def match(self, actions: Sequence[str], states: Sequence[str], sizes: tuple[int, int]) -> PoseEntries:
        """Find the entries of the pose.

        Args:
            actions: Names of the entries of the action; may be empty.
            states: Names of the entries of the observation; may be empty.
            sizes: Sizes of action and observation.

        Raises:
            UserError: An entry or a type does not exist, or a rotation has another number of entries.
        """
        kind, state_kind = self.rotation_type, self.state_rotation_type or self.rotation_type
        position = _entries(self.position, actions, sizes[0], 3, "position")
        rotation = _rotation(self.rotation, actions, sizes[0], kind, "rotation")
        state_position = _entries(self.state_position or self.position, states, sizes[1], 3, "state_position")
        state_rotation = _rotation(self.state_rotation or self.rotation, states, sizes[1], state_kind, "state_rotation")
        return PoseEntries(position, rotation, kind, state_position, state_rotation, state_kind)


def _rotation(entries: Sequence[str], names: Sequence[str], size: int, kind: str, where: str) -> tuple[int, ...]:
    if kind not in SIZES:
        raise unknown_name("type of rotations", kind, SIZES, "in task.poses")
    return _entries(entries, names, size, SIZES[kind], where)


def _entries(entries: Sequence[str], names: Sequence[str], size: int, count: int, where: str) -> tuple[int, ...]:
    """Indices of entries given by name or number."""
    if len(entries) != count or len(set(entries)) != count:
        raise UserError(f"'{where}' of task.poses needs {count} entries, found {', '.join(entries) or 'none'}.")
    for entry in entries:
        if entry not in names and not (entry.isdecimal() and int(entry) < size):
            raise unknown_name("entry", entry, [*names, *map(str, range(size))], f"in '{where}' of task.poses")
    return tuple(names.index(entry) if entry in names else int(entry) for entry in entries)
