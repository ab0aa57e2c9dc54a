"""Rows of the table: presets, and the base policies that they fine-tune.

The presets `fine_tune` and `offline_to_online` and the settings here were chosen on lift with seed 0, which the table
does not use; the other tasks use the same settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from robopolicy.algorithms.registry import ALGORITHMS


@dataclass(frozen=True)
class Base:
    """A cloned policy to start from."""

    name: str
    settings: tuple[str, ...]  # head and sampler


SMALL = "policy.hidden=[128,128,128]"  # replay learners call the base for every batch
FLOW = Base("flow", ("policy=flow", SMALL))
FLOW_1 = Base("flow-1", ("policy=flow", SMALL, "policy.steps=1"))
FLOW_2 = Base("flow-2", ("policy=flow", SMALL, "policy.steps=2"))
FLOW_10 = Base("flow-10", ("policy=flow", SMALL, "policy.steps=10"))
SHORTCUT_2 = Base("shortcut-2", ("policy=shortcut", SMALL, "policy.steps=2"))
MEANFLOW_1 = Base("meanflow-1", ("policy=meanflow", SMALL, "policy.steps=1"))
MEANFLOW_2 = Base("meanflow-2", ("policy=meanflow", SMALL, "policy.steps=2"))
DIFFUSION = Base("diffusion", ("policy=diffusion", SMALL, "policy.sampler=ddpm", "policy.steps=10"))


BASES = {base.name: base for base in (FLOW, FLOW_1, FLOW_2, FLOW_10, SHORTCUT_2, MEANFLOW_1, MEANFLOW_2, DIFFUSION)}


@dataclass(frozen=True)
class Method:
    """One row."""

    name: str
    algorithm: str  # its settings are in the preset
    base: Base | None = FLOW  # None: trained from scratch
    demonstrations: bool = False  # also learns from the demonstrations
    settings: tuple[str, ...] = ()  # on top of the preset
    times: int = 1  # multiple of the environment steps of the task; more steps show when a method reaches the goal
    variant: bool = False  # a variant of another row: runs only on lift unless requested

    @property
    def preset(self) -> tuple[str, str]:
        """Choices of the experiment and the algorithm."""
        kind = "offline_to_online" if ALGORITHMS[self.algorithm].data_source == "replay" else "fine_tune"
        return f"experiment={kind}", f"algorithm={self.algorithm}"


FREQUENT = ("algorithm.epochs=10",)  # the presets use 800,000 steps; with far fewer steps, more epochs help
LIGHT = ("algorithm.batch_size=128",)  # every row of a batch needs many candidates and their gradient ascent


def _reinflow(base: Base, low: float, high: float) -> Method:
    """ReinFlow on a head with another number of calls and the total noise of the preset's four calls."""
    noise = (f"algorithm.noise.std_min={low}", f"algorithm.noise.std_max={high}")
    return Method(f"reinflow-{base.name}", "reinflow", base, settings=(*FREQUENT, *noise), variant=True)


def _long(method: Method) -> Method:
    """The method with five times the steps."""
    settings = (*method.settings, "evaluation.every=3")
    return replace(method, name=f"{method.name}-long", settings=settings, times=5, variant=True)


def _methods() -> tuple[Method, ...]:
    on_policy = ("reinflow", "flow_sde", "fpo", "fpo_pp", "awm", "policyflow")
    two_calls = tuple(_reinflow(base, 0.12, 0.24) for base in (FLOW_2, SHORTCUT_2, MEANFLOW_2))
    calls = (_reinflow(FLOW_10, 0.08, 0.16), *two_calls, _reinflow(MEANFLOW_1, 0.16, 0.32))
    with_demonstrations = ("expo", "qc", "dqc", "fql", "idql")
    return (
        *(Method(name, name, settings=FREQUENT) for name in on_policy),
        *(Method(name, name) for name in ("ac_flow", "flow_grpo", "gorl")),
        Method("dppo", "dppo", DIFFUSION, settings=FREQUENT),
        *(Method(name, name) for name in ("dsrl_sac", "dsrl_na")),
        Method("pa_rl", "pa_rl", demonstrations=True, settings=LIGHT),
        *(Method(name, name, demonstrations=True) for name in with_demonstrations),
        _long(Method("reinflow", "reinflow", settings=FREQUENT)),
        _reinflow(FLOW_1, 0.16, 0.32),
        *calls,
        *map(_long, calls),
        Method("dsrl_na-diffusion", "dsrl_na", DIFFUSION),
        Method("dsrl_na-meanflow-1", "dsrl_na", MEANFLOW_1, variant=True),
        Method("pa_rl-diffusion", "pa_rl", DIFFUSION, demonstrations=True, settings=LIGHT, variant=True),
        Method("rlpd", "rlpd", None, demonstrations=True, settings=("policy=squashed_gaussian",)),
    )


LEFT_OUT = {  # by method and task
    ("dqc", "hopper"): "it learns probabilities of success, from rewards in [0, 1]",
}

METHODS = {method.name: method for method in _methods()}


def standard(task: str) -> list[str]:
    """The methods that run on `task` by default."""
    return [
        name
        for name, method in METHODS.items()
        if (task == "lift" or not method.variant) and (name, task) not in LEFT_OUT
    ]


def notes() -> list[str]:
    """Lines below the table: methods without a row on a task."""
    return [f"- `{method}` has no row on {task}: {reason}." for (method, task), reason in LEFT_OUT.items()]
