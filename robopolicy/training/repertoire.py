"""The archive that a run of `dcg_map_elites` leaves behind, and its elites as checkpoints of their own."""

from __future__ import annotations

from pathlib import Path

import torch

from robopolicy.algorithms.dcg_map_elites import DCGMAPElites
from robopolicy.errors import UserError
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.training.checkpoint import load_policy, load_training_state, save_checkpoint
from robopolicy.training.compose import read_config
from robopolicy.training.config import section

LAST = Path("checkpoints", "last")


def read_repertoire(run: Path) -> DCGMAPElites:
    """The learner of a run, as its last resume point holds it.

    Raises:
        UserError: The folder is no run, or one of another algorithm.
    """
    if not (run / "config.yaml").is_file() or not (run / LAST).is_dir():
        raise UserError(f"{run} is not a run with a resume point; pass a folder such as runs/arm_dcg_map_elites.")
    config = read_config(run / "config.yaml")
    name, settings = section("algorithm", config.algorithm)
    if name != DCGMAPElites.name:
        raise UserError(f"Run {run} was trained by '{name}', which keeps no archive; pass a run of dcg_map_elites.")
    policy, _ = load_policy(run / LAST)
    learner = DCGMAPElites(settings, policy, total_updates=1)
    learner.load_state_dict(load_training_state(run / LAST)["algorithm"])
    return learner


def save_elite(run: Path, descriptor: list[float], out: Path) -> tuple[list[float], float]:
    """Write the elite whose descriptor is nearest to `descriptor` as a checkpoint into `out`.

    Returns:
        Its descriptor and its fitness.

    Raises:
        UserError: The run has no archive, `descriptor` has another size, or the network cannot be taken out.
    """
    learner = read_repertoire(run)
    size = learner.population.descriptor_dim
    if len(descriptor) != size:
        raise UserError(f"The archive of {run} has descriptors of {size} numbers, got {len(descriptor)}.")
    wanted = torch.tensor(descriptor)
    found, policy = learner.archive.nearest(wanted), learner.elite(wanted)
    _save(policy, run, out, float(found.fitness[0]))
    return found.descriptor[0].tolist(), float(found.fitness[0])


def _save(policy: GaussianPolicy, run: Path, out: Path, fitness: float) -> None:
    generator, spec = torch.Generator().manual_seed(0), policy.spec
    obs = {key: torch.rand(4, spec.obs_horizon, *shape, generator=generator) for key, shape in spec.observation.items()}
    task = read_config(run / "config.yaml").task.name
    save_checkpoint(out, policy.eval(), task=task, obs_sample=obs, training={"elite_of": str(run), "fitness": fitness})
