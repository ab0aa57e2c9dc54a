"""Checks for numeric settings: their type states their range, and configs refuse values out of range."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.constraints import AtMost, Range, Validated
from robopolicy.errors import UserError
from robopolicy.nets.augmentation import AUGMENTATIONS
from robopolicy.nets.backbone import BACKBONES
from robopolicy.nets.modality import ENCODERS
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import CustomSerialization
from robopolicy.sim.wrappers.registry import WRAPPERS

CONFIGURED = (ALGORITHMS, POLICIES, ENCODERS, BACKBONES, AUGMENTATIONS, WRAPPERS)


def configs_of(ring: str) -> dict[str, type[Any]]:
    """The configs of the registry entries of the product or of a theme, by kind and name."""
    names = [(registry, name) for registry in CONFIGURED for name in registry if registry.ring(name) == ring]
    return {f"{registry.kind}: {name}": registry[name].config_class for registry, name in names}


def nested(configs: dict[str, type[Any]]) -> dict[str, type[Any]]:
    """The configs and all nested configs, by name."""
    return {part.__qualname__: part for config in configs.values() for part in parts(config)}


def unranged(hint: object, where: str) -> list[str]:
    """Settings below `where` whose type is a bare number."""
    if hint in (int, float):
        return [where]
    if dataclasses.is_dataclass(hint):
        fields = get_type_hints(hint, include_extras=True)
        return [found for name, kind in fields.items() for found in unranged(kind, f"{where}.{name}")]
    if get_origin(hint) is Annotated:
        return [] if any(isinstance(note, Range) for note in get_args(hint)[1:]) else [where]
    return [found for item in get_args(hint) for found in unranged(item, where)]


def parts(hint: Any) -> Iterator[type[Any]]:
    """The config dataclasses within a type, including the type itself."""
    if isinstance(hint, type) and issubclass(hint, CustomSerialization):
        return  # validates its settings itself
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        for kind in get_type_hints(hint, include_extras=True).values():
            yield from parts(kind)
    for item in get_args(hint):
        yield from parts(item)


def ranges(hint: Any) -> Iterator[tuple[type, Range, Callable[[float], Any]]]:
    """Type and range of the numbers in a type, and a function that wraps a number for its position."""
    origin, items = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from ((items[0], note, lambda wrong: wrong) for note in items[1:] if isinstance(note, Range))
        return
    place = {tuple: lambda wrong: (wrong,), dict: lambda wrong: {"key": wrong}}.get(origin, lambda wrong: wrong)
    for item in items:
        yield from ((kind, note, place) for kind, note, _ in ranges(item))


def numbers(config: type[Any]) -> list[str]:
    """Fields of a config that are numbers."""
    return [name for name, hint in get_type_hints(config, include_extras=True).items() if list(ranges(hint))]


def outside(kind: type, bounds: Range) -> list[float]:
    """Numbers out of bounds, including exclusive bounds."""
    low = [bounds.minimum - 1] + [bounds.minimum] * bounds.exclusive_minimum
    high = [bounds.maximum + 1] + [bounds.maximum] * bounds.exclusive_maximum
    return [kind(wrong) for wrong in low + high if math.isfinite(wrong)] or [math.nan]


def check_refuses_what_is_out_of_range(config: type[Any]) -> None:
    """A config refuses a number outside its range."""
    assert issubclass(config, Validated) or not numbers(config)
    good: Any = config()
    for setting, hint in get_type_hints(config, include_extras=True).items():
        for kind, bounds, place in ranges(hint):
            for wrong in outside(kind, bounds):
                with pytest.raises(UserError, match=setting):
                    dataclasses.replace(good, **{setting: place(wrong)})


def check_refuses_what_is_beyond_a_field(config: type[Any]) -> None:
    """A number above the field that bounds it is refused."""
    good: Any = config()
    for setting, hint in get_type_hints(config, include_extras=True).items():
        for bound in (note for note in get_args(hint)[1:] if isinstance(note, AtMost)):
            highest = getattr(good, bound.field)
            beyond = highest if bound.exclusive else highest + 1 if type(highest) is int else 1.01 * highest
            words = f"^{setting} must (lie below|be at most) {bound.field}={highest}, got {beyond}"
            with pytest.raises(UserError, match=words):
                dataclasses.replace(good, **{setting: beyond})
