"""Components by name: build registered objects of the core from plain values (YAML, JSON).

Each component type has a registry of kind "parts.TYPE" (`robopolicy.plugins`). A component is written as its name, or
as a mapping of `name` and options. Options named after a type (`partition`, `bounds`, `tracker`, ...) are components:

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
"""Component type -> its components: a class takes options in its constructor, a function as keyword-only arguments."""

UNNAMED: dict[str, Callable[..., Any]] = {
    "scope": Scope,
    "hierarchy": Hierarchy,
    "estimator": EstimatorConfig,
    "critic": Critic,
}
"""Component types with a single component, written as a mapping of its options."""

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
"""Option -> component type of its value."""

NESTED_LISTS = {"branches": "pipeline", "masks": "mask", "weights": "weight"}
"""Option -> component type of the entries of its list."""


def build(kind: str, plain: Any) -> Any:
    """Build a component of a type in `REGISTRIES` or `UNNAMED`, or a "pipeline" from a list of stages.

    `plain` is a name, or a mapping of `name` and options.

    Raises:
        ValueError: A name or option is unknown, a required option is missing, or a value is invalid.
    """
    if kind == "pipeline":
        return Pipeline([build("stage", stage) for stage in _list("pipeline", plain)])
    if kind in UNNAMED:
        return _call(kind, UNNAMED[kind], _mapping(kind, plain))
    if kind not in REGISTRIES:
        known = ", ".join(sorted([*REGISTRIES, *UNNAMED, "pipeline"]))
        raise ValueError(f"Unknown component type '{kind}'; known: {known}.")
    if not isinstance(plain, str | Mapping):
        raise ValueError(f"Expected a name or a mapping of options for {kind}, found {plain!r}.")
    options = {"name": plain} if isinstance(plain, str) else dict(_mapping(kind, plain))
    name = str(options.pop("name", ""))
    if name not in REGISTRIES[kind]:
        raise ValueError(f"Unknown {kind} '{name}'; known: {', '.join(sorted(REGISTRIES[kind])) or 'none'}.")
    return _call(f"{kind} '{name}'", REGISTRIES[kind][name], options)


def _call(where: str, part: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Instantiate the class `part`, or fix arguments of the function `part`."""
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
    """Type of each option of a component, and whether it is required; arguments for state are not options."""
    found: dict[str, tuple[Any, bool]] = {}
    hints = get_type_hints(part.__init__ if isinstance(part, type) else part, include_extras=True)
    for parameter in inspect.signature(part).parameters.values():
        kind = hints.get(parameter.name)
        settable = isinstance(part, type) or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if settable and (is_plain(kind) or parameter.name in (*NESTED, *NESTED_LISTS)):
            found[parameter.name] = kind, parameter.default is inspect.Parameter.empty
    return found


def _value(where: str, option: str, kind: Any, plain: Any) -> Any:
    """The value of an option: a validated plain value, or a component."""
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
