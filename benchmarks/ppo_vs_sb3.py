"""Time of PPO against Stable-Baselines3's PPO: same environments, samples, hyper-parameters and machine.

    python -m benchmarks.ppo_vs_sb3 --quick      # one environment, one seed, 200k steps
    python -m benchmarks.ppo_vs_sb3              # HalfCheetah-v5 and Hopper-v5, 10 seeds each, about 35 minutes

Both learners get N environments, the same rollout length, minibatches, epochs, network, running observation and
reward normalisation. Seeds alternate between the two, so that a drift of the machine's speed affects both.
`wall_ratio` is our training time divided by Stable-Baselines3's. Our physics has one thread per core, and the critic a
second thread during the actor's gradient; Stable-Baselines3 has one thread. The final policies are evaluated on the
same 20 deterministic episodes, to see that both have learned; `benchmarks.control` and `benchmarks.control_million`
compare returns.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Act, load_cell, made_on, mean_return, print_result, runs_iqm, save_cell, write_result
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.critics.value import ValueConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Observation
from robopolicy.sim.registry import SimOptions, make_sim

NOTES = [
    "One million steps per run. Times are medians: our physics has one thread per core, and the critic a second one; "
    "Stable-Baselines3 has one thread. Their ratio is paired by seed; its brackets are the smallest and the largest of "
    "the seeds.",
    "Returns, with 95 % intervals over seeds, show that both learn; `control_million` compares them.",
]
TASKS = {"HalfCheetah-v5": "locomotion/half_cheetah", "Hopper-v5": "locomotion/hopper"}


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters both learners share."""

    steps: int = 1_000_000  # environment steps per run
    num_envs: int = 64
    rollout: int = 64  # steps per environment between updates
    batch_size: int = 1024
    epochs: int = 5
    lr: float = 1e-3
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    hidden: tuple[int, ...] = (64, 64)
    grad_clip: float = 0.5
    value_coef: float = 0.5
    episodes: int = 20  # of the final evaluation


