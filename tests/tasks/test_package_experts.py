import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from scaled_wrapper import scaled

from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.sim.wrappers.registry import WrapperSpec


class Sink:
    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def add(self, episode: Episode) -> None:
        self.episodes.append(episode)


def demonstrations(task: str, num_envs: int, episodes: int) -> Episodes:
    sink = Sink()
    expert = get_task(task).make_expert
    assert expert is not None
    sim = make_sim(task, SimOptions(num_envs=num_envs))
    collect(sim, expert(), sink, episodes=episodes)
    sim.close()
    return Episodes.from_list(sink.episodes, sim.spec.control_dt)


def assert_same(one: Episodes, other: Episodes) -> None:
    assert one.seeds.tolist() == other.seeds.tolist()
    assert all(np.array_equal(one.arrays[key], other.arrays[key]) for key in one.arrays)


def test_metaworld_expert_solves_its_task_and_seeds_determine_episodes() -> None:
    pytest.importorskip("metaworld")
    one, two = (demonstrations("metaworld/reach-v3", num_envs, 2) for num_envs in (1, 2))
    assert_same(one, two)
    assert one.success.all() and one.arrays["state"].shape[1] == 39
    goals = one.arrays["state"][one.starts, 36:]
    assert len(np.unique(goals, axis=0)) == 2


def test_pad_contacts_match_metaworld() -> None:
    pytest.importorskip("metaworld")
    from robopolicy_tasks.metaworld.env import MetaworldExpert, make_env, touching

    env, expert = make_env("push-v3", SimOptions()), MetaworldExpert("push-v3")
    simulator: Any = env.unwrapped
    found: list[tuple[bool, bool]] = []
    own, geoms = type(simulator).touching_object, range(simulator.model.ngeom)
    env.reset(seed=0)
    for _ in range(100):
        action = expert._policy.get_action(env.observation)
        _, _, terminated, truncated, _ = env.step(np.clip(action, -1, 1).astype(np.float32))
        found += [(own(simulator, geom), touching(simulator, geom)) for geom in geoms]
        if terminated or truncated:
            break
    assert all(bool(expected) == actual for expected, actual in found)
    assert 0 < sum(actual for _, actual in found) < len(found)


def test_metaworld_environment_equals_the_gymnasium_one() -> None:
    pytest.importorskip("metaworld")
    from robopolicy_tasks.metaworld.env import MetaworldExpert, make_env

    settings = {"env_name": "door-open-v3", "seed": 0, "max_episode_steps": 500, "disable_env_checker": True}
    reference: Any = gymnasium.make("Meta-World/MT1", terminate_on_success=True, **settings)
    made, sibling = (make_env("door-open-v3", SimOptions(reward="shaped")) for _ in range(2))
    policy = MetaworldExpert("door-open-v3")._policy
    for seed in (3, None):  # the simulator chooses the seed of the second episode
        if seed is not None:
            reference.unwrapped.seed(seed)
        obs, sibling_obs = reference.reset(seed=seed)[0], sibling.reset(seed=7)[0]
        assert np.array_equal(obs, made.reset(seed=seed)[0])
        assert not np.array_equal(obs, sibling_obs)  # environments share the benchmark, not the scene
        ended = False
        while not ended:
            action = np.clip(policy.get_action(obs), -1, 1).astype(np.float32)
            obs, reward, terminated, truncated, _ = reference.step(action)
            same_obs, *same, _ = made.step(action)
            assert np.array_equal(obs, same_obs) and same == [reward, terminated, truncated]
            ended = terminated or truncated
        assert terminated


def test_ogbench_oracle_solves_its_task_and_seeds_determine_episodes() -> None:
    pytest.importorskip("ogbench")
    one, two = (demonstrations("ogbench_collect/cube-single-v0", num_envs, 2) for num_envs in (1, 2))
    assert_same(one, two)
    assert one.success.all() and one.arrays["goal"].shape[1] == 4 + 1 + 3 + 1
    cube, target = one.arrays["state"][-1, 19:22] / 10 + [0.425, 0, 0], one.arrays["goal"][-1, 5:8]
    assert np.linalg.norm(cube - target) < 0.06  # 4 cm at the end of the last step


@pytest.mark.usefixtures(scaled.__name__)
@pytest.mark.parametrize(
    ("task", "package"), [("metaworld/reach-v3", "metaworld"), ("push_t/near", "gym_pusht"), ("lift", "mujoco")]
)
def test_expert_runs_with_wrappers_that_add_observations(task: str, package: str) -> None:
    pytest.importorskip(package)
    expert = get_task(task).make_expert
    assert expert is not None
    sim = make_sim(task, SimOptions(num_envs=1, wrappers=(WrapperSpec("scaled"),)))
    assert evaluate(ExpertActor(expert()), sim, episodes=1).success is not None
    assert collect(sim, expert(), Sink(), episodes=1).kept == 1


def test_ogbench_compiles_models_once_and_environments_do_not_share_them(monkeypatch) -> None:
    pytest.importorskip("ogbench")
    from robopolicy_tasks.ogbench import env as ogbench_env

    monkeypatch.setattr(ogbench_env, "_compiled", {})
    first, second = (ogbench_env.OGBenchEnv("cube-single-v0") for _ in range(2))
    assert len(ogbench_env._compiled) == 2  # the scene and the arm of the inverse kinematics
    models = [env.unwrapped.model for env in (first, second)]  # type: ignore[attr-defined]
    models[0].geom_rgba[:] = 0.0  # OGBench recolours its model in place
    assert models[0] is not models[1] and bool(models[1].geom_rgba.any())
    for env in (first, second):
        env.close()


def test_every_metaworld_policy_has_a_task() -> None:
    policies = pytest.importorskip("metaworld.policies")
    from robopolicy_tasks.metaworld import TASKS

    assert {f"{task}-v3" for task in TASKS} == set(policies.ENV_POLICY_MAP)


def test_a_missing_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr("robopolicy_tasks.optional_envs.import_module", missing)
    with pytest.raises(UserError, match=r"pip install --no-deps metaworld==3\.1\.1"):
        make_sim("metaworld/reach-v3")


def test_registering_imports_no_package() -> None:
    code = (
        "import sys, robopolicy_tasks; robopolicy_tasks.register_tasks(); "
        "print({'metaworld', 'ogbench', 'mujoco'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_options_that_a_package_lacks_are_refused() -> None:
    with pytest.raises(UserError, match="camera"):
        make_sim("metaworld/reach-v3", SimOptions(cameras=("nowhere",)))
    with pytest.raises(UserError, match="reward"):
        make_sim("ogbench_collect/cube-single-v0", SimOptions(reward="shaped"))
