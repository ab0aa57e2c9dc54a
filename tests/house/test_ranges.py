"""Every number that a user can set tells its range by its type, and no config is built with one outside of it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.constraints import Range, Ranged, UpTo
from robopolicy.errors import UserError
from robopolicy.nets.augmentation import AUGMENTATIONS
from robopolicy.nets.backbone import BACKBONES
from robopolicy.nets.modality import ENCODERS
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import PlainForm
from robopolicy.sim.wrappers.registry import WRAPPERS
from robopolicy.training.config import TrainConfig

CONFIGS = {
    "a run": TrainConfig,
    **{name: registry[name].config_class for registry in (ALGORITHMS, POLICIES) for name in registry},
    **{
        f"{part.kind}: {name}": part[name].config_class
        for part in (ENCODERS, BACKBONES, AUGMENTATIONS, WRAPPERS)
        for name in part
    },
}


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


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_a_configuration_has_a_range(name: str) -> None:
    assert unranged(CONFIGS[name], name) == []


def test_numbers_without_a_range_are_found() -> None:
    @dataclasses.dataclass
    class Config:
        ranged: Annotated[float, Range(0)] = 0.0
        bare: float = 0.0
        some: tuple[int, ...] = ()

    Config.__annotations__ = {"ranged": Annotated[float, Range(0)], "bare": float, "some": tuple[int, ...]}
    assert unranged(Config, "a run") == ["a run.bare", "a run.some"]


def parts(hint: Any) -> Iterator[type[Any]]:
    """The config dataclasses within a type, itself included."""
    if isinstance(hint, type) and issubclass(hint, PlainForm):
        return  # checks its own settings
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        for kind in get_type_hints(hint, include_extras=True).values():
            yield from parts(kind)
    for item in get_args(hint):
        yield from parts(item)


def ranges(hint: Any) -> Iterator[tuple[type, Range, Callable[[float], Any]]]:
    """Type and range of the numbers in a type, and how one is put into its place."""
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


EVERY: dict[str, type[Any]] = {part.__qualname__: part for config in CONFIGS.values() for part in parts(config)}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_number_outside_its_range_is_refused_however_a_config_is_built(name: str) -> None:
    config = EVERY[name]
    assert issubclass(config, Ranged) or not numbers(config)
    good: Any = config()
    for setting, hint in get_type_hints(config, include_extras=True).items():
        for kind, bounds, place in ranges(hint):
            wrong = kind(bounds.least - 1) if bounds.least > -math.inf else math.nan
            with pytest.raises(UserError, match=setting):
                dataclasses.replace(good, **{setting: place(wrong)})


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_number_beyond_the_field_that_bounds_it_is_refused(name: str) -> None:
    config = EVERY[name]
    good: Any = config()
    for setting, hint in get_type_hints(config, include_extras=True).items():
        for bound in (note for note in get_args(hint)[1:] if isinstance(note, UpTo)):
            highest = getattr(good, bound.field)
            beyond = highest if bound.below else highest + 1 if type(highest) is int else 1.01 * highest
            words = f"^{setting} must (lie below|be at most) {bound.field}={highest}, got {beyond}"
            with pytest.raises(UserError, match=words):
                dataclasses.replace(good, **{setting: beyond})