def train_ours(env_id: str, seed: int, settings: Settings) -> tuple[Act, float]:
    """Train our PPO; returns the deterministic policy and the training seconds."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    sim = make_sim(TASKS[env_id], SimOptions(num_envs=settings.num_envs))
    spec = PolicySpec({"state": sim.spec.observation["state"].shape}, sim.spec.action_dim)
    policy = GaussianPolicy(GaussianConfig(hidden=settings.hidden, normalization="running"), spec)
    config = PPOConfig(
        num_steps=settings.rollout,
        gamma=settings.gamma,
        gae_lambda=settings.lam,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        clip=settings.clip,
        lr=settings.lr,
        grad_clip=settings.grad_clip,
        value_coef=settings.value_coef,
        critic=ValueConfig(hidden=settings.hidden, normalization="running"),
        seed=seed,
    )
    updates = settings.steps // (settings.num_envs * settings.rollout)
    algorithm = PPO(config, policy, total_updates=updates)
    chunked = ChunkedSim(sim, gamma=algorithm.step_discount)
    sampler = RolloutSampler(chunked, decisions=settings.rollout, seed=seed * 1_000_000)
    for _ in range(updates):
        algorithm.update(sampler.collect(algorithm.act))
    seconds = time.perf_counter() - start
    sim.close()
    return lambda obs: policy.act({"state": obs["state"][:, None]}, deterministic=True)[:, 0], seconds


def train_sb3(env_id: str, seed: int, settings: Settings) -> tuple[Act, float]:
    """Train Stable-Baselines3's PPO with `VecNormalize`; returns policy and training seconds."""
    from stable_baselines3 import PPO as SB3PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    start = time.perf_counter()
    env = VecNormalize(make_vec_env(env_id, n_envs=settings.num_envs, seed=seed), gamma=settings.gamma)
    model = SB3PPO(
        "MlpPolicy",
        env,
        n_steps=settings.rollout,
        batch_size=settings.batch_size,
        n_epochs=settings.epochs,
        learning_rate=settings.lr,
        gamma=settings.gamma,
        gae_lambda=settings.lam,
        clip_range=settings.clip,
        max_grad_norm=settings.grad_clip,
        vf_coef=settings.value_coef,
        policy_kwargs={"net_arch": list(settings.hidden)},
        seed=seed,
        device="cpu",
    )
    model.learn(settings.steps // (settings.num_envs * settings.rollout) * settings.num_envs * settings.rollout)
    seconds = time.perf_counter() - start

    def act(obs: Observation) -> Tensor:
        actions, _ = model.predict(np.asarray(env.normalize_obs(obs["state"].numpy())), deterministic=True)
        return torch.as_tensor(actions)

    return act, seconds


LEARNERS = {"robopolicy": train_ours, "stable-baselines3": train_sb3}


def main() -> None:
    """Run every missing cell, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="HalfCheetah, one seed, 200k steps, no results written")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(steps=200_000) if arguments.quick else Settings()
    tasks = ["HalfCheetah-v5"] if arguments.quick else list(TASKS)
    seeds = range(1 if arguments.quick else arguments.seeds)
    for train in LEARNERS.values():  # warm-up: imports and model files are not training time
        for env_id in tasks:
            train(env_id, 0, replace(settings, steps=settings.num_envs * settings.rollout))
    cells: list[dict[str, Any]] = []
    for env_id in tasks:
        for seed in seeds:
            for learner, train in LEARNERS.items():
                name = f"ppo_vs_sb3/{learner}-{env_id}-{seed}"
                cell = None if arguments.quick else load_cell(name)
                if cell is None:
                    act, seconds = train(env_id, seed, settings)
                    with closing(make_sim(TASKS[env_id], SimOptions(settings.episodes))) as sim:
                        score = mean_return(act, sim)
                    cell = {"learner": learner, "task": env_id, "seed": seed, "return": score, "seconds": seconds}
                    cell["made_on"] = made_on()
                    if not arguments.quick:
                        save_cell(name, cell)
                print(f"{env_id} seed {seed} {learner}: return {cell['return']:.0f}, {cell['seconds']:.1f} s")
                cells.append(cell)
    rows, figures = summarise(cells, tasks, settings)
    print_result("ppo_vs_sb3", rows, figures, cells=cells)
    if not arguments.quick:
        write_result("ppo_vs_sb3", rows, figures, command="python -m benchmarks.ppo_vs_sb3", notes=NOTES, cells=cells)


def summarise(
    cells: list[dict[str, Any]], tasks: list[str], settings: Settings
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Table rows (per task and learner) and the figures: IQM with intervals and paired wall-time ratios."""
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {"settings": asdict(settings)}
    for task in tasks:
        chosen = {name: [c for c in cells if c["task"] == task and c["learner"] == name] for name in LEARNERS}
        ratios = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(*chosen.values(), strict=True)]
        entry: dict[str, Any] = {
            "wall_ratio": {"value": float(np.median(ratios)), "low": min(ratios), "high": max(ratios)},
            "seeds": len(ratios),
        }
        for name, runs in chosen.items():
            score = runs_iqm([run["return"] for run in runs])
            entry[name] = {"iqm": score.estimate, "low": score.low, "high": score.high}
            rows.append(
                {
                    "task": task,
                    "learner": name,
                    "seeds": len(runs),
                    "return, IQM [95 %]": f"{score.estimate:.0f} [{score.low:.0f}, {score.high:.0f}]",
                    "seconds, median": round(float(np.median([run["seconds"] for run in runs])), 1),
                    "of Stable-Baselines3's": "{value:.2f}x [{low:.2f}, {high:.2f}]".format(**entry["wall_ratio"])
                    if name == "robopolicy"
                    else "-",
                }
            )
        figures[task] = entry
    figures["wall_ratio"] = float(np.median([figures[task]["wall_ratio"]["value"] for task in tasks]))
    return rows, figures


if __name__ == "__main__":
    main()
