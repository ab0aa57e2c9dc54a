"""Distributed runs, started by `torchrun`.

Every process steps a part of the environments. The rollouts are gathered in all processes, so normalisers, return
scale, advantages and the order of the minibatches are the same as in a single process. Each process computes the
gradient of its rows of a minibatch, and gradients are averaged before each step. Process 0 evaluates and writes.
Algorithms with `distributed` support this.
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
"""Fields of a rollout whose first dimension is environments or episodes; all others start with time."""


@contextmanager
def processes() -> Iterator[None]:
    """Join the process group of `torchrun`; a no-op without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():  # device=cuda then refers to the GPU of this process
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    try:
        yield
        dist.barrier()  # all processes finish communicating before the group is destroyed
    finally:
        dist.destroy_process_group()


def check_distributed(config: TrainConfig) -> None:
    """Raise a UserError for settings that distributed runs do not support."""
    ranks, name = world_size(), config.algorithm["name"]
    if ranks == 1:
        return
    if not ALGORITHMS[name].distributed:
        supported = names_with("distributed")
        raise UserError(f"Algorithm '{name}' runs in one process; drop torchrun, or choose one of {supported}.")
    if config.policy.get("recurrent", {}).get("kind", "none") != "none":
        raise UserError("Recurrent policies train in one process; drop torchrun, or set policy.recurrent.kind=none.")
    if config.guards.restore_best:
        raise UserError("Distributed runs cannot restore the best weights; set guards.restore_best=false.")
    sizes = {"sim.num_envs": config.sim.num_envs, "algorithm.batch_size": config.algorithm["batch_size"]}
    for key, number in sizes.items():
        if number % ranks:
            raise UserError(f"{key}={number} is not divisible by the {ranks} processes; choose a multiple.")


def gather_rollouts(rollout: Rollout) -> Rollout:
    """Gather the rollouts `(T, N_r, ...)` of all processes as `(T, N, ...)`, environments in process order."""

    def concat(value: Any, dim: int) -> Any:
        if isinstance(value, Tensor):
            return all_gather(value, dim)
        return {key: all_gather(part, dim) for key, part in value.items()}

    dims = {field.name: 0 if field.name in ENVS_FIRST else 1 for field in fields(rollout)}
    whole = replace(rollout, **{name: concat(getattr(rollout, name), dim) for name, dim in dims.items()})
    # Final observations are row-major over all environments, but gathered process by process.
    bootstrap = whole.truncated & ~whole.terminated
    owners = bootstrap.view(len(bootstrap), world_size(), -1).movedim(1, 0)  # (R, T, N_r)
    time, env = owners.nonzero()[:, 1], owners.nonzero()[:, 2] + owners.nonzero()[:, 0] * owners.shape[2]
    order = (time * bootstrap.shape[1] + env).argsort()
    return replace(whole, final_obs={key: value[order] for key, value in whole.final_obs.items()})
