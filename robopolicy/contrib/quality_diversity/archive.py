"""The policies that a run of `dcg_map_elites` or `stax` leaves behind, and each as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from robopolicy.contrib.quality_diversity.dcg_map_elites import DCGMAPElites
from robopolicy.contrib.quality_diversity.elites import Elites
from robopolicy.contrib.quality_diversity.stax import STAX
from robopolicy.errors import UserError
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.training.checkpoint import load_policy, load_training_state, save_checkpoint
from robopolicy.training.compose import read_config
from robopolicy.training.config import section

LAST = Path("checkpoints", "last")
KEEPERS: dict[str, type[DCGMAPElites] | type[STAX]] = {DCGMAPElites.name: DCGMAPElites, STAX.name: STAX}


def read_repertoire(run: Path) -> DCGMAPElites | STAX:
    """The learner of a run, as its last resume point holds it.

    Raises:
        UserError: The folder is no run, or one of another algorithm.
    """
    if not (run / "config.yaml").is_file() or not (run / LAST).is_dir():
        raise UserError(f"{run} is not a run with a resume point; pass a folder such as runs/arm_dcg_map_elites.")
    config = read_config(run / "config.yaml")
    name, settings = section("algorithm", config.algorithm)
    if name not in KEEPERS:
        raise UserError(
            f"Run {run} was trained by '{name}', which keeps no archive; pass one of {' or '.join(KEEPERS)}."
        )
    policy, _ = load_policy(run / LAST)
    learner = KEEPERS[name](settings, policy, total_updates=1)
    learner.load_state_dict(load_training_state(run / LAST)["algorithm"])
    return learner


def nearest(run: Path, learner: DCGMAPElites | STAX, descriptor: list[float]) -> Elites:
    """The elite whose descriptor is nearest to `descriptor`.

    Raises:
        UserError: The behaviours of this run have no names, are another number, or lie outside [0, 1].
    """
    if isinstance(learner, STAX):
        raise UserError(f"Run {run} learned its behaviours itself, so nobody can name one; pass --rank.")
    size = learner.population.descriptor_dim
    if len(descriptor) != size:
        raise UserError(f"The archive of {run} has descriptors of {size} numbers, got {len(descriptor)}.")
    if not all(0 <= number <= 1 for number in descriptor):
        raise UserError(f"Behaviours lie between 0 and 1 in every number, got {', '.join(map(str, descriptor))}.")
    return learner.archive.nearest(torch.tensor(descriptor))


def ranked(run: Path, learner: DCGMAPElites | STAX, rank: int) -> Elites:
    """The elite of which `rank - 1` others earn more.

    Raises:
        UserError: There are not so many.
    """
    elites = learner.elites()
    if not 1 <= rank <= len(elites):
        raise UserError(f"The archive of {run} has {len(elites)} policies; there is no rank {rank}.")
    return elites[elites.fitness.argsort(descending=True, stable=True)[rank - 1 : rank]]


def save_elite(run: Path, learner: DCGMAPElites | STAX, elite: Elites, out: Path) -> None:
    """Write an elite of a run as a checkpoint into `out`.

    Raises:
        UserError: The network cannot be taken out.
    """
    policy: GaussianPolicy = learner.extract_policy(elite.solution[0])
    generator, spec = torch.Generator().manual_seed(0), policy.spec
    obs = {key: torch.rand(4, spec.obs_horizon, *shape, generator=generator) for key, shape in spec.observation.items()}
    task, training = read_config(run / "config.yaml").task.name, {"elite_of": str(run), "fitness": float(elite.fitness)}
    save_checkpoint(out, policy.eval(), task=task, obs_sample=obs, training=training)
