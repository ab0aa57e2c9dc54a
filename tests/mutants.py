"""Mutation run: apply one mutation to a loss, target, return, reward or mask, and check whether a test fails.

    python tests/mutants.py --files 'robopolicy/core/*' --sample 60 --seed 0

One process collects the tests of each row of `TABLE` and records which tests execute which lines. A fork per mutant
replaces the code of one function in memory, without changing files, and runs the tests of the changed line until the
first failure. Functions are mutated; their defaults and module constants are not. `tests/mutants.json` contains, per
file, the numbers of the last run and its survivors.
"""

import argparse
import fnmatch
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

sys.path[:0] = [str(Path(__file__).parent / "helpers")]
from mutations import Mutant, install, mutants_of  # noqa: E402

ALGORITHMS = "tests/algorithms"
RECIPES = "tests/contrib/text_catalogue/test_recipe_rewards.py"
TABLE: dict[str, tuple[str, ...]] = {
    **{
        f"robopolicy/core/{name}.py": ("tests/core",)
        for name in (
            *("returns", "advantage", "advantage_sources", "ratios", "surrogates", "aggregate", "regularizers"),
            *("objectives", "estimator", "group_statistics", "selection"),
        )
    },
    "robopolicy/critics/*.py": (
        "tests/critics",
        *(f"{ALGORITHMS}/test_{name}.py" for name in ("offline_critics", "bootstrap_targets", "regularized_td3")),
    ),
    "robopolicy/algorithms/*.py": (ALGORITHMS,),  # and algorithms/common: `*` matches `/`
    "robopolicy/policies/density.py": ("tests/policies", ALGORITHMS),
    "robopolicy/policies/heads/*.py": ("tests/policies",),
    "robopolicy/text/rollouts/*.py": ("tests/rollout", "tests/text/test_text_env.py"),
    "robopolicy/contrib/text_catalogue/reward_*.py": ("tests/contrib/text_catalogue/test_rewards.py", RECIPES),
    "tasks/robopolicy_tasks/velocity/rewards.py": (
        "tests/tasks/test_velocity.py",
        "tests/tasks/test_velocity_rewards.py",
    ),
    "tasks/robopolicy_tasks/manipulation/*.py": ("tests/tasks/test_manipulation.py",),
    "tasks/robopolicy_tasks/locomotion/*.py": ("tests/tasks/test_locomotion_parity.py",),
    "tasks/robopolicy_tasks/push_t/*.py": ("tests/tasks/test_push_t.py",),
    "tasks/robopolicy_tasks/text/*.py": ("tests/text/test_graded_tasks.py", "tests/text/test_verify.py"),
    "tasks/robopolicy_tasks/toy/*.py": ("tests/tasks/test_push.py",),
}
"""File patterns -> tests that cover the files; the first matching pattern applies."""


class Runner:
    """Runs mutants in forks of the process that collects the tests."""

    def __init__(self, mutants: Sequence[Mutant], seconds: float) -> None:
        """Store the mutants and the CPU time limit [s] for the tests of one mutant."""
        self.mutants, self.seconds = mutants, seconds
        self.lines: dict[tuple[str, int], list[str]] = defaultdict(list)  # line -> tests
        self.spent: dict[str, float] = {}  # test -> [s]
        self.sound: dict[str, bool] = {}  # failed test -> whether it passes alone on the unchanged code
        self.outcomes: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record the tests that execute each line, then run the mutants."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "lines.json"
            status = forked(lambda: self.record(session.items, file))
            if status:
                raise SystemExit(f"The tests could not be recorded (status {status}).")
            plain = json.loads(file.read_text())
            print(
                f"{len(plain['spent'])} tests recorded; left out, as they fail unchanged: {plain['failed'] or 'none'}"
            )
            self.spent = plain["spent"]
            for name, line, tests in plain["lines"]:
                self.lines[name, line] = tests
            items = {item.nodeid: item for item in session.items}
            killer = Path(folder) / "killer"
            for mutant in self.mutants:
                outcome = self.outcome(mutant, [items[name] for name in self.chosen(mutant)], killer)
                self.outcomes.append(outcome)
                print(f"{outcome:9} {mutant}", flush=True)
        return True

    def chosen(self, mutant: Mutant) -> list[str]:
        """Tests of the line within the time limit: one per test function first, then the others, fast before slow."""
        path = str(Path(mutant.file).resolve())  # a multi-line expression may have its code on an earlier line
        held = next(
            (self.lines[path, line] for line in range(mutant.line, mutant.start, -1) if (path, line) in self.lines), []
        )
        tests = sorted(held, key=lambda name: self.spent[name])
        turn: dict[str, int] = defaultdict(int)
        turns: list[tuple[int, int, str]] = []
        stem = f"test_{Path(mutant.file).stem}.py"
        for name in tests:
            function = name.partition("[")[0]
            turns.append((turn[function], stem not in name, name))
            turn[function] += 1
        kept, total = list[str](), 0.0
        for *_, name in sorted(turns, key=lambda entry: entry[:2]):
            total += self.spent[name]
            if total <= self.seconds or not kept:
                kept.append(name)
        return kept

    def record(self, items: Sequence[pytest.Item], file: Path) -> int:
        """Write the tests of every line and their CPU times, without tests that fail on the unchanged code."""
        files = {str(Path(mutant.file).resolve()) for mutant in self.mutants}
        hits: set[tuple[str, int]] = set()

        def local(frame: FrameType, event: str, _: object) -> Any:
            if event == "line":
                hits.add((frame.f_code.co_filename, frame.f_lineno))
            return local

        lines: dict[tuple[str, int], list[str]] = defaultdict(list)
        spent, failed = dict[str, float](), list[str]()
        for item, following in zip(items, [*items[1:], None], strict=True):
            hits.clear()
            sys.settrace(lambda frame, *_: local if frame.f_code.co_filename in files else None)
            start = time.process_time()
            reports = runtestprotocol(item, nextitem=following, log=False)
            sys.settrace(None)
            spent[item.nodeid] = time.process_time() - start
            if any(report.failed for report in reports):
                failed.append(item.nodeid)
            elif all(report.passed for report in reports):
                for hit in hits:
                    lines[hit].append(item.nodeid)
        plain = {"spent": spent, "failed": failed, "lines": [(*line, tests) for line, tests in lines.items()]}
        file.write_text(json.dumps(plain))
        return 0

    def outcome(self, mutant: Mutant, items: Sequence[pytest.Item], killer: Path) -> str:
        """Outcome of a mutant; ignores tests that fail alone on the unchanged code."""
        if not items:
            return "uncovered"
        limit = 10.0 + 5.0 * sum(self.spent[item.nodeid] for item in items)
        code = forked(lambda: 2 if not install(mutant) else first_failure(items, killer), limit)
        if code == 1:
            failed = killer.read_text()
            self.sound[failed] = self.sound.get(failed) or not forked(
                lambda: first_failure([item for item in items if item.nodeid == failed], killer)
            )
            if not self.sound[failed]:
                return self.outcome(mutant, [item for item in items if item.nodeid != failed], killer)
        return {0: "survived", 2: "skipped"}.get(code, "killed")  # a child that exceeds its time has a negative code


