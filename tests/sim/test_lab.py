"""Tests of the mjlab and Isaac Lab adapter against hand-computed numbers, on a rail with the API of each library."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from lab_rail import KINDS, Rail
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Sample
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.backends.isaac_style import IsaacStyleSim
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, get_task, make_sim, task_names

ACTIONS = torch.tensor([[7.0], [1.0], [1.5]])  # the first is clipped to 2


def make(kind: str, **options: Any) -> IsaacStyleSim:
    return IsaacStyleSim(Rail(kind, **options), task="test/rail", action_bound=2.0, exact_final_obs="fast" not in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_checker_finds_nothing(kind: str) -> None:
    assert check_simulator(make(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_flags_and_final_observations_match_hand_computed_values(kind: str) -> None:
    sim = make(kind)
    sim.reset(10)
    steps = [sim.step(ACTIONS) for _ in range(4)]
    reward = torch.stack([step.reward for step in steps])
    expected = torch.tensor([[2, 1, 1.5], [4, 2, 3], [6, 3, 4.5], [2.01, 4, 6]])
    torch.testing.assert_close(reward, expected)
    assert [step.terminated.tolist() for step in steps[2:]] == [[True, False, False], [False, False, True]]
    assert [step.truncated.tolist() for step in steps[2:]] == [[False] * 3, [False, True, True]]
    shown, hidden = [[6.0, 3.0], [4.0, 4.0], [6.0, 4.0]], [[4.0, 2.0], [3.0, 3.0], [4.5, 3.0]]
    last = shown if sim.spec.final_obs_exact else hidden
    torch.testing.assert_close(steps[2].final_obs["actor"][0], torch.tensor(last[0]))
    torch.testing.assert_close(steps[3].final_obs["actor"][1:], torch.tensor(last[1:]))
    torch.testing.assert_close(steps[2].obs["actor"], torch.tensor([[0.01, 0.0], [3.0, 3.0], [4.5, 3.0]]))
    torch.testing.assert_close(steps[3].obs["critic.x"], torch.tensor([[2.01], [0.01], [0.01]]))
    torch.testing.assert_close(steps[3].final_obs["actor"][0], torch.tensor([2.01, 1]))  # its second episode
    assert sim.spec.final_obs_exact == (kind in ("mjlab", "manager", "direct"))
    assert sim.episode_seed.tolist() == [13, 14, 15]
    assert sim.episode_step.tolist() == [1, 0, 0]


def test_spec_describes_the_environment() -> None:
    spec = make("mjlab").spec
    assert {key: entry.shape for key, entry in spec.observation.items()} == {
        "actor": (2,),
        "critic.x": (1,),
        "critic.age": (1,),
    }
    assert (spec.action_low.tolist(), spec.action_high.tolist()) == ([-2.0], [2.0])
    assert (spec.control_dt, spec.max_episode_steps) == (0.5, 4)
    assert not spec.seeded_episodes
    assert not spec.supports_masked_step


def test_images_come_with_channels_first() -> None:
    class Seeing(Rail):
        def _get_observations(self) -> dict[str, Any]:
            pixels = torch.arange(self.num_envs * 24, dtype=torch.uint8).reshape(self.num_envs, 2, 4, 3)
            return {**super()._get_observations(), "front": pixels, "depth": torch.ones(self.num_envs, 1, 2, 4)}

    sim = IsaacStyleSim(Seeing("direct"), task="test/rail")
    assert sim.spec.observation["image.front"].shape == (3, 2, 4)
    assert sim.spec.observation["depth"].shape == (1, 2, 4)
    assert sim.reset(0)["image.front"][0, :, 0, 1].tolist() == [3, 4, 5]
    assert check_simulator(sim) == []


def test_image_only_observations_are_accepted() -> None:
    class Watching(Rail):
        def _get_observations(self) -> dict[str, Any]:
            return {"front": torch.zeros(self.num_envs, 2, 4, 3, dtype=torch.uint8)}

    sim = IsaacStyleSim(Watching("direct"), task="test/rail")
    sim.reset(0)
    assert not sim.step(torch.zeros(sim.num_envs, 1)).info["diverged"].any()


def test_finite_action_bounds_are_used_and_infinite_ones_replaced() -> None:
    env = Rail("direct")
    env.single_action_space = gymnasium.spaces.Box(np.array([-0.5], np.float32), np.array([np.inf], np.float32))
    sim = IsaacStyleSim(env, task="test/rail", action_bound=3.0)
    assert (sim.spec.action_low.tolist(), sim.spec.action_high.tolist()) == ([-0.5], [3.0])
    sim.step(torch.tensor([[-9.0], [9.0], [1.0]]))
    assert env.played.tolist() == [-0.5, 3.0, 1.0]


def test_unsupported_actions_and_environments_are_refused() -> None:
    sim = make("mjlab")
    with pytest.raises(UserError, match="shape"):
        sim.step(torch.zeros(3, 2))
    with pytest.raises(UserError, match="positive number"):
        IsaacStyleSim(Rail("mjlab"), task="test/rail", action_bound=0.0)
    env = Rail("direct")
    env.single_action_space = gymnasium.spaces.Discrete(3)
    with pytest.raises(UserError, match="Discrete actions"):
        IsaacStyleSim(env, task="test/rail")
    env.possible_agents = ["a", "b"]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="several agents"):
        IsaacStyleSim(env, task="test/rail")
    env = Rail("mjlab")
    sim = IsaacStyleSim(env, task="test/rail")
    sim.close()
    sim.close()
    assert env.closed == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [1, 3])
def test_divergence_ends_only_the_episode_of_its_row(kind: str, when: int) -> None:
    """At step 3 the episode also reaches the time limit, so the library resets the row as well."""
    sim, undisturbed = make(kind), make(kind)
    env = sim.env
    sim.reset(0)
    undisturbed.reset(0)
    others = torch.tensor([True, False, True])
    for number in range(8):
        before = sim._obs["actor"][1]
        if number == when:
            env.x[1] = torch.nan
        step, expected = sim.step(ACTIONS), undisturbed.step(ACTIONS)
        for left, right in ((step.obs, expected.obs), (step.final_obs, expected.final_obs)):
            assert all(torch.equal(left[key][others], right[key][others]) for key in left)
            assert all(bool(value.isfinite().all()) for value in left.values())
        assert torch.equal(step.reward[others], expected.reward[others])
        assert torch.equal(step.done[others], expected.done[others])
        assert step.info["diverged"].tolist() == [False, number == when, False]
        if number == when:
            assert bool(step.terminated[1])
            assert float(step.reward[1]) == 0.0
            assert torch.equal(step.final_obs["actor"][1], before)
            resets = 2 if when == 3 and kind != "mjlab" else 1
            torch.testing.assert_close(step.obs["actor"][1], torch.tensor([0.01 * resets, 0.0]))
            assert sim.episode_step.tolist()[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_nan_action_ends_its_row_and_does_not_reach_the_physics(kind: str) -> None:
    env = Rail(kind)
    sim = IsaacStyleSim(env, task="test/rail")
    step = sim.step(torch.tensor([[0.5], [torch.nan], [torch.inf]]))
    assert env.played.tolist() == [0.5, 0.0, 1.0]
    assert step.info["diverged"].tolist() == step.terminated.tolist() == [False, True, False]
    torch.testing.assert_close(step.obs["actor"], torch.tensor([[0.5, 1.0], [0.01, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_step_reads_no_values_from_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter reads only the indices of the rows to restart, once; the rail and both libraries read them too."""
    sim = make(kind)
    asked: list[str] = []
    nonzero = Tensor.nonzero

    def counted(self: Tensor, *args: Any, **options: Any) -> Tensor:
        asked.append(sys._getframe(1).f_globals["__name__"])
        return nonzero(self, *args, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("A step waits for the device.")

    steps = []
    with monkeypatch.context() as patch:
        for name in ("item", "cpu", "numpy", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"):
            patch.setattr(Tensor, name, refuse)
        patch.setattr(Tensor, "nonzero", counted)
        for number in range(9):
            action = ACTIONS.clone()
            action[1].fill_(float("nan") if number == 5 else 1.0)
            steps.append(sim.step(action))
    assert sum(bool(step.done.any()) for step in steps) >= 3
    assert asked.count("robopolicy.sim.backends.isaac_style") == 9


@pytest.mark.parametrize("kind", KINDS)
def test_an_ended_row_waits_for_the_end_of_its_chunk_only(kind: str) -> None:
    """In chunks of 3, row 0 ends with its chunk; rows 1 and 2 end after one step of the second chunk."""
    chunked = ChunkedSim(make(kind), action_horizon=3, obs_horizon=2, gamma=0.5)
    chunked.reset(10)
    chunk = ACTIONS[:, None].expand(3, 3, 1)
    first, trace = chunked.step(chunk), []
    second = chunked.step(chunk, trace)
    assert [first.steps.tolist(), second.steps.tolist()] == [[3, 3, 3], [3, 1, 1]]
    assert [first.terminated.tolist(), second.terminated.tolist()] == [[True, False, False], [True, False, True]]
    assert [first.truncated.tolist(), second.truncated.tolist()] == [[False] * 3, [False, True, True]]
    torch.testing.assert_close(first.reward, torch.tensor([2 + 2 + 1.5, 1 + 1 + 0.75, 1.5 + 1.5 + 1.125]))
    torch.testing.assert_close(second.undiscounted, torch.tensor([2.01 + 4.01 + 6.01, 4.0, 6.0]))
    torch.testing.assert_close(first.final_obs["actor"][0], torch.tensor([[4.0, 2.0], [6.0, 3.0]]))
    torch.testing.assert_close(second.final_obs["actor"][1:, 1], torch.tensor([[4.0, 4.0], [6.0, 4.0]]))
    torch.testing.assert_close(first.obs["actor"][:, 1], torch.tensor([[0.01, 0.0], [3.0, 3.0], [4.5, 3.0]]))
    torch.testing.assert_close(second.obs["actor"], torch.tensor([[[0.02, 0.0]] * 2, *[[[0.01, 0.0]] * 2] * 2]))
    assert [step.active.tolist() for step in trace] == [[True] * 3, *[[True, False, False]] * 2]
    assert chunked.sim.episode_seed.tolist() == [14, 15, 16]
    assert chunked.sim.episode_step.tolist() == [0, 0, 0]
    assert second.info["log.level"].tolist() == [2.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_synchronises_with_the_gpu_only_for_the_rows_to_restart(kind: str) -> None:
    sim = make(kind, device="cuda")
    action = ACTIONS.cuda()
    sim.step(action)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            for _ in range(8):
                sim.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [warning.filename.rsplit("/", 1)[-1] for warning in seen]
    assert places.count("isaac_style.py") == 8


def test_environment_has_its_own_random_state() -> None:
    def run_steps(sim: IsaacStyleSim, draws: int) -> list[Tensor]:
        sim.reset(3)
        seen = []
        for _ in range(6):
            torch.rand(draws)
            seen.append(sim.step(ACTIONS).obs["actor"])
        return seen

    quiet, busy = make("mjlab", noise=1.0), make("mjlab", noise=1.0)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    first = run_steps(quiet, 0)
    after = torch.rand(2), random.random(), np.random.random()
    assert all(torch.equal(a, b) for a, b in zip(first, run_steps(busy, 5), strict=True))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    alone = torch.rand(2), random.random(), np.random.random()
    assert torch.equal(after[0], alone[0])
    assert after[1:] == alone[1:]


def test_noisy_obs_equals_final_obs_for_continuing_rows() -> None:
    for kind in ("mjlab", "manager", "old manager"):
        sim = make(kind, noise=1.0)
        for _ in range(3):
            step = sim.step(ACTIONS)
        assert torch.equal(step.obs["actor"][1:], step.final_obs["actor"][1:])
        assert not torch.equal(step.obs["actor"][0], step.final_obs["actor"][0])


def test_success_is_the_termination_term_named_success() -> None:
    sim = make("manager")
    won = [sim.step(ACTIONS).info["success"].tolist() for _ in range(4)]
    assert won == [[False] * 3, [False] * 3, [True, False, False], [False, False, True]]
    assert "success" not in make("direct").step(ACTIONS).info


@pytest.mark.parametrize("kind", ["mjlab", "old manager"])
def test_metrics_average_over_episodes_and_report_inexact_final_obs(kind: str) -> None:
    """Four steps finish episodes of length 3 (row 0), 4 and 4; then row 1 diverges after one step."""
    sim = make(kind)
    sampler = RolloutSampler(ChunkedSim(sim), decisions=4)

    def act(obs: Any, *, generator: Any) -> Sample:
        return Sample(ACTIONS[:, None].clone(), {}, torch.zeros(3, 1))

    def diverge(obs: Any, *, generator: Any) -> Sample:
        sample = act(obs, generator=generator)
        sample.chunk[1] = torch.nan
        return sample

    sampler.collect(act)
    stats = sampler.episode_stats()
    assert stats["rollout/episodes"] == 3
    assert stats["rollout/length"] == pytest.approx(11 / 3)
    assert stats["rollout/return"] == pytest.approx((12 + 10 + 15) / 3)
    assert stats["rollout/success"] == pytest.approx(2 / 3)
    assert stats["rollout/diverged"] == 0.0
    assert stats["rollout/log.length"] == pytest.approx(11 / 3)
    assert stats["rollout/log.level"] == 2.0
    assert not any(key.endswith("name") for key in stats)
    assert stats.get("rollout/final_obs_exact") == (None if kind == "mjlab" else 0.0)
    sampler.decisions = 1
    sampler.collect(diverge)
    assert sampler.episode_stats()["rollout/diverged"] == 1.0
    assert sampler.episode_stats() == {}


def test_an_environment_without_a_viewport_says_how_to_draw_it() -> None:
    with pytest.raises(UserError, match=r"cfg\.sim\.visualizer_cfgs"):
        make("direct").render()


def test_short_names_resolve_to_mjlab_environments() -> None:
    names = [name for name in task_names() if name.startswith("mjlab/")]
    assert {"mjlab/go1_flat", "mjlab/g1_rough", "mjlab/cartpole_balance", "mjlab/lift_cube"} <= set(names)
    assert get_task("go1_flat").name == "mjlab/go1_flat"
    assert get_task("mjlab/Mjlab-Cartpole-Balance").requires == "mjlab"
    with pytest.raises(UserError, match="Unknown camera 'front' of task mjlab/go1_flat"):
        make_sim("mjlab/go1_flat", SimOptions(cameras=("front",)))


@pytest.mark.parametrize(
    ("name", "modules", "lesson"),
    [
        ("mjlab/go1_flat", ("mjlab", "mjlab.tasks"), r"robopolicy\[mjlab\]"),
        ("isaaclab/Isaac-Ant", ("isaaclab", "isaaclab_tasks"), r"robopolicy\[isaaclab\]"),
    ],
)
def test_a_missing_package_is_named(
    name: str, modules: tuple[str, ...], lesson: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=lesson):
        make_sim(name, SimOptions(num_envs=2))


def test_isaac_lab_error_names_the_required_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from robopolicy.sim.backends import isaaclab

    monkeypatch.setattr(isaaclab, "sys", SimpleNamespace(version_info=(3, 11, 7)))
    assert "Python 3.12 (this is 3.11)" in isaaclab._missing(ImportError("No module named 'isaaclab'"))
