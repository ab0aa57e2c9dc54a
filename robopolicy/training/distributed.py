"""One run in several processes, started by `torchrun`: who plays what, and which settings allow it.

Every process plays its share of the environments. The rollouts are put together, so that all processes know all of
them: normalisers, return scale, advantages and the order of the minibatches are those of a single process. Of every
minibatch a process takes its share of the rows, and gradients are averaged before each step. Process 0 evaluates and
writes. The algorithms that can are those with `distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from robopolicy.algorithms.registry import ALGORITHMS, names_with
from robopolicy.core.distributed import all_gather, world_size
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.training.config import TrainConfig

ENVS_FIRST = ("final_obs", "last_obs")
"""Fields of a rollout whose rows are environments or episodes; all others begin with time."""


@contextmanager
def processes() -> Iterator[None]:
    """Join the processes that `torchrun` has started with this one; nothing to join without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():  # device=cuda is then the one of this process
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    try:
        yield
        dist.barrier()  # nobody leaves while another still talks to it
    finally:
        dist.destroy_process_group()


def check_distributed(config: TrainConfig) -> None:
    """Refuse what several processes cannot do; one process may do anything.

    Raises:
        UserError: The first such setting.
    """
    ranks, name = world_size(), config.algorithm["name"]
    if ranks == 1:
        return
    if not ALGORITHMS[name].distributed:
        able = names_with("distributed")
        raise UserError(f"Algorithm '{name}' runs in one process; drop torchrun, or choose one of {able}.")
    if config.policy.get("recurrent", {}).get("kind", "none") != "none":
        raise UserError("Recurrent policies train in one process; drop torchrun, or set policy.recurrent.kind=none.")
    if config.guards.restore_best:
        raise UserError("Several processes cannot go back to the best weights; set guards.restore_best=false.")
    shared = {"sim.num_envs": config.sim.num_envs, "algorithm.batch_size": config.algorithm["batch_size"]}
    for key, number in shared.items():
        if number % ranks:
            raise UserError(f"{key}={number} cannot be shared out evenly to {ranks} processes; choose a multiple.")


def gather_rollouts(rollout: Rollout) -> Rollout:
    """The rollouts `(T, N_r, ...)` of all processes as one of `(T, N)`, environments in the order of the processes."""

    def joined(value: Any, dim: int) -> Any:
        if isinstance(value, Tensor):
            return all_gather(value, dim)
        return {key: all_gather(part, dim) for key, part in value.items()}

    dims = {field.name: 0 if field.name in ENVS_FIRST else 1 for field in fields(rollout)}
    whole = replace(rollout, **{name: joined(getattr(rollout, name), dim) for name, dim in dims.items()})
    # Final observations are row-major over all environments; the processes send theirs one after the other.
    bootstrap = whole.truncated & ~whole.terminated
    owners = bootstrap.view(len(bootstrap), world_size(), -1).movedim(1, 0)  # (R, T, N_r)
    time, env = owners.nonzero()[:, 1], owners.nonzero()[:, 2] + owners.nonzero()[:, 0] * owners.shape[2]
    order = (time * bootstrap.shape[1] + env).argsort()
    return replace(whole, final_obs={key: value[order] for key, value in whole.final_obs.items()})
