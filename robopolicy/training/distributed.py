"""Distributed runs, started by `torchrun`.

Every process has its share of the environments or of each minibatch of the dataset, and keeps only its own rows.
Gradients are averaged before each step, and advantages, reward scale and normalisers use the rows of all processes, so
the result equals one process with the rows of all of them in each minibatch. Process 0 evaluates and writes. Algorithms
with `distributed` support this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from robopolicy.algorithms.common.algorithm import Algorithm, EpisodeTracker
from robopolicy.algorithms.registry import ALGORITHMS, names_with
from robopolicy.core.distributed import all_gather_bytes, all_reduce_sum, rank, world_size
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.torchrun import check_rank, process_count
from robopolicy.training.config import TrainConfig
from robopolicy.training.make_source import DataSource
from robopolicy.training.resume import pack_tree, unpack_tree

TIMEOUT = timedelta(days=1)  # the other processes wait while process 0 evaluates; torchrun ends them if it fails
EPISODES = "rollout/episodes"  # metric with the number of episodes of the other metrics of a rollout


@contextmanager
def processes() -> Iterator[None]:
    """Join the process group of `torchrun`; a no-op without it.

    Only the first process that fails reports its error; failures of the others are its consequences or equal to it.
    """
    if process_count() == 1:
        yield
        return
    check_rank()
    if torch.cuda.is_available():  # device=cuda then refers to the GPU of this process
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        store, index, size = next(dist.rendezvous("env://"))
    except (OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"The processes of the run did not meet ({reason}); start the run by torchrun.") from error
    group = dist.PrefixStore("robopolicy", store)
    dist.init_process_group(store=group, rank=index, world_size=size, timeout=TIMEOUT)
    try:
        yield
        dist.barrier()  # all processes finish communicating before the group is destroyed
    except Exception as error:
        if not _is_first_failure(group):
            raise SystemExit(2) from error
        if isinstance(error, RuntimeError) and "onnection" in str(error):
            raise UserError("Another process of this run ended without an error message; resume the run.") from error
        raise
    finally:
        dist.destroy_process_group()


def _is_first_failure(group: dist.Store) -> bool:
    """Count a failure of a process; the store may have ended with process 0."""
    try:
        return group.add("failures", 1) == 1
    except dist.DistError:
        return False


def check_distributed(config: TrainConfig) -> None:
    """Raise a UserError for settings that distributed runs do not support."""
    ranks, name = world_size(), config.algorithm["name"]
    if ranks == 1:
        return
    if not ALGORITHMS[name].distributed:
        supported = names_with("distributed")
        raise UserError(f"Algorithm '{name}' runs in one process; drop torchrun, or choose one of {supported}.")
    sizes = {"algorithm.batch_size": config.algorithm["batch_size"]}
    if ALGORITHMS[name].data_source != "dataset":
        sizes["sim.num_envs"] = config.sim.num_envs
    check_divisible(sizes)


def check_divisible(sizes: Mapping[str, int]) -> None:
    """Raise a UserError if the number of processes does not divide the value of a setting."""
    for key, number in sizes.items():
        if number % world_size():
            raise UserError(f"{key}={number} is not divisible by the {world_size()} processes; choose a multiple.")


class DistributedSource:
    """Source of one of several processes; steps and metrics are of all processes."""

    def __init__(self, local: DataSource) -> None:
        self.local = local
        self.env_steps = 0

    def next(self, algorithm: Algorithm) -> Any:
        """Return the next batch of this process."""
        batch = self.local.next(algorithm)
        self.env_steps = all_reduce_sum(self.local.env_steps)
        return batch

    def metrics(self) -> dict[str, float]:
        """Return means over the episodes of all processes."""
        rows = [json.loads(data) for data in all_gather_bytes(json.dumps(self.local.metrics()).encode())]
        return mean_metrics(rows)

    def observations(self) -> Observation:
        """Return some observations of this process."""
        return self.local.observations()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, and the steps of all."""
        return {**self.local.state_dict(), "total_env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.env_steps = int(state["total_env_steps"])
        return self.local.load_state_dict(state)

    def close(self) -> None:
        """Stop the simulator."""
        self.local.close()


def mean_metrics(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means of the metrics of several processes, weighted by their episodes; the numbers of episodes are added."""
    weights = [row.get(EPISODES, 1.0) for row in rows]
    result: dict[str, float] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        found = [(row[key], weight) for row, weight in zip(rows, weights, strict=True) if key in row]
        result[key] = sum(value * weight for value, weight in found) / sum(weight for _, weight in found)
    if EPISODES in result:
        result[EPISODES] = sum(row.get(EPISODES, 0.0) for row in rows)
    return result


def gather_states(state: Mapping[str, Any], algorithm: object) -> dict[str, Any]:
    """Add to a resume point the parts that differ between the processes, by process.

    These are the data source, the random generators and the running episodes.
    """
    if world_size() == 1:
        return dict(state)
    parts = algorithm.checkpoint_items() if isinstance(algorithm, Algorithm) else {}
    items = [name for name, item in parts.items() if isinstance(item, EpisodeTracker)]
    own = {name: state["algorithm"][name] for name in ("generator", *items)}
    own = {"source": state["source"], "random": state["random"], "algorithm": own}
    return {**state, "processes": [unpack_tree(data) for data in all_gather_bytes(pack_tree(own))]}


def state_of_process(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resume point of this process; a UserError is raised if it was saved by another number of processes."""
    saved = state.get("processes", [None])
    if len(saved) != world_size():
        start = f"torchrun --nproc-per-node {len(saved)}" if len(saved) > 1 else "one process"
        raise UserError(f"The run was saved by {len(saved)} processes; resume it with {start}, not {world_size()}.")
    if world_size() == 1:
        return state
    own = saved[rank()]
    return {**state, **own, "algorithm": {**state["algorithm"], **own["algorithm"]}}


def with_own_generator(state: Mapping[str, Any], algorithm: Algorithm) -> Mapping[str, Any]:
    """State of an algorithm, written by process 0, with the generator of this process."""
    return state if rank() == 0 else {**state, "generator": algorithm.generator.get_state()}
