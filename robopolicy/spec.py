"""Specification of the inputs and outputs of a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from robopolicy.errors import UserError

IMAGE_PREFIX = "image."  # of image observations (3, h, w), uint8
STEP_KEYS = (
    "action",
    "executed",
    "policy_action",
    "intervention",
    "reward",
    "terminated",
    "bootstrap",
    "success",
    "closing",
)  # no observations
HIDDEN_STATE = "memory"  # key of the hidden state of a recurrent policy after the previous decision; initially zero
MAX_CHUNK, MAX_INPUT = 2**17, 2**26  # numbers; a damaged manifest must not exhaust the memory
MAX_HORIZON = 4096  # actions of a chunk, or observations of an input; attention grows with its square


@dataclass(frozen=True)
class PolicySpec:
    """Shapes of observations and actions of a policy; stored in every checkpoint."""

    observation: Mapping[str, tuple[int, ...]]  # per-step shapes: {"state": (Do,), "image.front": (3, 64, 64)}
    action_dim: int  # A
    horizon: int = 1  # H, actions per chunk
    action_horizon: int = 1  # Ta <= H, actions executed per chunk
    obs_horizon: int = 1  # To, observations per input

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("action_dim", "horizon", "action_horizon", "obs_horizon")}
        for name, size in sizes.items():
            if type(size) is not int:
                raise TypeError(f"{name} must be an integer, got {size!r}.")
        if max(self.horizon, self.obs_horizon) > MAX_HORIZON:
            raise ValueError(f"horizons may be at most {MAX_HORIZON}, got {self.horizon} and {self.obs_horizon}.")
        if not 1 <= self.action_horizon <= self.horizon:
            raise ValueError(f"action_horizon must lie in [1, horizon={self.horizon}], got {self.action_horizon}.")
        if self.obs_horizon < 1 or self.action_dim < 1:
            raise ValueError("obs_horizon and action_dim must be at least 1.")
        if self.horizon * self.action_dim > MAX_CHUNK:
            raise ValueError(f"a chunk may have {MAX_CHUNK} numbers, got {self.horizon} x {self.action_dim}.")
        for key, shape in self.observation.items():
            if self.obs_horizon * math.prod(shape) > MAX_INPUT:
                raise ValueError(f"observation '{key}' may have {MAX_INPUT} numbers, got {list(shape)}.")
        hidden = tuple(self.observation.get(HIDDEN_STATE, (1,)))
        if len(hidden) != 1 or hidden[0] < 1:
            raise ValueError(f"observation '{HIDDEN_STATE}' must have one positive size, got {list(hidden)}.")

    @property
    def hidden_dim(self) -> int:
        """Size of the hidden state of a recurrent policy; 0 for other policies."""
        return self.observation[HIDDEN_STATE][0] if HIDDEN_STATE in self.observation else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form for the checkpoint manifest."""
        fields: dict[str, Any] = asdict(self)
        fields["observation"] = {key: list(shape) for key, shape in self.observation.items()}
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicySpec:
        """Inverse of `to_dict`.

        Raises:
            ValueError: The observations are not a mapping to shapes.
            TypeError: Something else is missing, unknown or of another type.
        """
        shapes = data.get("observation")
        if not isinstance(shapes, Mapping) or not all(map(_is_shape, shapes.values())):
            raise ValueError(f"observation must map names to shapes, found {str(shapes)[:80]}.")
        fields = {"action_horizon" if key == "execute" else key: value for key, value in data.items()}
        return cls(**{**fields, "observation": {str(key): tuple(shape) for key, shape in shapes.items()}})

    @classmethod
    def read(cls, data: Mapping[str, Any], source: str) -> PolicySpec:
        """Build the specification that a file or server, `source`, gives; invalid `data` raises a UserError."""
        try:
            return cls.from_dict(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source} does not describe a policy: {str(error).rstrip('.')}.") from error


@dataclass(frozen=True)
class TaskMetadata:
    """Names, units and bounds of observations and actions of a task; what is unknown is empty or None."""

    task: str
    control_dt: float | None = None  # [s]
    action_names: tuple[str, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    observation_names: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    instructions: tuple[str, ...] = ()  # texts of the demonstrations, e.g. "pick the block"


_AGREED = {
    "task": "tasks",
    "action_names": "names of actions",
    "action_low": "bounds of actions",
    "action_high": "bounds of actions",
}
RATE_TOLERANCE = 0.05  # whole-number frame rates round the control step a little


def common_metadata(found: Mapping[str, TaskMetadata]) -> TaskMetadata:
    """Metadata of policies `{name: metadata}` that act together: what they agree on, and the instructions of all.

    Raises:
        UserError: Rates or names differ.
    """
    (first, one), *others = found.items()
    common = asdict(one)
    for name, other in others:
        ours, theirs = common["control_dt"] or other.control_dt, other.control_dt
        if ours and theirs and not math.isclose(ours, theirs, rel_tol=RATE_TOLERANCE):
            raise UserError(f"{first} acts every {ours:g} s and {name} every {theirs:g} s; pass policies of one rate.")
        common["control_dt"] = ours
        for field_name, label in _AGREED.items():
            ours, theirs = common[field_name], getattr(other, field_name)
            if ours and theirs and ours != theirs:
                raise UserError(f"{first} and {name} have different {label}; pass policies of one robot.")
            common[field_name] = ours or theirs
        names, known = other.observation_names, common["observation_names"]
        if changed := [key for key, value in names.items() if known.get(key, value) != value]:
            raise UserError(f"{first} and {name} have other names of '{changed[0]}'; pass policies of one robot.")
        common["observation_names"] = names | known
        common["instructions"] = tuple(dict.fromkeys([*common["instructions"], *other.instructions]))
    return TaskMetadata(**common)


def check_dtype(key: str, dtype: Any) -> None:
    """Raise a UserError unless a numpy `dtype` suits the observation `key`: uint8 for images, else numbers."""
    image = key.startswith(IMAGE_PREFIX)
    if not (dtype == "uint8" if image else dtype.kind in "fiub"):
        raise UserError(f"Observation '{key}' must be {'uint8' if image else 'numbers'}, found {dtype}.")


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and len(value) <= 8 and all(type(size) is int and size >= 0 for size in value)
    )
