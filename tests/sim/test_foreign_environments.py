"""Tests of Gymnasium environments that violate their declared spaces: the adapter reports each violation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from foreign_env import Foreign, check_keeps_its_shape, check_refuses_a_reserved_name, foreign
from gymnasium import spaces

from robopolicy.errors import SimulatorFailed, UserError
from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim, observation_options


@pytest.fixture
def registered() -> Iterator[Callable[..., str]]:
    """Registers such an environment and returns its task name."""
    name = "Foreign-v0"

    def add(**attributes: Any) -> str:
        made = foreign(**attributes)
        gymnasium.register(name, entry_point=lambda **options: made(**options), disable_env_checker=True)
        return f"gymnasium/{name}"

    yield add
    gymnasium.registry.pop(name, None)


def images(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.parametrize(
    ("space", "shown", "lesson"),
    [
        (spaces.Box(-9, 9, (2,)), 3.0, r"'state' must have the shape \(2,\), found \(\)"),
        (spaces.Box(-9, 9, (2,)), np.ones(1), r"'state' must have the shape \(2,\), found \(1,\)"),
        (spaces.Discrete(4), -1, "'state' must be a number of at least 0, found -1"),
        (spaces.Discrete(4), np.zeros(2, int), "'state' must be a number of at least 0"),
        (images(4, 5, 3), np.full((4, 5, 3), 0.7), "integers from 0 to 255, found other float64 values"),
        (images(4, 5, 3), np.full((4, 5, 3), 300), "integers from 0 to 255, found other int64 values"),
        (images(4, 5, 3), np.zeros((1, 5, 3), np.uint8), r"'image.pixels' must have the shape \(4, 5, 3\)"),
    ],
)
def test_observations_are_not_silently_broadcast_or_cast(space: Any, shown: Any, lesson: str) -> None:
    sim = GymnasiumSim(foreign(observation_space=space, shown=shown), 1)
    with pytest.raises(SimulatorFailed, match=lesson):
        sim.reset(0)


def test_old_style_reset_that_returns_two_numbers_is_refused() -> None:
    def reset(self: Foreign, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([1.0, 2.0])

    with pytest.raises(SimulatorFailed, match=r"'state' must have the shape \(2,\), found \(\)"):
        GymnasiumSim(foreign(reset=reset), 1).reset(0)


@pytest.mark.parametrize(
    ("space", "shown", "expected"),
    [
        (spaces.Box(-9, 9, (2,)), np.ones((1, 2)), torch.ones(2)),
        (spaces.Discrete(3, start=4), np.array([5]), torch.tensor([0.0, 1.0, 0.0])),
        (images(3, 5, 3), np.arange(45).reshape(3, 5, 3), torch.arange(45).reshape(3, 5, 3).permute(2, 0, 1)),
    ],
)
def test_observations_with_an_equivalent_layout_are_accepted(space: Any, shown: Any, expected: Any) -> None:
    obs: Mapping[str, torch.Tensor] = GymnasiumSim(foreign(observation_space=space, shown=shown), 1).reset(0)
    (value,) = obs.values()
    assert torch.equal(value[0], expected.to(value.dtype))


def test_image_policies_run_in_tasks_by_id(registered: Any) -> None:
    space = spaces.Dict({"top": images(6, 8, 3), "side": images(4, 4, 3)})
    name = registered(observation_space=space, shown={"top": np.ones((6, 8, 3), np.uint8), "side": np.ones((4, 4, 3))})
    shapes = {key: entry.shape for key, entry in make_sim(name, SimOptions(num_envs=1)).spec.observation.items()}
    assert shapes == {"image.top": (3, 6, 8), "image.side": (3, 4, 4)}
    for seen in (shapes, {"image.top": (3, 6, 8)}):
        sim = make_sim(name, SimOptions(num_envs=1, **observation_options([seen])))
        assert sim.reset(0)["image.top"].shape == (1, 3, 6, 8)
    with pytest.raises(UserError, match="has fixed observations and cannot add cameras"):
        make_sim(name, SimOptions(num_envs=1, **observation_options([{"image.front": (3, 6, 8)}])))


@pytest.mark.parametrize("name", ["action", "reward", "memory", "image.x"])
def test_reserved_observation_names_are_refused(name: str) -> None:
    check_refuses_a_reserved_name(name)


def test_two_observations_with_one_name_are_refused() -> None:
    box = spaces.Box(-1, 1, (1,))
    with pytest.raises(UserError, match=r"Observation 'a\.b' .* rename it"):
        GymnasiumSim(foreign(observation_space=spaces.Dict({"a.b": box, "a": spaces.Dict({"b": box})})), 1)


def test_empty_entries_are_dropped_and_empty_spaces_refused() -> None:
    space = spaces.Dict({"state": spaces.Box(-1, 1, (2,)), "empty": spaces.Box(-1, 1, (0,))})
    sim = GymnasiumSim(foreign(observation_space=space, shown={"state": np.ones(2), "empty": np.ones(0)}), 1)
    assert list(sim.reset(0)) == ["state"]
    for empty in (spaces.Dict({}), spaces.Box(-1, 1, (0,))):
        with pytest.raises(UserError, match="has no usable observation"):
            GymnasiumSim(foreign(observation_space=empty), 1)
    with pytest.raises(UserError, match="no actions"):
        GymnasiumSim(foreign(action_space=spaces.Box(-1, 1, (0,))), 1)


def test_point_clouds_keep_their_shape() -> None:
    check_keeps_its_shape("point_cloud.front")


def test_one_environment_cannot_fill_two_rows() -> None:
    one = Foreign()
    GymnasiumSim(lambda: one, 1)
    with pytest.raises(UserError, match="The factory of Foreign returned the same environment twice"):
        GymnasiumSim(lambda: one, 2)


def leave(self: Foreign) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("make", "lesson"),
    [
        (lambda: None, "failed at its start: AttributeError: 'NoneType'"),
        (type("Bare", (gymnasium.Env,), {}), "Task Bare failed at its start: AttributeError.* 'observation_space'"),
        (foreign(metadata=None), "Task Other failed at its start: AttributeError"),
        (foreign(__init__=leave), "failed at its start: SystemExit: 3"),
    ],
)
def test_invalid_environment_is_reported_in_one_line(make: Any, lesson: str) -> None:
    with pytest.raises(SimulatorFailed, match=lesson):
        GymnasiumSim(make, 1)
    with pytest.raises(UserError, match="at least 1, got 0"):
        GymnasiumSim(make, 0)


def refuse(self: Foreign) -> None:
    raise RuntimeError("cannot close")


def test_error_on_close_is_ignored(registered: Any) -> None:
    sim = make_sim(registered(close=refuse), SimOptions(num_envs=2))
    sim.reset(0)
    sim.close()


@pytest.mark.parametrize(
    ("attributes", "seconds"),
    [
        ({"dt": 1}, 1.0),
        ({"dt": 0.01, "control_dt": 0.1}, 0.1),
        ({"dt": np.float32(0.5)}, 0.5),
        ({"dt": 0.0, "metadata": {"render_fps": 4}}, 0.25),
        ({"dt": -1.0}, 0.05),
        ({"metadata": {"render_fps": -5}}, 0.05),
        ({"metadata": {"render_fps": "fast"}}, 0.05),
    ],
)
def test_control_step_is_the_first_valid_declared_number(attributes: Any, seconds: float) -> None:
    assert GymnasiumSim(foreign(**attributes), 1).spec.control_dt == seconds


def test_time_limit_wrapper_without_an_id_is_respected() -> None:
    long = foreign(step=lambda self, action: (self.shown, 1.0, False, False, {}))
    sim = GymnasiumSim(lambda: gymnasium.wrappers.TimeLimit(long(), 1002), 1)
    assert sim.spec.max_episode_steps == 1002
    sim.reset(0)
    assert [bool(sim.step(torch.zeros(1, 1)).truncated) for _ in range(1002)] == [False] * 1001 + [True]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.int16])
def test_action_bounds_are_inside_the_action_space(kind: Any) -> None:
    def step(self: Foreign, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.shown, 1.0, False, False, {}

    bound = 3 if kind is np.int16 else 0.1  # float32 rounds 0.1 up
    sim = GymnasiumSim(foreign(action_space=spaces.Box(-bound, bound, (1,), kind), step=step), 1)
    sim.reset(0)
    for action in (sim.spec.action_high, sim.spec.action_low, torch.tensor([9.0])):
        sim.step(action[None])


@pytest.mark.parametrize(
    ("frame", "lesson"),
    [
        (None, "has no 'rgb_array' rendering"),
        (np.zeros((5, 5), np.uint8), r"must render uint8 \(height, width, 3\) but renders ndarray \(5, 5\)"),
        (np.zeros((5, 5, 3)), "must render uint8"),
        ([np.zeros((5, 5, 3), np.uint8)], r"renders list \(1, 5, 5, 3\)"),
        ("a picture in words", "renders str"),
    ],
)
def test_invalid_frames_are_refused(frame: Any, lesson: str) -> None:
    sim = GymnasiumSim(foreign(render=lambda self: frame), 1)
    sim.reset(0)
    with pytest.raises(UserError, match=lesson):
        sim.render()


def test_rendering_failure_is_reported_in_one_line() -> None:
    def render(self: Foreign) -> None:
        raise RuntimeError("no display")

    sim = GymnasiumSim(foreign(render=render), 1)
    sim.reset(7)
    with pytest.raises(SimulatorFailed, match=r"failed while rendering step 0 of the episode with seed 7.* no display"):
        sim.render()
    plain = GymnasiumSim(Foreign, 1)
    plain.reset(0)
    with pytest.raises(UserError, match="has no 'rgb_array' rendering"):
        plain.render()


def test_frames_lose_their_alpha_channel() -> None:
    sim = GymnasiumSim(foreign(render=lambda self: np.full((8, 8, 4), 7, np.uint8)), 2)
    sim.reset(0)
    assert torch.equal(sim.render(width=4, height=6, envs=2), torch.full((2, 3, 6, 4), 7, dtype=torch.uint8))


def test_environment_without_a_render_mode_argument_is_accepted(registered: Any) -> None:
    def __init__(self: Foreign) -> None:
        self.count = 0

    name = registered(__init__=__init__, metadata={"render_modes": ["rgb_array"]})
    assert bool((make_sim(name).reset(0)["state"] == 0).all())


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_success_and_reward_must_be_single_numbers(key: str) -> None:
    def step(verdict: Any, reward: Any) -> Any:
        return lambda self, action: (self.shown, reward, False, False, {key: verdict})

    sim = GymnasiumSim(foreign(step=step(np.array([True]), np.array([2.5]))), 1)
    sim.reset(0)
    found = sim.step(torch.zeros(1, 1))
    assert bool(found.info["success"]) and float(found.reward) == 2.5
    for verdict, reward, lesson in ((np.ones(2), 1.0, "success must be"), (True, np.ones(3), "reward must be")):
        sim = GymnasiumSim(foreign(step=step(verdict, reward)), 1)
        sim.reset(0)
        with pytest.raises(SimulatorFailed, match=f"{lesson} a single number, got shape"):
            sim.step(torch.zeros(1, 1))


def test_integer_actions_are_rounded_to_the_nearest() -> None:
    executed: list[int] = []

    def step(self: Foreign, action: Any) -> Any:
        executed.append(int(action[0]))
        return self.shown, 0.0, False, False, {}

    sim = GymnasiumSim(foreign(step=step, action_space=spaces.Box(-2, 2, (1,), np.int64)), 1)
    sim.reset(0)
    for asked in (1.999, 0.9, -0.9, -1.6, 2.0, 0.2):
        sim.step(torch.tensor([[asked]]))
    assert executed == [2, 1, -1, -2, 2, 0]


def test_reward_terms_missing_from_a_step_are_zero() -> None:
    def step(self: Foreign, action: Any) -> Any:
        self.count += 1
        bonus = {"reward_bonus": 2.0, "reward_note": "two"} if self.count == 2 else {}
        return self.shown, 1.0 + 2.0 * bool(bonus), False, False, bonus

    sim = ChunkedSim(GymnasiumSim(foreign(step=step), 1), action_horizon=3)
    sim.reset(0)
    chunks = [sim.step(torch.zeros(1, 3, 1)) for _ in range(2)]
    assert [float(step.info["reward.bonus"]) for step in chunks] == [2.0, 0.0]
    assert all("reward.note" not in step.info for step in chunks)
