"""One cell: a learner trained from scratch on one task with one seed, its curve, and its held-out evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.control.methods import Family, Method
from benchmarks.control.tasks import ControlTask
from benchmarks.study import learning_curve, read_report, train_to_end
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.guards import TrainingDiverged
from robopolicy.training.make_source import FIRST_EPISODE

EPISODES = 50
HELD_OUT = 50_000  # first held-out seed; training evaluates from seed 10000 and collects from seed 1000000
CURVE_EPISODES = 10  # of each of the ten evaluations during training
CURVE_SEED = 10_000

Point = tuple[int, float]  # environment steps, mean return


def run_cell(method: Method, task: ControlTask, seed: int, folder: Path) -> dict[str, Any]:
    """Return, learning curve and seconds of one learner on one task with one seed.

    Our runs are in `folder` and resume there; Stable-Baselines3 starts again after an interruption.

    Raises:
        TrainingDiverged: A value is not finite.
    """
    learn = train_baseline if method.is_baseline else train_ours
    policy, curve, seconds = learn(method, task, seed, folder)
    with closing(make_sim(task.task, SimOptions(num_envs=EPISODES))) as sim:
        found = evaluate(policy, sim, episodes=EPISODES, seed=HELD_OUT).summary()
    return {"return": found["return_mean"], "curve": curve, "seconds": round(seconds, 1)}


def train_ours(method: Method, task: ControlTask, seed: int, folder: Path) -> tuple[Policy, list[Point], float]:
    """Last policy, learning curve and seconds of one of our learners.

    Raises:
        TrainingDiverged: A value is not finite.
    """
    run = folder / "run"
    last = train_to_end(run, *settings(method, task, seed))
    report = read_report(run)
    return load_policy(last)[0], learning_curve(run, "return_mean"), report["seconds"]


def settings(method: Method, task: ControlTask, seed: int) -> tuple[str, ...]:
    """Arguments of `robopolicy train` for one of our learners."""
    family = method.family
    return (
        *(f"task={task.task}", f"policy={method.policy or family.policy}", f"algorithm={method.name}"),
        *("chunk.horizon=1", "chunk.action_horizon=1", f"budget.env_steps={family.env_steps}", f"seed={seed}"),
        *(f"evaluation.episodes={CURVE_EPISODES}", f"evaluation.seed={CURVE_SEED}", "evaluation.max_fraction=0"),
        "guards.restore_best=false",
        *(*family.settings, *method.settings),
    )


def train_baseline(method: Method, task: ControlTask, seed: int, _: Path) -> tuple[Policy, list[Point], float]:
    """Last policy, learning curve and seconds of Stable-Baselines3, in the same simulator.

    Raises:
        TrainingDiverged: The policy's output is not finite.
    """
    from robopolicy.interop.sb3_actor import from_model
    from robopolicy.interop.stable_baselines3 import SimVecEnv

    family, start = method.family, time.perf_counter()
    with ExitStack() as stack:
        sim = stack.enter_context(closing(make_sim(task.task, SimOptions(num_envs=family.num_envs))))
        judge = stack.enter_context(closing(make_sim(task.task, SimOptions(num_envs=CURVE_EPISODES))))
        make = make_ppo if family.rollout else make_sac
        model = make(SimVecEnv(sim), family, FIRST_EPISODE * (1 + seed))  # also the seed of the first episode
        curve: list[Point] = []
        try:
            model.learn(family.env_steps, callback=_judge(judge, curve, family.env_steps // 10, from_model))
        except ValueError as error:  # torch's distributions raise it for non-finite parameters
            if "constraint" not in str(error):
                raise
            raise TrainingDiverged(f"Training diverged after {model.num_timesteps} steps.") from error
        return from_model(model), curve, time.perf_counter() - start


def make_ppo(env: Any, family: Family, seed: int) -> Any:
    """Stable-Baselines3's PPO with running normalisation of observations and rewards."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    sizes: dict[str, Any] = {"n_steps": family.rollout, "batch_size": family.batch_size}
    return PPO("MlpPolicy", VecNormalize(env), **sizes, seed=seed, device="cpu")


def make_sac(env: Any, family: Family, seed: int) -> Any:
    """Stable-Baselines3's SAC with one gradient step per environment step."""
    from stable_baselines3 import SAC

    sizes: dict[str, Any] = {
        "buffer_size": family.capacity,
        "batch_size": family.batch_size,
        "learning_starts": family.warmup,
    }
    sizes["policy_kwargs"] = {"net_arch": list(family.hidden)}
    return SAC("MlpPolicy", env, **sizes, train_freq=1, gradient_steps=-1, seed=seed, device="cpu")


def _judge(sim: VectorSim, curve: list[Point], every: int, policy_of: Callable[[Any], Policy]) -> Any:
    """Callback that evaluates the model every `every` environment steps, as `robopolicy train` does."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Judge(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps >= every * (len(curve) + 1):
                result = evaluate(policy_of(self.model), sim, episodes=CURVE_EPISODES, seed=CURVE_SEED)
                curve.append((self.num_timesteps, float(result.returns.mean())))
            return True

    return Judge()
