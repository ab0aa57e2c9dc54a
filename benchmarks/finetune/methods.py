"""The rows of the table: which preset fine-tunes which base policy.

The presets `configs/experiment/lift_*.yaml` were chosen on lift with seed 0, which the table does not use; the other
tasks run with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass


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
DIFFUSION = Base("diffusion", ("policy=diffusion", SMALL, "policy.sampler=ddpm", "policy.steps=10"))


@dataclass(frozen=True)
class Method:
    """One row."""

    name: str
    preset: str  # experiment of which algorithm and simulator settings are taken
    base: Base | None = FLOW  # None learns from scratch
    demonstrations: bool = False  # also learns from the demonstrations
    settings: tuple[str, ...] = ()  # on top of the preset


def _noise(low: float, high: float) -> tuple[str, ...]:
    return (f"algorithm.noise.std_min={low}", f"algorithm.noise.std_max={high}")


def _methods() -> tuple[Method, ...]:
    on_policy = ("reinflow", "flow_grpo", "flow_sde", "fpo", "fpo_pp", "awm", "ac_flow", "policyflow", "gorl")
    steering = ("dsrl_sac", "dsrl_na")
    with_demonstrations = ("pa_rl", "expo", "qc", "dqc", "fql", "idql")
    return (
        *(Method(name, f"lift_{name}") for name in on_policy),
        Method("dppo", "lift_dppo", DIFFUSION),
        *(Method(name, f"lift_{name}") for name in steering),
        *(Method(name, f"lift_{name}", demonstrations=True) for name in with_demonstrations),
        Method(
            "reinflow-flow-1", "lift_reinflow", FLOW_1, settings=_noise(0.16, 0.32)
        ),  # one step, one chance to explore
        Method("reinflow-flow-2", "lift_reinflow", FLOW_2, settings=_noise(0.12, 0.24)),
        Method("reinflow-flow-10", "lift_reinflow", FLOW_10),
        Method("reinflow-shortcut-2", "lift_reinflow", SHORTCUT_2, settings=_noise(0.12, 0.24)),
        Method("dsrl_na-meanflow-1", "lift_dsrl_na", MEANFLOW_1),
        Method("dsrl_na-diffusion", "lift_dsrl_na", DIFFUSION),
        Method("pa_rl-diffusion", "lift_pa_rl", DIFFUSION, demonstrations=True),
        Method("rlpd", "lift_rlpd", None, demonstrations=True, settings=("policy=squashed_gaussian",)),
    )


METHODS = {method.name: method for method in _methods()}
