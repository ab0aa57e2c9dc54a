"""Time of PPO on mjlab against rsl_rl's own runner: same environment, network, settings and machine.

    python -m benchmarks.rsl_rl --quick                  # cart-pole, one seed, 10 iterations, nothing written
    python -m benchmarks.rsl_rl                          # cart-pole to the end, Go1 for the time: 30 minutes
    python -m benchmarks.rsl_rl --device cuda --envs 4096

Both learners act in mjlab's own environment object. Its `step` and `reset` are timed; all other time counts as the
learner's, including adapters. The learners alternate seed by seed. torch has one thread; where it pays, our learner
computes the critic's gradient on a second thread, in parallel with the actor's. Therefore rsl_rl also runs with a
thread per core, which trains the same policies, and the ratio is relative to the faster of its two runs.

`benchmarks.rsl_rl_profile` splits the time of an update by operation.

Policies of the cart-pole are evaluated in the same simulator with their mean actions, to see that both learners learn;
`benchmarks.control` and `benchmarks.control_million` compare returns. The largest return is 50: mjlab multiplies a
reward of at most 1 by the step of 0.05 s, and an episode has 1000 steps. Go1 learns nothing in the few iterations that
fit on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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
from robopolicy.sim.backends.mjlab import make_mjlab, mjlab_config
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import core_count

NOTES = [
    "Brackets of times are the smallest and the largest of the seeds. `rsl_rl-all-cores` trains the same policies as "
    "`rsl_rl` with one thread per core; its row is for the times.",
    "Returns, with 95 % intervals over seeds, show that both learn; `control` compares returns. The largest possible "
    "return of the cart-pole is 50: 1000 steps of 0.05 s with a reward of at most 1 per second.",
    "Settings and network are mjlab's own for the task. Three rules differ: robopolicy normalises advantages per "
    "minibatch, clips the joint gradient of actor and critic, and uses Adam with eps 1e-5; rsl_rl normalises per "
    "rollout, clips both gradients separately, and uses eps 1e-8.",
]
EPISODES = 32  # of an evaluation
BOUND = 1e6  # of actions; rsl_rl leaves them unbounded
RETURNS = {"Mjlab-Cartpole-Balance": (0.0, 50.0)}  # evaluated environments -> smallest and largest return


@dataclass(frozen=True)
class Contest:
    """One environment."""

    env_id: str
    iterations: int
    seeds: int


CONTESTS = (
    Contest("Mjlab-Cartpole-Balance", iterations=60, seeds=3),
    Contest("Mjlab-Velocity-Flat-Unitree-Go1", iterations=6, seeds=3),
)


class Stopwatch:
    """Seconds spent inside functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, *names: str) -> None:
        """Time the methods `names` of the object `owner` from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += _now() - start

        return timed


@dataclass
class Trained:
    """Result of a training run."""

    act: Act  # mean actions
    simulating: float  # [s] per iteration
    updating: float  # [s] per iteration, gradient steps and advantages
    wall: float  # [s] per iteration

    @property
    def outside(self) -> float:
        """Time per iteration outside the simulator [s]."""
        return self.wall - self.simulating


def train_ours(contest: Contest, seed: int, num_envs: int, device: str, updating: Stopwatch | None = None) -> Trained:
    """Our PPO with mjlab's settings for the task; `updating` times its updates."""
    torch.manual_seed(seed)
    settings = mjlab_runner_settings(contest.env_id)
    theirs, actor, critic = settings["algorithm"], settings["actor"], settings["critic"]
    options = SimOptions(num_envs, device=device, exact_final_obs=device == "cpu")  # the default of `robopolicy train`
    sim = make_mjlab(contest.env_id, options, action_bound=BOUND)
    sizes = {key: value.shape[0] for key, value in sim.spec.observation.items()}
    spec = PolicySpec({"actor": (sizes["actor"],)}, sim.spec.action_dim)
    policy = GaussianPolicy(
        GaussianConfig(
            hidden=tuple(actor["hidden_dims"]),
            activation=actor["activation"],
            orthogonal_init=False,
            log_std_init=float(np.log(actor["distribution_cfg"]["init_std"])),
            normalization=_normalization(actor),
        ),
        spec,
    ).to(device)
    config = PPOConfig(
        num_steps=settings["num_steps_per_env"],
        gamma=theirs["gamma"],
        gae_lambda=theirs["lam"],
        epochs=theirs["num_learning_epochs"],
        batch_size=num_envs * settings["num_steps_per_env"] // theirs["num_mini_batches"],
        clip=theirs["clip_param"],
        lr=theirs["learning_rate"],
        lr_schedule=theirs["schedule"],
        target_kl=theirs["desired_kl"],
        entropy_coef=theirs["entropy_coef"],
        value_coef=theirs["value_loss_coef"],
        value_clip=theirs["clip_param"] if theirs["use_clipped_value_loss"] else 0.0,
        grad_clip=theirs["max_grad_norm"],
        normalize_reward=False,
        critic=ValueConfig(
            hidden=tuple(critic["hidden_dims"]),
            activation=critic["activation"],
            orthogonal_init=False,
            normalization=_normalization(critic),
            privileged_obs={"critic": sizes["critic"]},
        ),
        seed=seed,
    )
    with torch.device(device):
        algorithm = PPO(config, policy, total_updates=contest.iterations)
    sampler = RolloutSampler(ChunkedSim(sim, gamma=algorithm.step_discount), decisions=config.num_steps, seed=seed)
    simulating, updating = Stopwatch(), updating or Stopwatch()
    simulating.around(sim.env, "step", "reset")
    updating.around(algorithm, "update")
    start = _now()
    for _ in range(contest.iterations):
        algorithm.update(sampler.collect(algorithm.act))
    wall = _now() - start
    sim.close()

    def act(obs: Mapping[str, Tensor]) -> Tensor:
        return policy.act({"actor": obs["actor"][:, None]}, deterministic=True)[:, 0]

    return _per_iteration(contest, act, simulating, updating, wall)


