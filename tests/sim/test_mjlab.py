"""Tests of real mjlab environments on the CPU: the checker, final observations, divergence, PPO updates."""

import json
from pathlib import Path

import pytest
import torch

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.registry import make_policy
from robopolicy.sim.backends.isaac_style import IsaacStyleSim, building
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.loggers import read_jsonl

pytest.importorskip("mjlab", reason="needs robopolicy[mjlab]")
pytestmark = pytest.mark.compiles

ENVS = 8
STEPS = 20  # per short episode


def cartpole(seconds: float) -> IsaacStyleSim:
    """Returns eight cart-poles whose episodes last `seconds`."""
    from robopolicy.sim.backends.mjlab import mjlab_config

    config = mjlab_config("Mjlab-Cartpole-Balance", ENVS)
    config.episode_length_s = seconds
    with building("cpu"):
        from mjlab.envs import ManagerBasedRlEnv

        return IsaacStyleSim(ManagerBasedRlEnv(config, device="cpu"), task="mjlab/cartpole_balance")


@pytest.fixture(scope="module")
def short() -> IsaacStyleSim:
    return cartpole(STEPS * 0.05)


@pytest.fixture(scope="module")
def long() -> IsaacStyleSim:
    return cartpole(50.0)


def test_checker_finds_nothing(short: IsaacStyleSim) -> None:
    assert short.spec.max_episode_steps == STEPS
    assert short.spec.control_dt == pytest.approx(0.05)
    assert short.spec.final_obs_exact
    assert check_simulator(short) == []


