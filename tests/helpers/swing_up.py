"""A check that off-policy learners swing a pendulum up; `benchmarks.pendulum` runs it at full size."""

import json
from pathlib import Path

from robopolicy.training.compose import compose_config
from robopolicy.training.runs import start_run

SMALL = (
    *("policy.hidden=[64,64]", "algorithm.critic.hidden=[64,64]", "algorithm.batch_size=128"),
    *("algorithm.lr=1e-3", "algorithm.critic_lr=1e-3", "policy.normalization=identity"),
)


def check_swings_up_and_holds(algorithm: str, out: Path, env_steps: int = 4500) -> None:
    """Training reaches a high return: hanging costs 1,200 to 1,600, random actions 1,200, the best controller 140."""
    run = ("task=gymnasium/Pendulum-v1", "policy=squashed_gaussian", f"algorithm={algorithm}", *SMALL)
    steps = ("chunk.horizon=1", "chunk.action_horizon=1", "sim.num_envs=1", "replay.learning_starts=200")
    ends = (f"budget.env_steps={env_steps}", "evaluation.every=500", "evaluation.episodes=20")
    trainer = start_run(compose_config([*run, *steps, *ends, f"out={out}", "name=run"]))
    trainer.train()
    rows = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    returns = [row["eval/return_mean"] for row in rows if "eval/return_mean" in row]
    assert returns[0] < -1000 and max(returns) > -250 and returns[-1] > -300, returns
