"""Goals in hindsight: SAC with and without them on sparse rewards of Fetch (Andrychowicz et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import outcomes
from benchmarks.study import Cell, Contrast, Key, Score, Study, keys_named, learning_curve, read_report, train_to_end

SEEDS = range(5)
BASELINES = ("sac", "td3")  # without goals in hindsight
FLOW = (
    *("algorithm=fql", "algorithm.alpha=0.1", "policy=flow", "chunk.horizon=1", "chunk.action_horizon=1"),
    *("policy.normalization=identity", "policy.action_normalization=identity"),
)  # a weak pull to its own actions, of which no demonstrations exist
TD3 = ("algorithm=td3",)
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {  # row -> strategy and settings of the learner
    "sac": ("none", ()),
    "td3": ("none", TD3),
    "sac_her": ("future", ()),
    "sac_her_final": ("final", ()),
    "td3_her": ("future", TD3),
    "fql_her": ("future", FLOW),
}
EPISODES = 100
HELD_OUT = 50_000  # first held-out seed


@dataclass(frozen=True)
class GoalTask:
    """A task with goals, its budget and the rows that run on it."""

    name: str  # registered task
    env_steps: int
    target: float  # success that the best row should reach
    methods: tuple[str, ...] = tuple(METHODS)
    preset: str = "hindsight"


TASKS = {
    "reach": GoalTask("gymnasium_robotics/FetchReach-v4", 10_000, 0.95),
    "push": GoalTask("gymnasium_robotics/FetchPush-v4", 400_000, 0.8, ("sac", "td3", "td3_her"), "hindsight_objects"),
}


@dataclass(frozen=True)
class HER(Study):
    """Success at the last step of 100 held-out episodes with deterministic actions.

    `sac` and `td3` keep the goals of the episodes; `sac_her` learns four of five windows with a goal that a later state
    of the episode achieved, `sac_her_final` with the goal of its last state. `td3_her` and `fql_her` (a flow policy
    without demonstrations, compared with `sac`) do so as `sac_her` does. The presets were chosen with other seeds.
    """

    name = "her"
    question = "How much do goals in hindsight raise success on tasks with sparse goals?"
    priority = 20
    paired = False
    steps: int = 0  # environment steps in place of the tasks' own
    only: tuple[str, ...] = ()  # cells of the smoke test; empty: all

    @property
    def tasks(self) -> list[str]:
        """Tasks of Fetch."""
        return list(TASKS)

    @property
    def methods(self) -> list[str]:
        """Learners without and with goals in hindsight."""
        return list(METHODS)

    def cell_keys(self) -> list[Key]:
        """Every row of every task with five seeds, short tasks first."""
        every = [(method, name, seed) for name, task in TASKS.items() for seed in SEEDS for method in task.methods]
        return keys_named(every, self.only)

    def facts(self, key: Key, folder: Path) -> Cell:
        """Row, task, seed and budget."""
        method, task, seed = key
        return {"method": method, "task": task, "seed": seed, "env_steps": self._steps(str(task))}

    def trainings(self, key: Key) -> Mapping[str, Sequence[str]]:
        """Settings of the preset, the strategy and the learner."""
        task, (strategy, learner) = TASKS[str(key[1])], METHODS[str(key[0])]
        settings = (
            *(f"experiment={task.preset}", f"task={task.name}", f"replay.hindsight.strategy={strategy}"),
            *(f"budget.env_steps={self._steps(str(key[1]))}", f"seed={key[2]}", "evaluation.episodes=20"),
            *("evaluation.max_fraction=0", "guards.restore_best=false", *learner),
        )
        return {"run": settings}

    def run(self, key: Key, folder: Path) -> Cell:
        """Train and evaluate one row."""
        from robopolicy.evaluation.harness import evaluate
        from robopolicy.sim.registry import SimOptions, make_sim
        from robopolicy.training.checkpoint import load_policy

        task, run = TASKS[str(key[1])], folder / "run"
        last = train_to_end(run, *self.trainings(key)["run"])
        with closing(make_sim(task.name, SimOptions(num_envs=10, success_step="last"))) as sim:
            found = evaluate(load_policy(last)[0], sim, episodes=EPISODES, seed=HELD_OUT)
        report = read_report(run)
        return {"success": outcomes(found), "curve": learning_curve(run, "success"), "seconds": report["seconds"]}

    def scores(self, cell: Cell) -> list[Score]:
        """The success of the row."""
        measures = {"success": cell["success"]}
        return [Score(cell["method"], cell["task"], cell["seed"], measures, curve=cell["curve"], cell=cell)]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Goals in hindsight with the goals of the episodes: of the same learner where it runs, else of SAC."""
        if method in BASELINES or task not in TASKS:
            return ()
        same = method.partition("_")[0]
        return (Contrast(same if same in TASKS[task].methods else "sac", "success"),)

    def is_current(self, cell: Cell) -> bool:
        """Cells with another budget run again."""
        return cell["env_steps"] == self._steps(cell["task"])

    def describe(self, cell: Cell) -> str:
        """Success."""
        return f"success {sum(cell['success']) / len(cell['success']):.0%}"

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Budgets and targets."""
        return [
            f"{name}: {task.env_steps:,} environment steps with the preset `{task.preset}`; target {task.target:.0%}."
            for name, task in TASKS.items()
        ]

    def quick(self) -> HER:
        """FetchReach with few steps."""
        return HER(1500, ("sac-reach-0", "sac_her-reach-0"))

    def _steps(self, task: str) -> int:
        return self.steps or TASKS[task].env_steps


STUDY = HER()
