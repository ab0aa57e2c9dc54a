"""Every number that a user can set tells its range by its type, and no config is built with one outside of it."""

import dataclasses
from typing import Annotated

import pytest
from range_rules import (
    check_refuses_what_is_beyond_a_field,
    check_refuses_what_is_out_of_range,
    configs_of,
    nested,
    unranged,
)

from robopolicy.constraints import Range
from robopolicy.deploy.safety.ood import ActionOODConfig
from robopolicy.plugins import PRODUCT
from robopolicy.training.config import TrainConfig
from robopolicy.worldmodel.imagined import ShootingConfig
from robopolicy.worldmodel.latent import LatentWorldModelConfig
from robopolicy.worldmodel.learner import LearnerConfig
from robopolicy.worldmodel.pretrained.model import AdapterConfig

CONFIGS = {"a run": TrainConfig, "a world model": LatentWorldModelConfig, "its learner": LearnerConfig}
CONFIGS |= {"an adapter": AdapterConfig, "shooting": ShootingConfig, "support": ActionOODConfig, **configs_of(PRODUCT)}
EVERY = nested(CONFIGS)


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


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_number_outside_its_range_is_refused_however_a_config_is_built(name: str) -> None:
    check_refuses_what_is_out_of_range(EVERY[name])


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_number_beyond_the_field_that_bounds_it_is_refused(name: str) -> None:
    check_refuses_what_is_beyond_a_field(EVERY[name])
