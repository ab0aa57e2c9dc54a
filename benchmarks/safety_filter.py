"""Processor time of a tick of the safety filter at 1 kHz for seven joints, and its limits over random commands.

    python -m benchmarks.safety_filter --quick      # 5,000 ticks per setting, nothing written
    python -m benchmarks.safety_filter              # 100,000 ticks per setting, about three minutes

Commands are random targets beyond the limits, new ones in two of three ticks, so that most ticks intervene; this is
harder than any policy. Every output must be within the limits of position, velocity, acceleration and jerk. Times are
processor times of the process, so that other processes do not count; the largest one contains interrupts of the system.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from benchmarks.common import print_result, write_result
from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import JointLimits

JOINTS, PERIOD = 7, 0.001
SETTINGS = {  # acceleration [rad/s^2] and jerk [rad/s^3]; position and velocity as for a Panda
    "Panda": (15.0, 7500.0),
    "low jerk": (15.0, 100.0),
    "low acceleration": (1.0, 100.0),
    "unlimited jerk": (15.0, np.inf),
    "unlimited acceleration": (np.inf, np.inf),
}


def limits(acceleration: float, jerk: float) -> JointLimits:
    """Limits of seven equal joints."""
    names = tuple(f"joint{number}" for number in range(1, JOINTS + 1))
    values = (-2.8, 2.8, 2.175, acceleration, jerk, np.inf)
    return JointLimits(names, *(np.full(JOINTS, value) for value in values))


def run(acceleration: float, jerk: float, ticks: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Times of all ticks [s], and the number of outputs beyond a limit."""
    bounds = limits(acceleration, jerk)
    safety, rng = SafetyFilter(bounds, FilterConfig(max_lead=10.0)), np.random.default_rng(seed)
    state, unknown = FilterState.at_rest(np.zeros(JOINTS)), np.full(JOINTS, np.nan)
    times, path = np.empty(ticks), np.zeros((ticks + 3, JOINTS))
    target = np.zeros(JOINTS)
    for tick in range(ticks):
        if tick % 200 == 0:
            target = rng.uniform(-4.0, 4.0, JOINTS)
        command = target if tick % 3 else rng.uniform(-4.0, 4.0, JOINTS)
        measured = JointMeasurement(tick * PERIOD, state.motion.position, unknown, unknown)
        start = time.process_time()
        path[tick + 3], state, _ = safety.step(command, state, measured, PERIOD)
        times[tick] = time.process_time() - start
    beyond = np.abs(path) > 2.8
    for order, limit in ((1, 2.175), (2, acceleration), (3, jerk)):
        change = np.abs(np.diff(path, order, axis=0)) / PERIOD**order
        beyond[order:] |= change > limit * (1 + 1e-6) + 1e-14 / PERIOD**order  # differences round
    return times, int(beyond.any(1).sum())


def main() -> int:
    """Print the table, and write the result unless it is a quick run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 ticks per setting, nothing written")
    ticks = 5_000 if parser.parse_args().quick else 100_000
    rows, figures = [], {}
    gc.freeze()
    for name, (acceleration, jerk) in SETTINGS.items():
        run(acceleration, jerk, 200)  # warms up
        times, beyond = run(acceleration, jerk, ticks)
        median, p99, p999 = (1e3 * float(value) for value in np.percentile(times, [50, 99, 99.9]))
        worst = 1e3 * float(times.max())
        found = {"p50_ms": median, "p99_ms": p99, "p999_ms": p999, "max_ms": worst, "beyond_limits": beyond}
        figures[name] = found
        columns = {"p50 [ms]": median, "p99 [ms]": p99, "p99.9 [ms]": p999, "maximum [ms]": worst}
        rows.append(
            {
                "limits": name,
                "ticks": ticks,
                **{key: f"{value:.3f}" for key, value in columns.items()},
                "beyond": beyond,
            }
        )
    print_result("safety_filter", rows, figures)
    if ticks == 100_000:
        note = "`beyond` counts ticks whose output exceeds a limit of position, velocity, acceleration or jerk."
        write_result("safety_filter", rows, figures, command="python -m benchmarks.safety_filter", notes=[note])
    return int(any(found["beyond_limits"] for found in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
