"""Rollout workers of text tasks in other processes, on this machine or in a Ray cluster (AsyncFlow, Han et al. 2025).

The learner samples tasks, computes rewards and intervenes; a worker has a copy of the policy and of the task, and rolls
out the tasks that it receives. `RemoteRolloutEnv` is its local environment, which supports only rollouts, since
conversations stay in the worker. Weights are sent as safetensors, trajectories as arrays, numbers and text.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from safetensors.torch import load, save

from robopolicy.core.decisions import Decisions
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextPolicy
from robopolicy.text.reward_runner import RewardError
from robopolicy.text.rollouts.protocols import Task, Trajectory
from robopolicy.text.rollouts.trajectories import from_dict, to_dict
from robopolicy.text.sim import TextSim
from robopolicy.text.text_env import TextEnv
from robopolicy.training.parallel import WORKER_HANDLES, WorkerHandle, arrays_to_tensors, tensors_to_arrays

TASK = tuple(item.name for item in fields(Task))
_COUNTS = threading.Lock()  # several workers update the counts of one environment


@dataclass(frozen=True)
class WorkerSpec:
    """Construction parameters of a worker."""

    policy: str  # name in POLICIES
    config: Any  # config of the policy
    spec: PolicySpec
    task: str  # registered text task
    seed: int  # seed of the sampled tokens

    @classmethod
    def of(cls, policy: TextPolicy, task: str, seed: int) -> WorkerSpec:
        """Create the specification for rollouts of a task by `policy`."""
        return cls(policy.name, policy.config, policy.spec, task, seed)


class Worker:
    """Rollout worker in another process."""

    def __init__(self, spec: WorkerSpec) -> None:
        policy = POLICIES[spec.policy](spec.config, spec.spec)
        sim = make_sim(spec.task, SimOptions(num_envs=1))
        assert isinstance(sim, TextSim) and isinstance(policy, TextPolicy)
        self.env = policy.env_class(policy, sim.task, torch.Generator().manual_seed(spec.seed))

    def load(self, weights: bytes) -> None:
        """Load weights."""
        self.env.policy.load_state_dict(load(weights))

    def rollout(self, tasks: Sequence[Mapping[str, Any]], units: int | None) -> dict[str, Any]:
        """Roll out tasks; return trajectories, number of tokens and reward errors."""
        before = self.env.generated
        trajectories = self.env.rollout([Task(**arrays_to_tensors(task)) for task in tasks], units=units)
        self.env.completed.clear()
        return {
            "trajectories": [tensors_to_arrays(to_dict(trajectory)) for trajectory in trajectories],
            "tokens": self.env.generated - before,
            "reward_errors": [(error.key, error.kind, error.message) for error in self.env.reward_runner.pop_errors()],
        }


class RemoteRolloutEnv:
    """Environment of a worker; its counts and reward errors are added to the local environment `env`."""

    def __init__(self, handle: WorkerHandle, env: TextEnv) -> None:
        self._handle, self._env = handle, env

    def load(self, weights: bytes) -> None:
        """Load weights into the worker."""
        self._handle.call("load", weights)

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Roll out every task once."""
        plain = [tensors_to_arrays({name: getattr(task, name) for name in TASK}) for task in tasks]
        found = self._handle.call("rollout", plain, units)
        with _COUNTS:
            self._env.generated += found["tokens"]
            self._env.reward_runner.reward_errors += [RewardError(*error) for error in found["reward_errors"]]
        return [from_dict(arrays_to_tensors(trajectory)) for trajectory in found["trajectories"]]

    def batch(self, trajectories: Sequence[Trajectory]) -> Decisions:
        """Return the rows of all trajectories."""
        return self._env.batch(trajectories)

    def close(self) -> None:
        """Stop the worker."""
        self._handle.close()


def packed_weights(policy: TextPolicy) -> bytes:
    """Serialize parameters and buffers as safetensors; shared tensors, which it rejects, are cloned."""
    return save({name: value.detach().cpu().clone().contiguous() for name, value in policy.state_dict().items()})


def start_workers(
    policy: TextPolicy, task: str, env: TextEnv, *, count: int, backend: str, seed: int
) -> list[RemoteRolloutEnv]:
    """Start rollout workers for the local environment `env`; a missing Ray package raises a UserError."""
    specs = [WorkerSpec.of(policy, task, seed + number) for number in range(count)]
    return [RemoteRolloutEnv(WORKER_HANDLES[backend](partial(Worker, spec)), env) for spec in specs]
