"""Profile of an update in our PPO and in rsl_rl's PPO, on the environments of `benchmarks.rsl_rl`.

    python -m benchmarks.rsl_rl_profile --quick      # the cart-pole alone, nothing written
    python -m benchmarks.rsl_rl_profile              # 2 minutes

Both learners run a few iterations with mjlab's settings and one torch thread; torch's profiler records the later
updates. Milliseconds of a kind of operation are summed over both of our threads (the second one computes the critic's
gradient), so the sum may exceed the wall time. Where the sum is smaller, the rest is Python and torch's dispatch. The
profiler itself adds time to small operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import print_result, write_result
from benchmarks.rsl_rl import CONTESTS, OURS, Contest, Stopwatch, train_ours, train_theirs

ENVS, WARM, WATCHED = 64, 2, 4  # environments; updates before profiling; profiled updates
KINDS = {  # by substring of the operation name; the first match counts
    "optimiser": ("adam", "optimizer"),
    "matrix products": ("mm", "addmv", "linear"),
    "activations": ("elu", "tanh", "sigmoid", "silu"),
    "copies and gathers": ("copy", "index", "cat", "gather", "select", "fill", "zero"),
}
OTHER = "other small operations"


class ProfiledUpdates(Stopwatch):
    """Profiles the later calls of `update`, without advantages, which rsl_rl computes separately."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.milliseconds = dict.fromkeys((*KINDS, OTHER), 0.0)  # per update

    def around(self, owner: Any, *names: str) -> None:
        """Profile `owner.update`."""
        update: Callable[..., Any] = owner.update

        def profiled(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls <= WARM:
                return update(*args, **kwargs)
            timed = self._timed(update)
            with profile(activities=[ProfilerActivity.CPU]) as found:
                result = timed(*args, **kwargs)
            for event in found.key_averages():
                self.milliseconds[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / WATCHED
            return result

        owner.update = profiled


def kind_of(operation: str) -> str:
    """The entry of `KINDS` for an operation."""
    name = operation.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def main() -> None:
    """Profile both learners on every environment, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the cart-pole, no results written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {}
    for contest in CONTESTS[: 1 if quick else None]:
        for learner, train in {OURS: train_ours, "rsl_rl": train_theirs}.items():
            watch = ProfiledUpdates()
            train(Contest(contest.env_id, WARM + WATCHED, 1), 0, ENVS, "cpu", watch)
            found = {"passing": 1e3 * watch.seconds / WATCHED, **watch.milliseconds}
            rounded = {f"{kind} [ms]": round(value, 1) for kind, value in found.items()}
            rows.append({"environment": contest.env_id, "learner": learner, **rounded})
            figures.setdefault(contest.env_id, {})[learner] = found
    print_result("rsl_rl_profile", rows, figures)
    if not quick:
        write_result("rsl_rl_profile", rows, figures, command="python -m benchmarks.rsl_rl_profile")


if __name__ == "__main__":
    main()
