"""Success of the scripted experts of the Panda's tasks and the volleyball drills: 200 episodes each.

python -m benchmarks.experts --quick      # 10 episodes each, nothing written
python -m benchmarks.experts              # a minute
"""

from __future__ import annotations

import argparse
from contextlib import closing

from benchmarks.common import print_result, write_result
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.intervals import wilson
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASKS = (
    *("manipulation/lift", "manipulation/pick_place", "manipulation/drawer"),
    *("volley/bump", "volley/hit", "volley/pass"),
)
EPISODES = 200


def measure(task: str, episodes: int) -> dict[str, object]:
    """One row: success of the expert with its interval (Wilson), and the mean length of an episode."""
    with closing(make_sim(task, SimOptions(num_envs=32))) as sim:
        summary = evaluate(ExpertActor(get_task(task).require_expert()()), sim, episodes=episodes).summary()
    success = wilson(round(summary["success"] * episodes), episodes)
    return {
        "task": task,
        "episodes": episodes,
        "success [95 %]": f"{success:.1%}",
        "mean steps": round(summary["length_mean"]),
    }


def main() -> None:
    """Measure all experts, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 episodes each, nothing written")
    quick = parser.parse_args().quick
    rows = [measure(task, 10 if quick else EPISODES) for task in TASKS]
    print_result("experts", rows, {})
    if not quick:
        write_result("experts", rows, {}, command="python -m benchmarks.experts")


if __name__ == "__main__":
    main()