def train_theirs(contest: Contest, seed: int, num_envs: int, device: str, updating: Stopwatch | None = None) -> Trained:
    """rsl_rl's runner with mjlab's settings for the task; `updating` times its updates."""
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
    from tensordict import TensorDict

    torch.manual_seed(seed)
    config = mjlab_config(contest.env_id, num_envs)
    config.seed = seed
    with contextlib.redirect_stdout(io.StringIO()):
        env = ManagerBasedRlEnv(config, device=device)
        runner = MjlabOnPolicyRunner(RslRlVecEnvWrapper(env), mjlab_runner_settings(contest.env_id), None, device)
        simulating, updating = Stopwatch(), updating or Stopwatch()
        simulating.around(env, "step", "reset")
        updating.around(runner.alg, "compute_returns", "update")
        start = _now()
        runner.learn(contest.iterations)
        wall = _now() - start
    env.close()
    policy = runner.get_inference_policy()

    def act(obs: Mapping[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            return policy(TensorDict(dict(obs), batch_size=[len(obs["actor"])]))

    return _per_iteration(contest, act, simulating, updating, wall)


def train_theirs_on_all_cores(contest: Contest, seed: int, num_envs: int, device: str) -> Trained:
    """rsl_rl's runner with one torch thread per core."""
    torch.set_num_threads(core_count())
    try:
        return train_theirs(contest, seed, num_envs, device)
    finally:
        torch.set_num_threads(1)


OURS = "robopolicy"
ALL_CORES = "rsl_rl-all-cores"  # the same policies as rsl_rl, for the times
LEARNERS = {OURS: train_ours, "rsl_rl": train_theirs, ALL_CORES: train_theirs_on_all_cores}


def main() -> None:
    """Run every missing cell, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="cart-pole, one seed, 10 iterations, no results written")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--envs", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contests = (Contest(CONTESTS[0].env_id, 10, 1),) if arguments.quick else CONTESTS
    kind = torch.device(arguments.device).type
    cells: list[dict[str, Any]] = []
    for contest in contests:
        for train in LEARNERS.values():  # kernels are compiled when an environment is first built
            train(Contest(contest.env_id, 1, 1), 0, arguments.envs, arguments.device)
        for seed in range(contest.seeds):
            for learner, train in LEARNERS.items():
                name = f"rsl_rl/{learner}-{contest.env_id}-{kind}-{arguments.envs}-{seed}"
                cell = None if arguments.quick else load_cell(name)
                if cell is None:
                    cell = {"learner": learner, "env_id": contest.env_id, "seed": seed, "envs": arguments.envs}
                    cell |= _run(train, contest, seed, arguments.envs, arguments.device)
                    if not arguments.quick:
                        save_cell(name, cell)
                print(
                    f"{contest.env_id} seed {seed} {learner}: {cell['outside']:.3f} s outside, return {cell['return']}"
                )
                cells.append(cell)
    rows, figures = summarise(cells)
    name = "rsl_rl" if kind == "cpu" else f"rsl_rl_{kind}"
    print_result(name, rows, figures, cells=cells)
    if not arguments.quick:
        command = f"python -m benchmarks.rsl_rl --device {kind} --envs {arguments.envs}"
        write_result(name, rows, figures, command=command, notes=NOTES, cells=cells)


def summarise(cells: list[dict[str, Any]]) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """Table rows, and the ratio of our time outside the simulator to the faster rsl_rl run, paired by seed."""
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {}
    for env_id in dict.fromkeys(cell["env_id"] for cell in cells):
        runs = {name: [c for c in cells if c["env_id"] == env_id and c["learner"] == name] for name in LEARNERS}
        turns = zip(*runs.values(), strict=True)
        ratios = [ours["outside"] / min(cell["outside"] for cell in theirs) for ours, *theirs in turns]
        entry: dict[str, Any] = {
            "outside_ratio": {"value": float(np.median(ratios)), "low": min(ratios), "high": max(ratios)},
            "seeds": len(ratios),
        }
        for name, found in runs.items():
            typical = {key: float(np.median([c[key] for c in found])) for key in ("simulating", "updating", "outside")}
            returns = [c["return"] for c in found if c["return"] is not None and name != ALL_CORES]
            score = runs_iqm(returns).within(*RETURNS[env_id]) if len(returns) > 1 else None
            entry[name] = typical | (
                {} if score is None else {"iqm": score.estimate, "low": score.low, "high": score.high}
            )
            rows.append(
                {
                    "environment": env_id,
                    "envs": found[0]["envs"],
                    "learner": name,
                    "seeds": len(found),
                    "return, IQM [95 %]": "-" if score is None else f"{score:.0f}",
                    "simulating [s]": round(typical["simulating"], 3),
                    "rest of the rollout [s]": round(typical["outside"] - typical["updating"], 3),
                    "updating [s]": round(typical["updating"], 3),
                    "time outside of the simulator / rsl_rl": f"{entry['outside_ratio']['value']:.2f} "
                    f"[{min(ratios):.2f}, {max(ratios):.2f}]"
                    if name == OURS
                    else "-",
                }
            )
        figures[env_id] = entry
    return rows, figures


def _run(train: Callable[..., Trained], contest: Contest, seed: int, num_envs: int, device: str) -> dict[str, Any]:
    trained = train(contest, seed, num_envs, device)
    score = None
    if contest.env_id in RETURNS:
        options = SimOptions(EPISODES, device=device)
        with contextlib.closing(make_mjlab(contest.env_id, options, action_bound=BOUND)) as sim:
            score = mean_return(trained.act, sim)
    fields = {key: value for key, value in asdict(trained).items() if key != "act"}
    return {**fields, "outside": trained.outside, "return": score, "made_on": made_on()}


def _per_iteration(contest: Contest, act: Act, simulating: Stopwatch, updating: Stopwatch, wall: float) -> Trained:
    seconds = (simulating.seconds, updating.seconds, wall)
    return Trained(act, *(value / contest.iterations for value in seconds))


def mjlab_runner_settings(env_id: str) -> dict[str, Any]:
    """Mjlab's settings for rsl_rl's runner."""
    import mjlab.tasks  # noqa: F401 - registers the environments
    from mjlab.tasks.registry import load_rl_cfg

    return asdict(load_rl_cfg(env_id))


def _normalization(model: Mapping[str, Any]) -> str:
    return "running" if model["obs_normalization"] else "identity"


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
