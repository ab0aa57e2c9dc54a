"""Choices `group=NAME` of a run, checked before expensive imports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.registry import POLICIES
from robopolicy.resources import preset_files
from robopolicy.sim.registry import get_task, task_names

GROUPS = ("experiment", "task", "policy", "algorithm", "sim")
REGISTRIES = {"policy": POLICIES, "algorithm": ALGORITHMS}


def read_settings(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Split `group=preset` and `key.path=value` into pairs; malformed, ignored or unknown ones raise a UserError."""
    pairs = [_split(text) for text in overrides]
    _reject_policy_of_checkpoint(dict(pairs))
    return [_choose(key, value) if key in GROUPS else (key, value) for key, value in pairs]


def check_sweep(overrides: Sequence[str]) -> None:
    """Check the names of presets in `group=a,b`, if they are plain; unknown ones raise a UserError."""
    for group, _, values in (text.partition("=") for text in overrides):
        if group in GROUPS and re.fullmatch(r"[\w./,-]+", values):
            for value in values.split(","):
                _choose(group, value)


def options(group: str) -> list[str]:
    """Return the names of the presets of a group, and of registered policies or algorithms; tasks are not included."""
    return sorted({*preset_files(group), *REGISTRIES.get(group, ())})


def multiple_values_error(setting: str) -> UserError:
    """Build the error for a setting with several values outside a sweep."""
    return UserError(
        f"'{setting}' has several values; run 'robopolicy train --multirun' to train each of them, or write a list as "
        "key=[1,2]."
    )


def _split(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"([A-Za-z_][\w.]*)=(.*)", text, re.DOTALL)
    if match is None:
        raise UserError(f"Expected group=preset or key=value, e.g. seed=1 or algorithm.lr=3e-4, found '{text}'.")
    if match[1] in ("policy.name", "algorithm.name"):
        kind = match[1].split(".")[0]
        raise UserError(f"{match[1]} follows from the chosen {kind}; set {kind}={match[2]}.")
    return match[1], match[2]


def _reject_policy_of_checkpoint(settings: Mapping[str, str]) -> None:
    """Raise a UserError for settings that `init_from` would silently override."""
    ignored = [key for key in settings if key.split(".")[0] in ("policy", "chunk")]
    if settings.get("init_from") and ignored:
        raise UserError(f"Policy and chunk shape come from the checkpoint in init_from; drop {ignored[0]}=...")


def _choose(group: str, value: str) -> tuple[str, str]:
    """Check the choice of a preset; `task` also accepts every registered task."""
    if "," in value:
        raise multiple_values_error(f"{group}={value}")
    known = options(group)
    if value in known:
        return group, value
    if group != "task":
        raise unknown_name(f"{group} preset", value, known)
    try:
        return "task.name", get_task(value).name
    except UserError as error:
        raise unknown_name("task", value, {*known, *task_names()}) from error
