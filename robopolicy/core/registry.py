"""Parts by name: plain values (YAML, JSON) become the registered objects of the core.

Each slot has a registry, whose kind is "parts." and the name of the slot (`robopolicy.plugins`). A part is written as
its name or as a mapping with `name` and its options; options named after a slot (`partition`, `bounds`, `tracker`, ...)
hold parts themselves:

    {name: baseline, kind: median, scope: {partition: group}}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args, get_type_hints

from robopolicy.core.advantage import STAGES, Pipeline, Scope
from robopolicy.core.advantage_sources import ADVANTAGE_SOURCES, Critic
from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import PARTITIONS
from robopolicy.core.estimator import EstimatorConfig
from robopolicy.core.group_statistics import GROUP_STATISTICS, STRUCTURE
from robopolicy.core.objectives import OBJECTIVES
from robopolicy.core.options import is_plain, validate_option
from robopolicy.core.ratios import BOUNDS, Hierarchy
from robopolicy.core.regularizers import CONTROLLERS, REGULARIZERS
from robopolicy.core.selection import SELECTORS, WEIGHTS
from robopolicy.core.surrogates import SURROGATES
from robopolicy.core.trackers import TRACKERS
from robopolicy.plugins import Registry

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "aggregate": AGGREGATES,
    "bonus": Registry("parts.bonus", {}),
    "bounds": BOUNDS,
    "controller": CONTROLLERS,
    "factor": Registry("parts.factor", {}),
    "mask": Registry("parts.mask", {}),
    "objective": OBJECTIVES,
    "partition": PARTITIONS,
    "regularizer": REGULARIZERS,
    "selector": SELECTORS,
    "stage": Registry("parts.stage", STAGES | GROUP_STATISTICS | STRUCTURE),
    "advantage_source": ADVANTAGE_SOURCES,
    "surrogate": SURROGATES,
    "tracker": TRACKERS,
    "weight": WEIGHTS,
}
"""Slot -> its parts: a class is instantiated with the options; a function takes them as keyword-only arguments."""

UNNAMED: dict[str, Callable[..., Any]] = {
    "scope": Scope,
    "hierarchy": Hierarchy,
    "estimator": EstimatorConfig,
    "critic": Critic,
}
"""Component types with a single part, written as its options."""

NESTED = {
    "scope": "scope",
    "hierarchy": "hierarchy",
    "partition": "partition",
    "reduce_over": "partition",
    "factor": "factor",
    "bonus": "bonus",
    "tracker": "tracker",
    "bounds": "bounds",
    "advantage_source": "advantage_source",
    "stages": "pipeline",
}
"""Option -> component type of its part."""

NESTED_LISTS = {"branches": "pipeline", "masks": "mask", "weights": "weight"}
"""Option -> component type of the parts in its list."""


def build(slot: str, plain: Any) -> Any:
    """The part that `plain` describes.

    Args:
        slot: A key of `REGISTRIES` or `UNNAMED`, or "pipeline" for a list of stages.
        plain: A name, or a mapping of options with `name` among them.

    Raises:
        ValueError: A name or option is unknown, a needed option is missing, or a value does not fit; one line.
    """
    if slot == "pipeline":
        return Pipeline([build("stage", stage) for stage in _list("pipeline", plain)])
    if slot in UNNAMED:
        return _call(slot, UNNAMED[slot], _mapping(slot, plain))
    if slot not in REGISTRIES:
        raise ValueError(f"Unknown slot '{slot}'; known: {', '.join(sorted([*REGISTRIES, *UNNAMED, 'pipeline']))}.")
    if not isinstance(plain, str | Mapping):
        raise ValueError(f"Expected a name or a mapping of options for {slot}, found {plain!r}.")
    options = {"name": plain} if isinstance(plain, str) else dict(_mapping(slot, plain))
    name = str(options.pop("name", ""))
    if name not in REGISTRIES[slot]:
        raise ValueError(f"Unknown {slot} '{name}'; known: {', '.join(sorted(REGISTRIES[slot])) or 'none'}.")
    part = REGISTRIES[slot][name]
    return _call(f"{slot} '{name}'", part, options)


def _call(where: str, part: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """`part` with its options: an instance of a class, or a function with some arguments fixed."""
    known = _options_of(part)
    for option in options:
        if option not in known:
            raise ValueError(f"Unknown option '{option}' of {where}; known: {', '.join(known) or 'none'}.")
    for option, (_, needed) in known.items():
        if needed and option not in options:
            raise ValueError(f"Option '{option}' of {where} is missing.")
    values = {option: _value(where, option, known[option][0], value) for option, value in options.items()}
    if isinstance(part, type):
        return part(**values)
    return partial(part, **values) if values else part


def _options_of(part: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Options of a part by name: their type, and whether they have to be given.

    What a part remembers, and may be built with, is none.
    """
    found: dict[str, tuple[Any, bool]] = {}
    hints = get_type_hints(part.__init__ if isinstance(part, type) else part, include_extras=True)
    for parameter in inspect.signature(part).parameters.values():
        kind = hints.get(parameter.name)
        told = isinstance(part, type) or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if told and (is_plain(kind) or parameter.name in (*NESTED, *NESTED_LISTS)):
            found[parameter.name] = kind, parameter.default is inspect.Parameter.empty
    return found


def _value(where: str, option: str, kind: Any, plain: Any) -> Any:
    """An option: a plain value that fits, or the part that it describes."""
    if is_plain(kind):
        return validate_option(f"Option '{option}' of {where}", kind, plain)
    if plain is None and type(None) in get_args(kind):
        return None
    if option in NESTED_LISTS:
        return tuple(build(NESTED_LISTS[option], item) for item in _list(option, plain))
    part = build(NESTED[option], plain)
    if isinstance(kind, type) and not getattr(kind, "_is_protocol", False) and not isinstance(part, kind):
        raise ValueError(f"Option '{option}' of {where} must be {kind.__name__}, got {plain!r}.")
    return part


def _mapping(where: str, plain: Any) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise ValueError(f"Expected a mapping of options for {where}, found {plain!r}.")
    return cast(Mapping[str, Any], plain)


def _list(where: str, plain: Any) -> Sequence[Any]:
    if not isinstance(plain, list | tuple):
        raise ValueError(f"Expected a list for {where}, found {plain!r}.")
    return cast(Sequence[Any], plain)
