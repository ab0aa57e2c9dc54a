"""Compares learners in two processes, each with half of the environments, with one learner with all of them."""

import copy
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.core import distributed
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.registry import make_policy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.distributed import gather_rollouts

Case = tuple[str, dict[str, Any]]  # algorithm, settings


def learner(name: str, settings: dict[str, Any]) -> Any:
    """A small learner of the point mass."""
    torch.manual_seed(0)
    policy = make_policy("gaussian", GaussianConfig(hidden=(8,)), PolicySpec({"state": (6,)}, action_dim=2))
    config = ALGORITHMS[name].config_class(epochs=3, batch_size=16, lr=3e-3, **settings)
    return make_algorithm(name, config, policy, total_updates=4)


def rollouts(name: str, settings: dict[str, Any]) -> list[Rollout]:
    """Two consecutive rollouts of 4 environments with truncations, collected by a learner in one process."""
    sim = make_sim("toy/point_mass", SimOptions(num_envs=4, reward="shaped"))
    sampler = RolloutSampler(ChunkedSim(sim, gamma=0.99), decisions=60, seed=1)
    algorithm = learner(name, settings)
    result = []
    for _ in range(2):
        result.append(sampler.collect(algorithm.act))
        algorithm.update(result[-1])
    return result


def half(rollout: Rollout, side: int) -> Rollout:
    """The rollout of the first or the last two environments."""
    part = slice(2 * side, 2 * side + 2)
    cut: dict[str, Any] = {}
    for entry in fields(rollout):
        value = getattr(rollout, entry.name)
        dim = 0 if entry.name == "last_obs" else 1
        pick = lambda x, dim=dim: x[part] if dim == 0 else x[:, part]  # noqa: E731
        cut[entry.name] = pick(value) if isinstance(value, Tensor) else {key: pick(x) for key, x in value.items()}
    mask = rollout.truncated & ~rollout.terminated
    mine = torch.zeros_like(mask)
    mine[:, part] = True
    cut["final_obs"] = {key: value[mine[mask]] for key, value in rollout.final_obs.items()}
    return replace(rollout, **cut)


def one_of_two(index: int, folder: str, cases: Sequence[Case]) -> None:
    """Train one of two processes on its environments."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=2)
    for number, (name, settings) in enumerate(cases):
        algorithm = learner(name, settings)
        whole = torch.load(f"{folder}/{number}.pt", weights_only=True)
        metrics = [algorithm.update(gather_rollouts(half(Rollout(**entry), index))) for entry in whole]
        torch.save([algorithm.state_dict(), metrics], f"{folder}/{number}-{index}.pt")
    rows = torch.arange(3 + index).view(-1, 1) + 10 * index  # of unequal sizes
    torch.save(
        [distributed.all_gather(rows), distributed.all_gather(rows > 10), distributed.all_reduce_max(index)],
        f"{folder}/g{index}.pt",
    )
    dist.barrier()  # as in `processes`: an early exit may kill the other process
    dist.destroy_process_group()


def leaves(tree: Any, where: str = "") -> dict[str, Any]:
    """The values of a tree by dotted key."""
    if isinstance(tree, dict):
        return {k: v for key, part in tree.items() for k, v in leaves(part, f"{where}.{key}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for key, part in enumerate(tree) for k, v in leaves(part, f"{where}.{key}").items()}
    return {where: tree}


def play_both(folder: Path, cases: Sequence[Case]) -> None:
    """Write the results of both processes; processes start slowly, so one pair runs all cases."""
    for number, case in enumerate(cases):
        torch.save([vars(rollout) for rollout in rollouts(*case)], folder / f"{number}.pt")
    start_processes(one_of_two, (str(folder), tuple(cases)), nprocs=2, start_method="spawn")


def check_learns_as_one(folder: Path, number: int, case: Case) -> None:
    """Two processes learn the same as one process from all environments."""
    alone = learner(*case)
    start = copy.deepcopy(leaves(alone.state_dict()["policy"]))
    whole = torch.load(folder / f"{number}.pt", weights_only=True)
    metrics = [alone.update(Rollout(**entry)) for entry in whole]
    expected = leaves(alone.state_dict())
    states = [torch.load(folder / f"{number}-{index}.pt", weights_only=True) for index in (0, 1)]
    for key, value in expected.items():
        found, other = (leaves(state)[key] for state, _ in states)
        if isinstance(value, Tensor):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
            assert torch.equal(found, other), key  # both processes are bitwise equal
        else:
            assert found == pytest.approx(value), key
    assert not any(torch.equal(value, expected[f".policy{key}"]) for key, value in start.items() if "weight" in key)
    for one, two in zip(metrics, states[0][1], strict=True):
        assert two["actor/epochs"] == one["actor/epochs"] and two["actor/lr"] == pytest.approx(one["actor/lr"])
