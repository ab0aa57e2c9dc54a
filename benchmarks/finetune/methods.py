"""Rows of the table: presets, and the base policies that they fine-tune.

The presets `fine_tune` and `offline_to_online` and the settings here were chosen with seed 0, which the table does not
use; all tasks use the same settings. Learners from replay have two rows: one with about the cost of an on-policy run,
and `NAME-published` with the published ensembles, candidates and critic steps per decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import yaml

from benchmarks.finetune.tasks import MAIN, TASKS
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.resources import folder


@dataclass(frozen=True)
class Base:
    """A cloned policy to start from."""

    name: str
    settings: tuple[str, ...]  # head and sampler
    kind: str = "flow"  # of head, which sets the number of demonstrations
    updates: int = 2000  # of cloning


SMALL = "policy.hidden=[128,128,128]"  # learners from replay call the base for every batch
FLOW = Base("flow", ("policy=flow", SMALL))
FLOW_1 = Base("flow-1", ("policy=flow", SMALL, "policy.steps=1"))
FLOW_2 = Base("flow-2", ("policy=flow", SMALL, "policy.steps=2"))
FLOW_10 = Base("flow-10", ("policy=flow", SMALL, "policy.steps=10"))
SHORTCUT_2 = Base("shortcut-2", ("policy=shortcut", SMALL, "policy.steps=2"))
MEANFLOW_1 = Base("meanflow-1", ("policy=meanflow", SMALL, "policy.steps=1"))
DIFFUSION = Base(
    "diffusion", ("policy=diffusion", SMALL, "policy.sampler=ddpm", "policy.steps=10"), "diffusion", updates=8000
)


BASES = {base.name: base for base in (FLOW, FLOW_1, FLOW_2, FLOW_10, SHORTCUT_2, MEANFLOW_1, DIFFUSION)}


LIFT = MAIN[:1]  # the task of methods that few users need
ARMS = tuple(task for task in TASKS if task != "hopper")
SEEDS, MANY_SEEDS = 5, 8
FROM_SCRATCH = 4  # a method without a base takes this many times the steps of the others


@dataclass(frozen=True)
class Method:
    """One row."""

    name: str
    algorithm: str  # its settings are in the preset
    base: Base | None = FLOW  # None: trained from scratch
    demonstrations: bool = False  # also learns from the demonstrations
    settings: tuple[str, ...] = ()  # on top of the preset
    tasks: tuple[str, ...] = LIFT
    doubled: tuple[str, ...] = ()  # tasks with twice the budget, at whose end its curves still rise
    first: bool = False  # users ask for it first

    def seeds(self, task: str) -> range:
        """Training seeds on a task."""
        return range(1, 1 + (MANY_SEEDS if self.first and task in LIFT else SEEDS))

    def budget_multiple(self, task: str) -> int:
        """Multiple of the steps that the task has for methods with its source of data."""
        return FROM_SCRATCH if self.base is None else 2 if task in self.doubled else 1

    @property
    def source(self) -> str:
        """Origin of its data: on_policy | group | replay."""
        return ALGORITHMS[self.algorithm].data_source

    @property
    def published(self) -> bool:
        """Whether it is the row with the published update ratio."""
        return self.name.endswith(PUBLISHED)

    @property
    def kind(self) -> str:
        """Name of its preset."""
        return "offline_to_online" if self.source == "replay" else "fine_tune"

    @property
    def choices(self) -> tuple[str, str]:
        """Choices of the experiment and the algorithm."""
        return f"experiment={self.kind}", f"algorithm={self.algorithm}"

    def preset(self) -> dict[str, Any]:
        """Settings of its preset, which cells record."""
        path = folder("configs") / "settings" / self.kind / f"{self.algorithm}.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8"))


PUBLISHED = "-published"
FREQUENT = ("algorithm.epochs=10",)  # the presets use 800,000 steps; with fewer steps, more epochs help
SMALL_STEPS = ("algorithm.lr=1e-4", "algorithm.lr_final=3e-5", "algorithm.batch_size=256")  # four times as many
ENSEMBLE = "algorithm.critic.members=10"
DECISION = 4  # control steps per decision on the tasks of these rows: one critic step per control step
RATIOS = {
    "dsrl_sac": ("algorithm.utd=5", ENSEMBLE),
    "dsrl_na": ("algorithm.utd=5", ENSEMBLE),
    "pa_rl": (
        *(f"algorithm.utd={DECISION}", ENSEMBLE),
        *("algorithm.candidates=32", "algorithm.top=10", "algorithm.ascent_steps=10"),
    ),
    "expo": ("algorithm.utd=20", "algorithm.policy_delay=20", ENSEMBLE, "algorithm.candidates=8", "algorithm.edits=8"),
    "qc": (f"algorithm.utd={DECISION}", "algorithm.candidates=32"),
    "dqc": (f"algorithm.utd={DECISION}", "algorithm.candidates=32"),
    "fql": (f"algorithm.utd={DECISION}",),
    "idql": (f"algorithm.utd={DECISION}", "algorithm.candidates=32"),
    "rlpd": ("algorithm.utd=20", "algorithm.policy_delay=20", ENSEMBLE),
}
"""Published critic steps per decision, ensembles and candidates."""


def _reinflow(base: Base, low: float, high: float) -> Method:
    """ReinFlow on a head with another number of calls and the total noise of the preset's four calls."""
    noise = (f"algorithm.noise.std_min={low}", f"algorithm.noise.std_max={high}")
    return Method(f"reinflow-{base.name}", "reinflow", base, settings=(*FREQUENT, *SMALL_STEPS, *noise))


