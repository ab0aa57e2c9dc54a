"""Every number that a user can set tells its range by its type."""

import dataclasses
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from robopolicy.algorithms import ALGORITHMS
from robopolicy.limits import Range
from robopolicy.policies import POLICIES
from robopolicy.training.config import TrainConfig

CONFIGS = {"a run": TrainConfig, **{name: config for name, (config, _) in (ALGORITHMS | POLICIES).items()}}


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
