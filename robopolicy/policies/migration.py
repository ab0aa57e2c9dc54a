"""Migration of settings and weights of policies from older versions.

Readers of checkpoints and runs pass their content through `migrate` and `migrate_state`, which do not change current
content. If a setting or a module is renamed, add a row to `_SETTINGS` or `_RENAMED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_ENTITIES = {"width": 64, "heads": 4, "layers": 1, "features": 64}  # defaults of the encoder


def migrate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate plain settings that contain settings of policies at any depth (policies, critics, runs)."""
    found = {str(key): _nested(value) for key, value in settings.items()}
    for rule in _SETTINGS:
        found = rule(found)
    return found


def migrate_state(state: Any) -> Any:
    """Migrate a state dict, or nested mappings and sequences of state dicts, to the current names of modules."""
    if isinstance(state, Mapping):
        names = _PREFIX if _PREFIX.keys() <= state.keys() else {}
        return {names.get(key) or _renamed(key): migrate_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(migrate_state(item) for item in state)
    return state


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return migrate(value)
    return type(value)(map(_nested, value)) if isinstance(value, list | tuple) else value


def _renamed(name: Any) -> Any:
    if isinstance(name, str):
        for old, new in _RENAMED:
            name = old.sub(new, name)
    return name


def _entities(settings: dict[str, Any]) -> dict[str, Any]:
    """`entities: {...}` -> `encoders: {entities: {...}}`, omitted if it has defaults."""
    if not isinstance(settings.get("entities"), dict) or settings["entities"].keys() != _ENTITIES.keys():
        return settings
    options = settings.pop("entities")
    return {**settings, "encoders": {} if options == _ENTITIES else {"entities": options}}


def _modular(settings: dict[str, Any]) -> dict[str, Any]:
    """`modular_count`, `modular_context` -> `backbone_options` of the backbone `modular`."""
    if not {"modular_count", "modular_context"} <= settings.keys():
        return settings
    options = {"modules": settings.pop("modular_count"), "context_width": settings.pop("modular_context")}
    return {**settings, "backbone_options": options if settings.get("backbone") == "modular" else {}}


def _noise_mask(settings: dict[str, Any]) -> dict[str, Any]:
    """`noise_mask: CELLS` -> `augmentation: {name: noise_mask, cells: CELLS}`."""
    if not isinstance(settings.get("noise_mask"), int):
        return settings
    cells = settings.pop("noise_mask")
    return {**settings, "augmentation": {"name": "noise_mask", "cells": cells} if cells else {}}


_KEYS = {  # old key: (current key, a key that must exist next to the old one)
    "time_law": ("time_distribution", "action_clip"),
    "instant_share": ("flow_ratio", "adaptive_power"),
    "finest": ("max_steps", "consistency_share"),
    "vectors": ("privileged_obs", "orthogonal_init"),
}


def _renamed_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """Rename keys in settings of heads and value networks."""
    found = {
        old: new
        for old, (new, neighbor) in _KEYS.items()
        if old in settings and neighbor in settings and new not in settings
    }
    return {found.get(key, key): value for key, value in settings.items()} if found else settings


_SETTINGS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (_entities, _modular, _noise_mask, _renamed_keys)

_RENAMED = (
    (re.compile(r"(^|\.)(encoder|statistics)\.start$"), r"\1\2.stock.start"),
    (re.compile(r"\.noise_mask\."), ".augmentation."),
    (re.compile(r"^cut$"), "truncated"),
    (re.compile(r"^said$"), "responses"),
    (re.compile(r"^helped$"), "assisted"),
    (re.compile(r"^fault$"), "reward_failed"),
    (re.compile(r"^topology$"), "strategy"),
    (re.compile(r"^asides$"), "annotators"),
    (re.compile(r"^attempts$"), "trajectories"),
)
"""Old part of the name of a tensor -> current name."""

_PREFIX = {"paid": "turn_rewards", "begun": "prefill", "earlier": "prior_tokens", "starts": "turn_starts"}
"""Old keys of the prefix of a conversation -> current keys, if all of them exist."""
