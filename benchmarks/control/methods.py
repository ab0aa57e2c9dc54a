"""Rows of the table: two families of learners, each with one budget and one Stable-Baselines3 baseline.

Every row has the defaults of its algorithm, except for the settings below that this budget and these tasks need. The
shared sizes of a family are Stable-Baselines3's defaults, except for the number of environments, batches of 128 and,
for off-policy learners, networks of two layers of 128. Contrib themes add rows by `[control.methods]` (`family`,
`policy`, `settings`, `note`) and reasons by `[control.left_out]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.themes import contributed


@dataclass(frozen=True)
class Family:
    """Shared settings of the rows of a family."""

    name: str
    baseline: str  # row of Stable-Baselines3
    policy: str  # preset, unless a row needs another one
    env_steps: int  # of every run
    num_envs: int
    batch_size: int  # decisions per gradient step
    rollout: int = 0  # decisions per environment and rollout
    warmup: int = 0  # first steps, with random actions
    capacity: int = 0  # steps in the replay buffer
    hidden: tuple[int, ...] = ()  # network widths of off-policy learners; others have their own

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings as arguments of `robopolicy train`."""
        common = (f"sim.num_envs={self.num_envs}", f"algorithm.batch_size={self.batch_size}")
        if self.rollout:
            return (*common, f"algorithm.num_steps={self.rollout}")
        memory = (f"replay.learning_starts={self.warmup}", f"replay.capacity={self.capacity}")
        widths = (f"policy.hidden={list(self.hidden)}", f"algorithm.critic.hidden={list(self.hidden)}")
        return (*common, *memory, *widths, "policy.normalization=identity")


ON_POLICY = Family("on-policy", "sb3_ppo", "gaussian", 102_400, num_envs=16, batch_size=128, rollout=128)
OFF_POLICY = Family(
    *("off-policy", "sb3_sac", "squashed_gaussian", 30_000),
    num_envs=4,
    batch_size=128,
    warmup=1_000,
    capacity=100_000,
    hidden=(128, 128),
)
FAMILIES = (ON_POLICY, OFF_POLICY)


@dataclass(frozen=True)
class Method:
    """One row: a registered algorithm, or the baseline."""

    name: str
    family: Family
    policy: str = ""  # preset; empty: the family's
    settings: tuple[str, ...] = ()  # on top of the family's
    note: str = ""  # text of a line below the table

    @property
    def is_baseline(self) -> bool:
        """Whether Stable-Baselines3 trains it."""
        return self.name == self.family.baseline


LEFT_OUT = {
    "rlpd": "it learns from a dataset as well, which no other row has",
    **contributed("control", "left_out"),
}
"""Learners from scratch without a row, and why."""


def _methods() -> tuple[Method, ...]:
    gorl = ("algorithm.stages=[20,10]", "algorithm.decoder_updates=10")  # two decoders within 50 rollouts
    # As in the rest of the family. From scratch there is no policy to protect from the first steps.
    flow = ("algorithm.epochs=10", "algorithm.lr=3e-4", "algorithm.critic_lr=3e-4", "algorithm.lr_warmup=0")
    # ASPO as published. The fine-tuning clip of 0.02 hardly learns; 0.1 is the best of 0.1, 0.2, 0.3 on other seeds.
    from_scratch = ("algorithm.trust_region=aspo", "algorithm.clip=0.1")
    return (
        *(Method(family.baseline, family) for family in FAMILIES),
        Method("gorl", ON_POLICY, "flow_decoder", gorl),
        Method("ppo", ON_POLICY),
        Method("sac", OFF_POLICY),
        Method("td3", OFF_POLICY),
        Method("policyflow", ON_POLICY, "flow_decoder", (*flow, "algorithm.perturbation.std_init=1")),  # as published
        Method("fpo", ON_POLICY, "flow_decoder", flow),
        Method("fpo_pp", ON_POLICY, "flow_decoder", (*flow, *from_scratch)),
        *(_row(name, **row) for name, row in contributed("control", "methods").items()),
    )


def _row(name: str, family: str, policy: str = "", settings: Sequence[str] = (), note: str = "") -> Method:
    """A row of `benchmarks.toml`, with the name of its family."""
    return Method(name, {each.name: each for each in FAMILIES}[family], policy, tuple(settings), note)


METHODS = {method.name: method for method in _methods()}


def notes() -> list[str]:
    """Lines below the table: learners without a row, with the reason, and notes on rows."""
    reasons: dict[str, list[str]] = {}
    for name, reason in LEFT_OUT.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    left_out = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    rows = [f"`{name}` {method.note}." for name, method in METHODS.items() if method.note]
    return [f"Without a row: {'; '.join(left_out)}.", *rows]
