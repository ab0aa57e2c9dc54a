"""Tests of real Isaac Lab 3 environments of both kinds on the CPU (`make test-isaaclab`), with generated assets."""

from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import torch
from cartpole_usd import write_assets

from robopolicy.errors import UserError
from robopolicy.sim.backends.isaac_style import IsaacStyleSim, building
from robopolicy.sim.backends.isaaclab import isaaclab_config
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.contract import Step
from robopolicy.sim.registry import SimOptions, make_sim

pytest.importorskip("isaaclab", reason="needs robopolicy[isaaclab]: make test-isaaclab")

ENVS = 8
KINDS = ("isaaclab/Isaac-Cartpole", "isaaclab/Isaac-Cartpole-Direct")
PLACE, SPEED = 0, 2  # indices of the cart in the observation, [m] and [m/s]


@pytest.fixture(scope="module", autouse=True)
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the cart-pole assets available before Isaac Lab is imported."""
    root: Path = tmp_path_factory.mktemp("assets")
    write_assets(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISAACSIM_ASSET_ROOT", str(root))
        yield


SMALL = ["sim.num_envs=8", "evaluation.episodes=0", "logging.every=1", "budget.updates=2"]


def env_steps(folder: Path) -> list[float]:
    """Control steps at the updates of a run."""
    from robopolicy.training.loggers import read_jsonl

    return [row["train/env_steps"] for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.compiles
def test_chunk_policies_are_cloned_and_fine_tuned_from_the_command_line(tmp_path: Path) -> None:
    """Runs first, before the `sim` fixture opens: Isaac Lab supports one simulator at a time."""
    from robopolicy.cli.main import main

    task, common = "isaaclab/Isaac-Cartpole", [*SMALL, f"out={tmp_path}"]
    settings = [f"task={task}", "policy=gaussian", "algorithm=ppo", "chunk.horizon=1", "chunk.action_horizon=1"]
    settings += ["algorithm.num_steps=8", "algorithm.batch_size=32", "name=ppo"]
    assert main(["train", *settings, *common]) == 0
    assert env_steps(tmp_path / "ppo") == [64, 128]
    checkpoint, data = str(tmp_path / "ppo/checkpoints/last"), str(tmp_path / "data")
    words = ["--policy", checkpoint, "--episodes", "4", "--num-envs", "4", "--keep-failures", "--stochastic"]
    assert main(["collect", task, *words, "--out", data]) == 0
    chunk = ["chunk.horizon=4", "chunk.action_horizon=4", "policy.hidden=[16]"]
    assert main(["train", f"dataset={data}", "policy=flow", "algorithm=bc", "name=bc", *chunk, *common]) == 0
    start = f"init_from={tmp_path / 'bc/checkpoints/last'}"
    settings = ["algorithm.num_steps=4", "algorithm.batch_size=16"]
    assert main(["train", start, "algorithm=reinflow", "name=reinflow", *settings, *common]) == 0
    assert all(steps <= 128 * update for update, steps in enumerate(env_steps(tmp_path / "reinflow"), 1))
    settings = ["algorithm.num_steps=2", "algorithm.batch_size=16", "replay.learning_starts=64"]
    assert main(["train", start, "algorithm=dsrl_na", "name=dsrl", *settings, *common]) == 0
    assert len(env_steps(tmp_path / "dsrl")) == 2


@pytest.mark.compiles
def test_the_viewport_is_drawn_where_the_configuration_has_a_visualizer() -> None:
    from isaaclab_visualizers.newton import NewtonGLVisualizerCfg

    config = isaaclab_config("Isaac-Cartpole", 2, "cpu")
    config.sim.visualizer_cfgs = [NewtonGLVisualizerCfg(headless=True, window_width=128, window_height=96)]
    with building("cpu"):
        sim = IsaacStyleSim(gymnasium.make("Isaac-Cartpole", cfg=config), task="test/cartpole")
    frames = sim.render(width=64, height=48, envs=2)
    assert (frames.dtype, frames.shape) == (torch.uint8, (2, 3, 48, 64))
    assert frames.float().std() > 10.0  # sky and floor
    with pytest.raises(UserError, match="Unknown camera 'front'"):
        sim.render("front")
    sim.close()


@pytest.fixture(scope="module", params=KINDS)
def sim(request: pytest.FixtureRequest) -> Iterator[IsaacStyleSim]:
    made = make_sim(request.param, SimOptions(num_envs=ENVS))
    assert isinstance(made, IsaacStyleSim)
    yield made
    made.close()


def test_checker_finds_nothing(sim: IsaacStyleSim) -> None:
    assert sim.spec.max_episode_steps == 300
    assert sim.spec.control_dt == pytest.approx(1 / 60)
    assert sim.spec.final_obs_exact
    assert check_simulator(sim) == []


def test_final_observations_continue_the_motion_of_the_cart(sim: IsaacStyleSim) -> None:
    """A cart at 1 m/s moves 17 mm per step; an automatic reset moves it by up to a metre."""
    before, ended, jumps = sim.reset(3)["policy"], 0, torch.zeros(0)
    actions = torch.rand(320, ENVS, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for action in actions:
        step = sim.step(action)
        final = step.final_obs["policy"]
        moved = final[:, PLACE] - before[:, PLACE]
        torch.testing.assert_close(moved, final[:, SPEED] * sim.spec.control_dt, rtol=0, atol=0.02)
        jumps = torch.cat([jumps, (step.obs["policy"] - final)[step.done, PLACE].abs()])
        ended, before = ended + int(step.done.sum()), step.obs["policy"]
    assert ended >= ENVS
    assert float(jumps.max()) > 0.1


def test_logged_values_have_one_entry_per_row(sim: IsaacStyleSim) -> None:
    logged = [key for key in sim.step(torch.zeros(ENVS, 1)).info if key.startswith("log.")]
    assert logged
    step: Step = sim.step(torch.zeros(ENVS, 1))
    assert all(step.info[key].shape == (ENVS,) for key in logged)


def test_diverged_row_restarts_without_affecting_other_rows(sim: IsaacStyleSim) -> None:
    def rollout(lose: bool) -> list[Step]:
        sim.reset(1)
        steps = []
        for number in range(6):
            if lose and number == 2:
                cart = sim.env.scene["cartpole" if "Direct" in sim.spec.task else "robot"]
                nowhere = torch.full((1, cart.num_joints), torch.nan)
                cart.write_joint_velocity_to_sim_index(velocity=nowhere, env_ids=torch.tensor([2], dtype=torch.int32))
            steps.append(sim.step(torch.zeros(ENVS, 1)))
        return steps

    others = torch.arange(ENVS) != 2
    for number, (step, undisturbed) in enumerate(zip(rollout(True), rollout(False), strict=True)):
        assert step.info["diverged"].tolist() == [row == 2 and number == 2 for row in range(ENVS)]
        for obs in (step.obs, step.final_obs):
            assert obs["policy"].isfinite().all()
            torch.testing.assert_close(obs["policy"][others], undisturbed.obs["policy"][others], rtol=0, atol=1e-5)


def test_a_second_set_of_environments_is_refused(sim: IsaacStyleSim) -> None:
    with pytest.raises(UserError, match=r"evaluation\.episodes=0"):
        make_sim(sim.spec.task, SimOptions(num_envs=2))


@pytest.mark.parametrize(
    ("name", "device", "lesson"),
    [("isaaclab/Isaac-Antt", "cpu", "Did you mean Isaac-Ant"), ("isaaclab/Isaac-Ant", "gpu", "use device cpu")],
)
def test_unavailable_environments_are_explained(name: str, device: str, lesson: str) -> None:
    with pytest.raises(UserError, match=lesson):
        make_sim(name, SimOptions(num_envs=2, device=device))
