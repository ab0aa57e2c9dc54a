"""Comparison of a dataset with its task or policy, and the specification of a task that exists only as a dataset."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.data.quality import outlying_entries
from robopolicy.errors import UserError
from robopolicy.sim.contract import SimSpec, TensorSpec
from robopolicy.sim.registry import NO_TASK, task_names
from robopolicy.spec import HIDDEN_STATE, RATE_TOLERANCE, PolicySpec, TaskMetadata

OUT_OF_BOUNDS_WARN = 0.05  # fraction of actions outside the bounds above which a dataset causes a warning
ADVICE = f"choose the task it was recorded on, or task={NO_TASK}"


def recorded_spec(episodes: Episodes) -> SimSpec:
    """Specification of the task `none`, which exists only as `episodes`; the action bounds are their range."""
    observation = {
        key: TensorSpec(
            tuple(array.shape[1:]), torch.uint8 if is_image(key) else torch.float32, episodes.names.get(key, ())
        )
        for key in episodes.observation_keys
        for array in [episodes.arrays[key]]
    }
    action = episodes.arrays["action"].astype(np.float32)
    return SimSpec(
        NO_TASK,
        observation,
        torch.from_numpy(action.min(0)),
        torch.from_numpy(action.max(0)),
        episodes.control_dt,
        int(episodes.lengths.max()),
        action_names=episodes.names.get("action", ()),
    )


def recorded_metadata(episodes: Episodes) -> TaskMetadata:
    """Names, rate and instructions of `episodes`, for a checkpoint of the task `none`."""
    keys = [key for key in episodes.observation_keys if key in episodes.names]
    return TaskMetadata(
        NO_TASK,
        episodes.control_dt,
        action_names=episodes.names.get("action", ()),
        observation_names={key: list(episodes.names[key]) for key in keys},
        instructions=tuple(dict.fromkeys(filter(None, episodes.tasks))),
    )


def check_dataset(episodes: Episodes, sim: SimSpec, path: str) -> None:
    """Compare the dataset at `path` with its task: keys, sizes, cameras, names of entries and rate.

    Warns if the data are of another registered task, or if many actions exceed the bounds; a mixture may be intended.

    Raises:
        UserError: They differ.
    """
    if episodes.action_type and sim.action_type and episodes.action_type != sim.action_type:
        meaning = {"absolute": "targets of its controller", "delta": "changes of the pose"}
        raise UserError(
            f"The actions of dataset {path} are {episodes.action_type}, {meaning[episodes.action_type]}, but "
            f"{sim.task} takes {sim.action_type} ones; map 'action' to an array of these, or {ADVICE}."
        )
    shapes = {key: tuple(spec.shape) for key, spec in sim.observation.items()} | {"action": (sim.action_dim,)}
    for key, shape in shapes.items():
        if key not in episodes.arrays:
            raise UserError(f"Dataset {path} lacks '{key}', which {sim.task} requires; {_advice(key)}.")
        found = tuple(episodes.arrays[key].shape[1:])
        if found != shape:
            hint = ADVICE
            if is_image(key) and len(found) == 3:
                hint = f"set task.image_size={found[-1]}"
            elif is_cloud(key):
                hint = f"set task.points={found[0]}"
            raise UserError(f"'{key}' of dataset {path} has shape {found}, but {sim.task} has {shape}; {hint}.")
    names = {key: spec.names for key, spec in sim.observation.items()} | {"action": sim.action_names}
    _check_names(episodes, names, path, sim.task, f"{ADVICE}, or")
    _check_rate(episodes, sim.control_dt, path, sim.task, ADVICE)
    warn_of_other_task(episodes, sim.task, path)
    _warn_of_bounds(episodes, sim, path)


def check_dataset_for_policy(episodes: Episodes, policy: PolicySpec, what: str) -> None:
    """Raise a UserError if `episodes`, named `what` in the message, lack a key of the policy or differ in shape."""
    expected = {**policy.observation, "action": (policy.action_dim,)}
    for key, shape in expected.items():
        found = tuple(episodes.arrays[key].shape[1:]) if key in episodes.arrays else None
        if key != HIDDEN_STATE and found != tuple(shape):
            raise UserError(
                f"The policy requires '{key}' of shape {tuple(shape)}, but {what} has "
                f"{found or 'no such key'}; pass a dataset of the task of the policy."
            )


def check_dataset_for_metadata(episodes: Episodes, metadata: TaskMetadata, path: str) -> None:
    """Raise a UserError if the names or the rate of the dataset at `path` differ from those a policy was trained on.

    Unknown names and an unknown rate agree with all; `check_dataset_for_policy` compares shapes.
    """
    names = {key: tuple(known) for key, known in metadata.observation_names.items()} | {"action": metadata.action_names}
    _check_names(episodes, names, path, "the policy", "pass a dataset of the task of the policy, or")
    if metadata.control_dt is not None:
        _check_rate(episodes, metadata.control_dt, path, "the policy", "pass a dataset of the same rate")


def _check_names(episodes: Episodes, names: Mapping[str, Sequence[str]], path: str, other: str, advice: str) -> None:
    """Compare the names of the entries with `names` of `other`, by key; other sizes are the caller's to refuse."""
    for key, expected in names.items():
        named = episodes.names.get(key, ())
        if len(named) == len(expected) and tuple(named) != tuple(expected):
            first = next(pair for pair in zip(named, expected, strict=True) if pair[0] != pair[1])
            raise UserError(
                f"'{key}' of dataset {path} has '{first[0]}' where {other} has '{first[1]}'; {advice} correct its "
                "names with 'robopolicy data edit --names'."
            )


def _check_rate(episodes: Episodes, control_dt: float, path: str, other: str, advice: str) -> None:
    if not math.isclose(episodes.control_dt, control_dt, rel_tol=RATE_TOLERANCE):
        raise UserError(
            f"Dataset {path} was recorded every {episodes.control_dt:g} s, but {other} acts every {control_dt:g} s; "
            f"{advice}."
        )


def warn_of_other_task(episodes: Episodes, task: str, path: str) -> None:
    """Warn if all episodes of the dataset at `path` are of other registered tasks."""
    known = set(task_names())
    others = sorted({name for name in episodes.tasks if name in known and name != task})
    if others and task not in episodes.tasks:
        warnings.warn(f"Dataset {path} was recorded on {others[0]}, and this run uses {task}.", stacklevel=3)


def warn_of_outliers(episodes: Episodes, path: str) -> None:
    """Warn if a few values set the range of an entry, so that normalisation leaves hardly any of it to the others."""
    if found := outlying_entries(episodes):
        warnings.warn(
            f"Outliers set the scale of normalisation of dataset {path}: {'; '.join(found[:3])}; correct the data, or "
            "leave these episodes out with 'robopolicy data filter --exclude'.",
            stacklevel=3,
        )


def _warn_of_bounds(episodes: Episodes, sim: SimSpec, path: str) -> None:
    action = episodes.arrays["action"]
    low, high = sim.action_low.cpu().numpy(), sim.action_high.cpu().numpy()
    margin = 0.01 * (high - low)
    beyond = ((action < low - margin) | (action > high + margin)).any(-1).mean()
    if beyond > OUT_OF_BOUNDS_WARN:
        warnings.warn(
            f"{beyond:.0%} of the actions of dataset {path} exceed the bounds of {sim.task}; check its task.",
            stacklevel=3,
        )


def _advice(key: str) -> str:
    return f"drop that camera, or {ADVICE}" if is_image(key) or is_cloud(key) else ADVICE