def test_final_observations_match_a_longer_episode(short: IsaacStyleSim, long: IsaacStyleSim) -> None:
    for key, value in short.reset(5).items():
        assert torch.equal(value, long.reset(5)[key])
    actions = torch.rand(STEPS, ENVS, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for action in actions:
        ended, continued = short.step(action), long.step(action)
    assert ended.truncated.all()
    assert not ended.terminated.any()
    torch.testing.assert_close(ended.final_obs["actor"], continued.obs["actor"], rtol=0, atol=1e-5)
    torch.testing.assert_close(ended.reward, continued.reward, rtol=0, atol=1e-5)
    assert not torch.allclose(ended.obs["actor"], ended.final_obs["actor"], atol=1e-2)
    assert short.episode_seed.tolist() == list(range(5 + ENVS, 5 + 2 * ENVS))
    assert ended.info["log.Episode_Termination/time_out"].tolist() == [float(ENVS)] * ENVS


def test_diverged_row_restarts_without_affecting_other_rows(short: IsaacStyleSim, long: IsaacStyleSim) -> None:
    for sim in (short, long):
        sim.reset(1)
    others = torch.arange(ENVS) != 2
    for number in range(6):
        if number == 2:
            short.env.sim.data.qpos[2] = torch.nan
        step, undisturbed = short.step(torch.zeros(ENVS, 1)), long.step(torch.zeros(ENVS, 1))
        assert step.info["diverged"].tolist() == [row == 2 and number == 2 for row in range(ENVS)]
        assert torch.equal(step.terminated, step.info["diverged"])
        for obs in (step.obs, step.final_obs):
            assert obs["actor"].isfinite().all()
            torch.testing.assert_close(obs["actor"][others], undisturbed.obs["actor"][others], rtol=0, atol=1e-5)
    assert short.episode_step.tolist() == [6, 6, 3, 6, 6, 6, 6, 6]


def test_building_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(0)
    cartpole(1.0).close()
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


def test_cameras_of_the_model_become_images_and_frames(monkeypatch) -> None:
    from mujoco.rendering.classic import gl_context

    monkeypatch.setattr(gl_context, "GLContext", None)  # MuJoCo was imported before the choice of an OpenGL library
    sim = make_sim("mjlab/lift_cube", SimOptions(2, device="auto", cameras=("camera_d405",), image_size=16))
    image = sim.reset(0)["image.camera_d405"]
    assert (image.dtype, image.shape) == (torch.uint8, (2, 3, 16, 16))
    assert image.float().std() > 10.0
    frames = sim.render(width=64, height=48, envs=2)
    assert (frames.dtype, frames.shape) == (torch.uint8, (2, 3, 48, 64))
    assert not torch.equal(frames[0], frames[1])  # each row has its own cube
    with pytest.raises(UserError, match="Unknown camera 'front'"):
        sim.render("front")
    sim.close()


def test_colours_that_an_environment_observes_are_whole_numbers() -> None:
    sim = make_sim("mjlab/Mjlab-Lift-Cube-Yam-Rgb", SimOptions(num_envs=2))
    entry = sim.spec.observation["image.camera"]
    assert (entry.shape, entry.dtype) == ((3, 32, 32), torch.uint8)
    sim.close()


@pytest.mark.parametrize(
    ("name", "device", "lesson"),
    [
        ("mjlab/Mjlab-Cartpole-Balanc", "cpu", "Did you mean Mjlab-Cartpole-Balance"),
        ("mjlab/Mjlab-Tracking-Flat-Unitree-G1", "cpu", "motion file"),
        ("mjlab/cartpole_balance", "gpu", "use device cpu"),
        pytest.param(
            "mjlab/cartpole_balance",
            "cuda",
            "cannot be used",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_unavailable_environments_are_explained(name: str, device: str, lesson: str) -> None:
    with pytest.raises(UserError, match=lesson) as caught:
        make_sim(name, SimOptions(num_envs=2, device=device))
    assert "\n" not in str(caught.value)


def test_ppo_updates_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["experiment=mjlab_cartpole_ppo", "sim.num_envs=8", "algorithm.num_steps=8", "algorithm.batch_size=32"]
    settings += ["budget.updates=2", "evaluation.episodes=0", "logging.every=1", f"out={tmp_path}", "name=run"]
    assert main(["train", *settings]) == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [row["train/env_steps"] for row in rows] == [64, 128]
    assert "Setting seed" not in capfd.readouterr().out


SMALL = ["sim.num_envs=4", "evaluation.episodes=0", "budget.updates=2", "logging.every=1"]
SWING_UP = "mjlab/cartpole_swingup_sparse"


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations of the scripted swing-up."""
    folder = tmp_path_factory.mktemp("swing_up") / "data"
    words = ["--episodes", "4", "--num-envs", "4", "--keep-failures", "--out", str(folder)]
    assert main(["collect", SWING_UP, *words]) == 0
    return folder


def test_scripted_swing_up_keeps_the_pole_upright(demos: Path) -> None:
    reward = read_lerobot(demos).arrays["reward"].reshape(4, 200)
    assert reward.sum(1).min() >= 130


@pytest.mark.parametrize(
    ("algorithm", "head"),
    [
        ("reinflow", "flow"),
        ("dsrl_na", "flow"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("dppo", "diffusion"), ("pa_rl", "flow"))),
        pytest.param("fql", "flow", marks=pytest.mark.slow),
    ],
)
def test_chunk_policies_are_cloned_and_fine_tuned(algorithm: str, head: str, demos: Path, tmp_path: Path) -> None:
    chunk = ["chunk.horizon=3", "chunk.action_horizon=3", "policy.hidden=[16]"]
    words = ["task=mjlab_cartpole_swingup", "algorithm=bc", f"policy={head}", *chunk, f"dataset={demos}", "name=base"]
    assert main(["train", *words, *SMALL, f"out={tmp_path}"]) == 0
    words = [f"algorithm={algorithm}", f"init_from={tmp_path / 'base/checkpoints/last'}", "algorithm.batch_size=16"]
    words += ["algorithm.num_steps=4", f"out={tmp_path}", "name=run"]
    if ALGORITHMS[algorithm].data_source == "replay":
        words += [f"dataset={demos}", "replay.learning_starts=48"]
    assert main(["train", *words, *SMALL]) == 0
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert len(rows) == 2
    assert rows[-1]["train/env_steps"] >= 96


def test_evaluated_episodes_end_inside_chunks(short: IsaacStyleSim) -> None:
    """Episodes of 20 steps are 6 chunks of 3 actions and 2 more steps; 12 of them take two rounds of 8 rows."""
    policy = make_policy("gaussian", GaussianConfig(hidden=(4,)), PolicySpec({"actor": (5,)}, 1, 3, 3))
    policy.fit_normalizer({"action": {"min": -torch.ones(1).numpy(), "max": torch.ones(1).numpy()}})
    result = evaluate(policy, short, episodes=12)
    assert result.lengths.tolist() == [STEPS] * 12
    assert result.cost.decisions == 12 * 7
    assert (result.returns > 0).all()
