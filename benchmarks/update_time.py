"""Wall time per update of the on-policy fine-tuners, compared with DPPO: equal steps, network and epochs.

    python -m benchmarks.update_time --quick      # the narrow network, few turns, nothing written
    python -m benchmarks.update_time              # on an idle machine: 6 minutes

Every learner has the settings of its row in `benchmarks.finetune` (eight chunk decisions of 64 environments on lift,
ten epochs) and never stops early. It trains repeatedly on one rollout of its own untrained policy. An update is
everything after a rollout: advantages, and the steps of actor and critic. The learners alternate, so that a drift of
the machine's speed affects all. torch has one thread; the critic runs on a second one in parallel with the actor, as in
training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.common import print_result, write_result
from benchmarks.finetune.methods import METHODS
from benchmarks.finetune.tasks import TASKS
from benchmarks.sac_vs_sb3 import ratio
from robopolicy.training.build import RunComponents, build, resolve_config
from robopolicy.training.compose import compose_config

NOTES = [
    "The ratio is the median of the ratios paired by turn; its brackets are a 95 % bootstrap interval over the turns "
    "of one run."
]
PEER = "dppo"
LEARNERS = (  # rows of `benchmarks.finetune`
    PEER,
    *("reinflow-flow-1", "reinflow-flow-2", "reinflow", "reinflow-flow-10", "reinflow-shortcut-2", "flow_sde"),
    *("fpo", "fpo_pp", "awm", "policyflow"),
)
WIDTHS = (128, 512)  # of the three hidden layers: as in `benchmarks.finetune`, and as published
RAW = ("policy.normalization=identity", "policy.action_normalization=identity", "policy.action_clip=1.0")


def parts_of(name: str, width: int) -> RunComponents:
    """Learner and simulator of one row, around an untrained policy."""
    method, task = METHODS[name], TASKS["lift"]
    assert method.base is not None
    config = compose_config(
        [
            *(*method.choices, f"task={task.task}", *method.settings),
            *(*method.base.settings, f"policy.hidden=[{width},{width},{width}]", *RAW, *task.chunk),
            *(f"sim.num_envs={task.num_envs}", f"algorithm.num_steps={task.rollout // task.horizon}"),
            *("algorithm.target_kl=null", "algorithm.critic_warmup=0", "budget.updates=1000", "evaluation.episodes=0"),
        ]
    )
    return build(resolve_config(config))


def updates_of(parts: RunComponents) -> Callable[[], float]:
    """A function that trains on the same rollout again and returns the seconds."""
    rollout = parts.source.next(parts.algorithm)

    def update() -> float:
        start = time.perf_counter()
        parts.algorithm.update(rollout)
        return time.perf_counter() - start

    return update


def measure(width: int, learners: tuple[str, ...], turns: int) -> dict[str, list[float]]:
    """Seconds of every learner in every turn, after one warm-up turn."""
    made = {name: parts_of(name, width) for name in learners}
    updates = {name: updates_of(parts) for name, parts in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(turns + 1):
        for name, update in updates.items():
            taken = update()
            if turn:
                seconds[name].append(taken)
    for parts in made.values():
        parts.close()
    return seconds


def summarise(width: int, seconds: dict[str, list[float]]) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """Rows and figures of one width: median times, and paired ratios to the peer's."""
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {}
    for name, taken in seconds.items():
        share = ratio(taken, seconds[PEER])
        figures[name] = {"seconds": median(taken), "of_dppo": share}
        text = f"{share['value']:.2f}x [{share['low']:.2f}, {share['high']:.2f}]"
        rows.append({"width": width, "method": name, "ms per update": 1e3 * median(taken), "of DPPO's": text})
    return rows, figures


def main() -> None:
    """Measure both widths, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the narrow network, few turns, no results written")
    quick = parser.parse_args().quick
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {}
    for width in WIDTHS[: 1 if quick else None]:
        found, figures[f"width_{width}"] = summarise(width, measure(width, LEARNERS, 3 if quick else 15))
        rows += found
    print_result("update_time", rows, figures)
    if not quick:
        write_result("update_time", rows, figures, command="python -m benchmarks.update_time", notes=NOTES)


if __name__ == "__main__":
    main()