def first_failure(items: Sequence[pytest.Item], file: Path) -> int:
    """Run tests until one fails: return 1 and write its name to a file; otherwise return 0."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
            file.write_text(item.nodeid)
            return 1
    return 0


def forked(work: Callable[[], int], limit: float = 0.0, *, quiet: bool = True) -> int:
    """Exit code of `work` in a fork, which is killed after `limit` seconds of CPU time; 0: unlimited."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if limit:
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 1))
                signal.alarm(10 * int(limit))  # [s] of wall time, if it hangs
            if quiet:
                silence = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silence, 1)
                os.dup2(silence, 2)
            code = work()
            sys.stdout.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(mutants: Sequence[Mutant], tests: Sequence[str], seconds: float) -> list[tuple[Mutant, str]]:
    """Each mutant and its outcome: killed, survived, uncovered (no test executes the line) or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"

        def work() -> int:
            runner = Runner(mutants, seconds)
            options = ["-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:warnings"]
            code = pytest.main([*options, "-m", "not gpu and not slow", *tests], plugins=[runner])
            file.write_text(json.dumps(runner.outcomes))
            return int(code)

        if forked(work, quiet=False):
            raise SystemExit("The tests cannot be collected; see above.")
        return list(zip(mutants, json.loads(file.read_text()), strict=True))


def summary(results: Sequence[tuple[Mutant, str]]) -> dict[str, Any]:
    """Per file: number of mutants, number of killed mutants, and the survivors by line."""
    entries: dict[str, Any] = {}
    for mutant, outcome in results:
        entry = entries.setdefault(mutant.file, {"mutants": 0, "killed": 0, "survivors": []})
        if outcome != "skipped":
            entry["mutants"] += 1
            entry["killed"] += outcome == "killed"
        if outcome in ("survived", "uncovered"):
            entry["survivors"].append(f"{mutant.line} {mutant.function}: {mutant.change} ({outcome})")
    return entries


def main() -> int:
    """Run the mutants of the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="*", help="pattern of paths, e.g. 'robopolicy/core/*'")
    parser.add_argument("--sample", type=int, default=0, help="number of randomly sampled mutants; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU time limit for the tests of one mutant")
    parser.add_argument("--out", default="tests/mutants.json", help="summary file; entries of other files stay")
    given = parser.parse_args()
    every: list[tuple[tuple[str, ...], Mutant]] = []
    for file in sorted(str(path) for folder in ("robopolicy", "tasks") for path in Path(folder).rglob("*.py")):
        row = next((tests for pattern, tests in TABLE.items() if fnmatch.fnmatch(file, pattern)), None)
        if row is not None and fnmatch.fnmatch(file, given.files):
            every += [(row, mutant) for mutant in mutants_of(file)]
    if given.sample:
        every = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    rows: dict[tuple[str, ...], list[Mutant]] = defaultdict(list)
    for row, mutant in every:
        rows[row].append(mutant)
    results = [result for row, mutants in rows.items() for result in run(mutants, row, given.seconds)]
    out = Path(given.out)
    entries = (json.loads(out.read_text()) if out.is_file() else {}) | summary(results)
    out.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
    outcomes = Counter(outcome for _, outcome in results)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
