"""DAgger: imitation with corrections of the states that the policy visits (Ross et al. 2011).

The policy acts, a demonstrator corrects it, the corrections are added to the demonstrations, and training continues on
all of them. This repeats in rounds. The scripted expert of a task labels every visited state. A person takes over at an
input device and hands back; only the frames of the person are added (HG-DAgger, Kelly et al. 2019).

Use it when a cloned policy fails in states that the demonstrations lack. Corrections that were recorded before
(`collect --takeover`) need no rounds: merge them with the demonstrations and train by bc.

Deviations: training continues from the weights of the last round, with one schedule of the learning rate over all
rounds, not from new weights. The policy acts alone from the first round on, without a mixture with the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.constraints import PositiveInt
from robopolicy.errors import UserError


@dataclass(frozen=True)
class DAggerConfig(BCConfig):
    """Settings of DAgger."""

    rounds: PositiveInt = 5  # collections, evenly spread over the updates; the first one is before the first update
    episodes_per_round: PositiveInt = 10  # episodes of the policy per collection
    demonstrator: str = "expert"  # expert (of the task), or the device of a person, e.g. gamepad, with sim.num_envs=1


class DAgger(BC):
    """Behaviour cloning of demonstrations and corrections of the policy."""

    name: ClassVar[str] = "dagger"
    config_class = DAggerConfig
    data_source = "corrections"
    heads = ("imitation_loss",)
    reference = "ross2011dagger"
    distributed = False
    requires_pretrained = True
    needs_dataset = True
    config: DAggerConfig

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Require a budget of updates, since a person decides how long episodes are."""
        super().check_settings(dataset=dataset, env_steps=env_steps, offline_updates=offline_updates)
        if env_steps:
            raise UserError("Algorithm 'dagger' collects whole episodes of any length; set budget.updates instead.")
