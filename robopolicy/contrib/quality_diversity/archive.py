"""Archives of finished runs of `dcg_map_elites` or `stax`, and their elites as checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from robopolicy.contrib.quality_diversity.dcg_map_elites import DCGMAPElites
from robopolicy.contrib.quality_diversity.elites import Elites
from robopolicy.contrib.quality_diversity.stax import STAX
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.training.checkpoint import load_policy, load_training_state, save_checkpoint
from robopolicy.training.compose import read_config
from robopolicy.training.config import section

LAST = Path("checkpoints", "last")
ALGORITHMS: dict[str, type[DCGMAPElites] | type[STAX]] = {DCGMAPElites.name: DCGMAPElites, STAX.name: STAX}


def read_archive(run: Path) -> DCGMAPElites | STAX:
    """Load the algorithm of a run from its last resume point.

    Raises:
        UserError: The folder is no run, or a run of another algorithm.
    """
    if not (run / "config.yaml").is_file() or not (run / LAST).is_dir():
        raise UserError(f"{run} is not a run with a resume point; pass a folder such as runs/arm_dcg_map_elites.")
    config = read_config(run / "config.yaml")
    name, settings = section("algorithm", config.algorithm)
    if name not in ALGORITHMS:
        raise UserError(
            f"Run {run} was trained by '{name}', which has no archive; pass a run of {' or '.join(ALGORITHMS)}."
        )
    policy, _ = load_policy(run / LAST)
    learner = ALGORITHMS[name](settings, policy, total_updates=1)
    learner.load_state_dict(load_training_state(run / LAST)["algorithm"])
    return learner


def nearest(run: Path, learner: DCGMAPElites | STAX, descriptor: list[float]) -> Elites:
    """The elite whose descriptor is nearest to `descriptor`.

    Raises:
        UserError: The run learned its descriptors, or the descriptor has another size or lies outside [0, 1].
    """
    if isinstance(learner, STAX):
        raise UserError(f"Run {run} learned its descriptors, which have no meaning to users; pass --rank.")
    size = learner.population.descriptor_dim
    if len(descriptor) != size:
        raise UserError(f"The archive of {run} has descriptors of {size} numbers, got {len(descriptor)}.")
    if not all(0 <= number <= 1 for number in descriptor):
        raise UserError(f"Descriptors lie in [0, 1], got {', '.join(map(str, descriptor))}.")
    return learner.archive.nearest(torch.tensor(descriptor))


def ranked(run: Path, learner: DCGMAPElites | STAX, rank: int) -> Elites:
    """The elite of rank `rank` by fitness; 1 is the best.

    Raises:
        UserError: There are fewer elites.
    """
    elites = learner.elites()
    if not 1 <= rank <= len(elites):
        raise UserError(f"The archive of {run} has {counted(len(elites), 'elite')}; there is no rank {rank}.")
    return elites[elites.fitness.argsort(descending=True, stable=True)[rank - 1 : rank]]


def save_elite(run: Path, learner: DCGMAPElites | STAX, elite: Elites, out: Path) -> None:
    """Write an elite of a run as a checkpoint into `out`.

    Raises:
        UserError: The network cannot be extracted.
    """
    policy: GaussianPolicy = learner.extract_policy(elite.solution[0])
    generator, spec = torch.Generator().manual_seed(0), policy.spec
    obs = {key: torch.rand(4, spec.obs_horizon, *shape, generator=generator) for key, shape in spec.observation.items()}
    task, training = read_config(run / "config.yaml").task.name, {"elite_of": str(run), "fitness": float(elite.fitness)}
    save_checkpoint(out, policy.eval(), task=task, obs_sample=obs, training=training)
