"""One cell: a learner trained from scratch with one seed, and its evaluation."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pendulum.tasks import NOISY, PLAIN, register
from benchmarks.study import learning_curve
from benchmarks.themes import contributed
from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.sac import SAC
from robopolicy.evaluation.actors import Actor, as_actor
from robopolicy.evaluation.frequency import ActionRepeatActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import Policy
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.compose import compose_config
from robopolicy.training.runs import resume_run, start_run

EPISODES = 50
HELD_OUT = 50_000  # first held-out seed
STEPS = 200  # of an episode
HOLDS = (1, 4, 8, 16)  # control steps for which an action is held
EVERY = 500  # environment steps between two points of the curve
CURVE_SEED = 10_000
ENV_STEPS = 8_000


@dataclass(frozen=True)
class Row:
    """A learner with its own settings."""

    algorithm: str
    policy: str = "squashed_gaussian"
    task: str = PLAIN
    settings: tuple[str, ...] = ()


TWO = (
    *("sim.num_envs=2", "algorithm.num_steps=40", "algorithm.batch_size=64"),  # 80 steps per update
    *("policy.hidden=[64,64]", "algorithm.critic.hidden=[64,64]", "algorithm.lr=1e-3", "algorithm.critic_lr=1e-3"),
)
ROWS = {
    "sac": Row("sac"),
    "sac-noisy": Row("sac", task=NOISY),
    "sac-two": Row("sac", settings=TWO),
    "sac-two-ray": Row("sac", settings=(*TWO, "sim.num_workers=2", "sim.worker_backend=ray")),
    **{
        name: Row(**row | {"settings": tuple(row.get("settings", ()))})
        for name, row in contributed("pendulum", "rows").items()
    },
}
"""Row -> learner; contrib themes add rows by `[pendulum.rows]`, with the fields of `Row` as keys."""


def run_cell(row: Row, seed: int, folder: Path, env_steps: int) -> dict[str, Any]:
    """All figures of one learner with one seed; the run is in `folder` and resumes there."""
    register()
    run = folder / "run"
    if (run / "config.yaml").exists() and not (run / "report.json").exists():
        trainer = resume_run(run)
    else:  # an ended run lacks the critic, whose values are measured
        shutil.rmtree(run, ignore_errors=True)
        trainer = start_run(compose_config([*settings(row, seed, env_steps), f"out={folder}", f"name={run.name}"]))
    report = trainer.train()
    algorithm = trainer.algorithm
    assert isinstance(algorithm, OffPolicy)
    with closing(make_sim(PLAIN, SimOptions(num_envs=EPISODES))) as sim:
        return {
            "seconds": report["seconds"],
            **judge(algorithm.inference_policy(), sim),
            "bias": value_bias(algorithm, sim) if isinstance(algorithm, SAC) else None,
            "curve": learning_curve(run, "return_mean"),
        }


def settings(row: Row, seed: int, env_steps: int) -> tuple[str, ...]:
    """Arguments of `robopolicy train`."""
    return (
        *(f"task={row.task}", f"policy={row.policy}", f"algorithm={row.algorithm}", "chunk.horizon=1"),
        *("chunk.action_horizon=1", "policy.normalization=identity", f"budget.env_steps={env_steps}", f"seed={seed}"),
        *("sim.num_envs=1", "algorithm.batch_size=256", "replay.learning_starts=200", "guards.restore_best=false"),
        *("evaluation.episodes=10", f"evaluation.seed={CURVE_SEED}", f"evaluation.every={EVERY}"),
        *row.settings,
    )


class Recorder(ActionRepeatActor):
    """An actor that records its chunks."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor, actor.action_horizon)
        self.chunks: list[Tensor] = []

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """The actor's chunks `(R, action_horizon, A)`."""
        self.chunks.append(super().__call__(sim, obs, rows, seeds, decisions))
        return self.chunks[-1]


def judge(policy: Policy, sim: VectorSim) -> dict[str, Any]:
    """Return, jerk and the returns of slower decisions, with deterministic actions."""
    with as_actor(policy, sim, deterministic=True) as actor:
        recorder = Recorder(actor)
        result = evaluate(recorder, sim, episodes=EPISODES, seed=HELD_OUT, policy_batch=EPISODES)
        held = {
            str(m): float(evaluate(ActionRepeatActor(actor, m), sim, episodes=EPISODES, seed=HELD_OUT).returns.mean())
            for m in HOLDS
        }
    played = torch.cat(recorder.chunks, 1)  # (N, T, A)
    assert played.shape[:2] == (EPISODES, STEPS)
    return {"return": float(result.returns.mean()), "jerk": jerk(played), "held": held}


def jerk(played: Tensor) -> float:
    """Sum over an episode of the second differences of actions `(N, T, A)`, averaged over episodes."""
    return float((played[:, 2:] - 2 * played[:, 1:-1] + played[:, :-2]).abs().sum((1, 2)).mean())


@torch.no_grad()
def value_bias(algorithm: SAC, sim: VectorSim) -> float:
    """Value of the first sampled actions minus their return: rewards, entropy and a final value of the critic.

    Values are `min_q`, as in the targets of the critic.
    """
    gamma, alpha = algorithm.config.gamma, float(algorithm.temperature.value)
    generator = torch.Generator().manual_seed(HELD_OUT)
    played = ChunkedSim(sim)
    obs = played.reset(HELD_OUT)
    chunk, _ = algorithm.policy.rsample(obs, generator=generator)
    claimed = algorithm.critic.min_q(obs, chunk)
    earned = torch.zeros_like(claimed)
    for t in range(STEPS):
        step = played.step(chunk)
        earned += gamma**t * step.reward
        chunk, logp = algorithm.policy.rsample(step.final_obs, generator=generator)
        earned -= gamma ** (t + 1) * alpha * logp
    earned += gamma**STEPS * algorithm.critic.min_q(step.final_obs, chunk)
    return float((claimed - earned).mean())
