"""Tests of simulator wrappers by name: options, order, added observations, and wrappers of other packages."""

import pytest
import torch
from scaled_wrapper import scaled

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.registry import WrapperSpec, evaluation_wrappers
from robopolicy.training.compose import compose_config

__all__ = ["scaled"]  # a fixture


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[scald]", "Unknown wrapper 'scald'. Did you mean 'scaled'?"),
        ("[{name: scaled, facto: 0.9}]", "Unknown setting 'facto' in wrappers.scaled. Did you mean 'factor'?"),
        ("[{name: scaled, factor: high}]", "wrappers.scaled.factor must be a value of type float, found 'high'."),
        ("[{factor: 0.9}]", "task.wrappers[0] must be a wrapper, NAME or {name: NAME, OPTION: VALUE}"),
        ("scaled", "task.wrappers: expected a list"),
    ],
)
def test_wrong_settings_get_one_clear_line(value: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        compose_config([f"task.wrappers={value}"])
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.usefixtures("scaled")
def test_a_wrapper_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(UserError, match="'scaled' is listed twice"):
        make_sim("toy/point_mass", SimOptions(num_envs=1, wrappers=(WrapperSpec("scaled"), WrapperSpec("scaled"))))


@pytest.mark.usefixtures("scaled")
def test_wrapper_of_another_package_is_selected_by_name() -> None:
    wrapper = WrapperSpec("scaled", {"factor": 3})
    sim = make_sim("toy/point_mass", SimOptions(num_envs=2, reward="shaped", wrappers=(wrapper,)))
    plain = make_sim("toy/point_mass", SimOptions(num_envs=2, reward="shaped"))
    assert sim.reset(0)["scale"].tolist() == [[3.0], [3.0]]
    plain.reset(0)
    action = torch.ones(2, 2)
    assert torch.equal(sim.step(action).reward, 3 * plain.step(action).reward)
    assert evaluation_wrappers([wrapper]) == ()
    assert observation_options([{"scale": (1,)}]) == {"wrappers": (WrapperSpec("scaled"),)}
    with pytest.raises(UserError, match=r"wrappers\.scaled\.factor must be positive"):
        WrapperSpec("scaled", {"factor": 0.0})