def _as_published(method: Method) -> Method:
    """The row with the published update ratio."""
    settings = (*method.settings, *RATIOS[method.algorithm])
    return replace(method, name=f"{method.name}{PUBLISHED}", settings=settings, tasks=LIFT, first=False)


def _methods() -> tuple[Method, ...]:
    one_call, two_calls = (0.16, 0.32), (0.12, 0.24)
    heads = (
        *((FLOW_1, *one_call), (FLOW_2, *two_calls), (FLOW_10, 0.08, 0.16)),
        *((SHORTCUT_2, *two_calls), (MEANFLOW_1, *one_call)),
    )
    replay = (
        Method("dsrl_na", "dsrl_na", tasks=MAIN, first=True),
        Method("expo", "expo", demonstrations=True, tasks=MAIN, first=True),
        Method("fql", "fql", demonstrations=True, tasks=MAIN, first=True),
        Method("rlpd", "rlpd", None, demonstrations=True, settings=("policy=squashed_gaussian",), tasks=MAIN),
        Method(
            "pa_rl", "pa_rl", demonstrations=True, settings=("algorithm.batch_size=128",), tasks=MAIN[:2], first=True
        ),
        Method("qc", "qc", demonstrations=True, tasks=MAIN[:2]),
        Method("dsrl_sac", "dsrl_sac"),
        Method("dqc", "dqc", demonstrations=True),
        Method("idql", "idql", demonstrations=True),
    )
    return (
        Method("reinflow", "reinflow", settings=(*FREQUENT, *SMALL_STEPS), tasks=tuple(TASKS), first=True),
        Method("dppo", "dppo", DIFFUSION, settings=FREQUENT, tasks=tuple(TASKS), doubled=LIFT, first=True),
        Method("flow_sde", "flow_sde", settings=FREQUENT, tasks=ARMS),
        Method("fpo_pp", "fpo_pp", settings=FREQUENT, tasks=ARMS, doubled=(*LIFT, "pick_place")),
        *(Method(name, name, settings=FREQUENT) for name in ("fpo", "awm")),
        Method("policyflow", "policyflow", doubled=LIFT),
        *(Method(name, name) for name in ("ac_flow", "flow_grpo", "gorl")),
        *replay,
        Method("dsrl_na-diffusion", "dsrl_na", DIFFUSION),
        *(_reinflow(*head) for head in heads),
        *map(_as_published, replay),
    )


METHODS = {method.name: method for method in _methods()}


def notes() -> list[str]:
    """Lines below the table."""
    return [
        "Tasks: the on-policy methods that users ask for first run on all, the other methods of general use on the "
        "first two or three, the rest on lift.",
        "Bases: clones of a few demonstrations of the scripted expert. For each seed, a search finds the number with "
        "which the clone succeeds in 40 to 70 % of 100 other episodes, or comes closest; in the held-out episodes it "
        "can lie outside.",
        "Budgets: 450,000 environment steps on-policy, 1,500,000 on pick_place; twice as many for DPPO and PolicyFlow "
        "on lift, and FPO++ on both, because their curves still rise there. "
        "Learners from replay take 60,000 (120,000) and one critic step per four of them; RLPD, which has no base, "
        "takes four times as many. "
        f"Rows `NAME{PUBLISHED}` take half of that, with the published critic steps per decision, ensembles and "
        "candidates.",
    ]
