"""Tests of the two native engines: independence of batch size and threads, exact resume, divergence."""

import mujoco
import numpy as np
import pytest
import torch
from slider import XML, Slider

from robopolicy.errors import UserError
from robopolicy.policies.base import Sample
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

ENGINES = ("mujoco", "mujoco-exact")


def trajectory(backend: str, num_envs: int, row: int, threads: int = 0) -> list[list[float]]:
    """Returns rewards and observations of the episode with seed 7, in row `row` of `num_envs`."""
    sim = make_sim("hopper", SimOptions(num_envs, backend=backend, threads=threads))
    sim.reset([7 if i == row else 100 + i for i in range(num_envs)])
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(12):
        action = generator.uniform(-1, 1, 3).astype(np.float32)
        step = sim.step(torch.from_numpy(action).expand(num_envs, -1))
        lines.append([float(step.reward[row]), *step.final_obs["state"][row].tolist()])
    sim.close()
    return lines


@pytest.mark.parametrize("backend", ENGINES)
def test_an_episode_does_not_depend_on_batch_size_row_or_threads(backend: str) -> None:
    alone = trajectory(backend, 1, 0)  # stepped serially
    assert alone == trajectory(backend, 3, 2)
    assert alone == trajectory(backend, 9, 4)  # stepped by the pool
    assert alone == trajectory(backend, 9, 8, threads=3)


def test_rollout_engine_is_a_step_loop_with_zero_warm_start() -> None:
    sim = make_sim("half_cheetah", SimOptions(5))
    sim.reset(0)
    model = sim.task.model  # type: ignore[attr-defined]
    data = mujoco.MjData(model)
    initial = sim.task.initial(np.random.default_rng(3))  # type: ignore[attr-defined]
    data.qpos[:], data.qvel[:] = initial.qpos, initial.qvel
    mujoco.mj_forward(model, data)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        action = torch.rand(5, 6, generator=generator) * 2 - 1
        step = sim.step(action)
        data.ctrl[:] = action[3].double().numpy()
        data.qacc_warmstart[:] = 0
        mujoco.mj_step(model, data, nstep=5)
        expected = np.concatenate([data.qpos[1:], data.qvel]).astype(np.float32)
        np.testing.assert_array_equal(step.final_obs["state"][3].numpy(), expected)


@pytest.mark.parametrize("task", ["hopper", "ant"])
@pytest.mark.parametrize("played", [0, 23])
@pytest.mark.parametrize("backend", ENGINES)
def test_continuing_after_load_is_bit_identical(task: str, played: int, backend: str) -> None:
    sim, other = (make_sim(task, SimOptions(5, backend=backend)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(70, 5, sim.spec.action_dim, generator=generator) * 2 - 1
    obs = sim.reset(0)
    for action in actions[:played]:
        obs = sim.step(action).obs
    state = sim.state_dict()
    straight = [sim.step(action) for action in actions[played:]]
    restored = other.load_state_dict(state)  # into a simulator that was never reset
    assert torch.equal(restored["state"], obs["state"])
    for action, expected in zip(actions[played:], straight, strict=True):
        step = other.step(action)
        assert torch.equal(step.reward, expected.reward)
        assert torch.equal(step.obs["state"], expected.obs["state"])
        assert torch.equal(step.final_obs["state"], expected.final_obs["state"])
    assert torch.equal(sim.episode_seed, other.episode_seed)


def test_state_of_another_batch_size_is_refused() -> None:
    sim = MujocoSim(Slider(), 2)
    sim.reset(0)
    with pytest.raises(UserError, match="2 environments and this one 3"):
        MujocoSim(Slider(), 3).load_state_dict(sim.state_dict())


class Exploding(Slider):
    """Diverges when pushed to the left: the control throws the mass out of all bounds."""

    def control(self, action: np.ndarray, state: object) -> np.ndarray:
        return np.where(action < 0, -9e9, action)


@pytest.mark.parametrize("engine", ["rollout", "exact"])
@pytest.mark.filterwarnings("ignore")
def test_diverged_environment_is_reset_and_is_no_success(
    engine: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))  # MuJoCo writes its warnings to a file in the current folder
    task = Exploding(max_episode_steps=20)
    task.model = mujoco.MjModel.from_xml_string(
        XML.replace("</mujoco>", '<sensor><jointvel name="speed" joint="rail"/></sensor></mujoco>')
    )
    task.model.actuator_ctrllimited[:] = 0
    monkeypatch.setattr(
        task, "observe", lambda state: {"state": Slider.observe(task, state)["state"], "sensed": state.sensor("speed")}
    )
    sim = MujocoSim(task, 5, engine=engine)  # type: ignore[arg-type]
    sim.reset(0)
    push = torch.tensor([[0.1], [0.1], [-1.0], [0.1], [0.1]])
    for _ in range(2):  # MuJoCo detects positions beyond 1e10 at the start of the next step
        before = sim.step(push)
        assert not before.done.any()
    step = sim.step(push)
    for key in ("state", "sensed"):
        assert torch.equal(step.final_obs[key][2][:2], before.obs[key][2][:2])
    assert step.reward[2] == 0.0
    assert step.info["diverged"].tolist() == [False, False, True, False, False]
    assert step.terminated.tolist() == [False, False, True, False, False]
    assert not step.info["success"][2]
    assert torch.isfinite(step.final_obs["state"]).all()
    assert step.obs["state"][2].tolist() == [0.0, 0.0, 0.0]
    assert step.info["diverged"].dtype == torch.bool
    assert sim.step(torch.full((5, 1), 0.5)).reward[2] == 0.5


@pytest.mark.filterwarnings("ignore")
def test_metrics_report_the_share_of_diverged_episodes(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    task = Exploding(max_episode_steps=3)
    task.model.actuator_ctrllimited[:] = 0
    sampler = RolloutSampler(ChunkedSim(MujocoSim(task, 4)), decisions=3)
    push = torch.tensor([[[0.1]], [[0.1]], [[-1.0]], [[0.1]]])
    sampler.collect(lambda obs, *, generator: Sample(push, {}, torch.zeros(4, 1)))
    stats = sampler.episode_stats()
    assert (stats["rollout/episodes"], stats["rollout/diverged"]) == (4.0, 0.25)


def test_unknown_camera_and_wrong_engine_are_explained() -> None:
    with pytest.raises(UserError, match="Did you mean 'side'"):
        MujocoSim(Slider(), 1, cameras=("sied",))
    task = Slider()
    task.needs_exact_engine = True
    with pytest.raises(UserError, match="needs engine 'exact'"):
        MujocoSim(task, 1, engine="rollout")
