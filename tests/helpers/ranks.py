"""Compares learners in two processes, each with half of the rows, with one learner with all of them."""

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, minibatches
from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.core import distributed
from robopolicy.data.batches import GroupRollout, Rollout
from robopolicy.data.chunks import ChunkBatch
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.rollout.groups import GroupSampler
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

Case = tuple[str, str, dict[str, Any]]  # algorithm, policy, settings
CHUNK = 2  # H and Ta
BATCHES = {"rollout": Rollout, "group": GroupRollout, "dataset": ChunkBatch}


def learner(case: Case) -> Any:
    """A small learner of the point mass."""
    name, head, settings = case
    torch.manual_seed(0)
    config = POLICIES[head].config_class(**({"steps": 3} if head != "gaussian" else {}), hidden=(8,))
    policy = make_policy(head, config, PolicySpec({"state": (6,)}, 2, horizon=CHUNK, action_horizon=CHUNK))
    policy.fit_normalizer({"state": bounds(6) | {"count": 10}, "action": bounds(2)})
    return make_algorithm(
        name, ALGORITHMS[name].config_class(**{"batch_size": 16, **settings}), policy, total_updates=4
    )


def bounds(size: int) -> dict[str, Any]:
    """Statistics of `size` dimensions."""
    ones = torch.ones(size)
    return {"min": -ones, "max": ones, "mean": 0 * ones, "std": ones}


def batches(case: Case) -> list[Any]:
    """Two consecutive batches for a learner in one process: of 4 environments, with truncations, or of 16 chunks."""
    algorithm = learner(case)
    if algorithm.data_source == "dataset":
        draw = torch.Generator().manual_seed(1)
        new = partial(torch.randn, generator=draw)
        return [ChunkBatch({"state": new(16, 1, 6)}, new(16, CHUNK, 2), torch.ones(16, CHUNK)) for _ in range(2)]
    sim = make_sim("toy/point_mass", SimOptions(num_envs=4, reward="shaped"))
    chunked = ChunkedSim(sim, action_horizon=CHUNK, gamma=0.99)
    if algorithm.data_source == "group":
        sampler = GroupSampler(chunked, group_size=2, seed=1)
    else:
        sampler = RolloutSampler(chunked, decisions=60 // CHUNK, seed=1)
    result = []
    for _ in range(2):
        result.append(sampler.collect(algorithm.act))
        algorithm.update(result[-1])
    return result


def half(batch: Any, side: int) -> Any:
    """The batch of the first or the last two environments, or every other chunk."""
    if isinstance(batch, ChunkBatch):
        return ChunkBatch({key: x[side::2] for key, x in batch.obs.items()}, batch.chunk[side::2], batch.mask[side::2])
    part = slice(2 * side, 2 * side + 2)
    cut: dict[str, Any] = {}
    for entry in fields(batch):
        value = getattr(batch, entry.name)
        dim = 0 if entry.name in ("last_obs", "group") else 1
        pick = lambda x, dim=dim: x[part] if dim == 0 else x[:, part]  # noqa: E731
        if value is not None:
            cut[entry.name] = pick(value) if isinstance(value, Tensor) else {key: pick(x) for key, x in value.items()}
    mask = batch.truncated & ~batch.terminated
    mine = torch.zeros_like(mask)
    mine[:, part] = True
    cut["final_obs"] = {key: value[mine[mask]] for key, value in batch.final_obs.items()}
    return replace(batch, **cut)


def seed_rank(algorithm: Algorithm, index: int) -> None:
    """Seed the generators of one of two processes."""
    algorithm.generator.manual_seed(100 + index)
    torch.manual_seed(100 + index)


class BothRanks:
    """Gives a learner in one process the minibatches and the noise of two."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm, self.size = algorithm, algorithm.config.batch_size
        self.states: list[tuple[Tensor, Tensor]] = []
        for index in (0, 1):
            seed_rank(algorithm, index)
            self.states.append((algorithm.generator.get_state(), torch.get_rng_state()))
        if hasattr(algorithm, "minibatches"):
            algorithm.minibatches = self.minibatches
        if hasattr(algorithm, "flow_loss"):
            self.complete, algorithm.flow_loss.complete = algorithm.flow_loss.complete, self.complete_both
        if algorithm.data_source == "dataset":
            self.loss, algorithm.loss = algorithm.loss, self.loss_of_both

    def each(self, call: Any) -> list[Any]:
        """Results of `call(index)` with the generators of each process."""
        results = []
        for index, (own, torch_state) in enumerate(self.states):
            self.algorithm.generator.set_state(own)
            torch.set_rng_state(torch_state)
            results.append(call(index))
            self.states[index] = self.algorithm.generator.get_state(), torch.get_rng_state()
        return results

    @staticmethod
    def own(count: int, index: int) -> Tensor:
        """Indices of the rows of a process among `count` rows of 4 environments, time first."""
        return torch.arange(count).view(-1, 4)[:, 2 * index : 2 * index + 2].flatten()

    def minibatches(self, rows: RolloutBatch, shape: tuple[int, int]) -> Iterator[tuple[RolloutBatch, bool]]:
        """Union of the minibatches of both processes."""

        def local(index: int) -> list[tuple[RolloutBatch, bool]]:
            return list(minibatches(rows[self.own(len(rows), index)], self.size // 2, self.algorithm.generator))

        for (first, last), (second, _) in zip(*self.each(local), strict=True):
            yield join([first, second]), last

    def complete_both(self, rows: RolloutBatch) -> RolloutBatch:
        """Points of both processes, in the order of `rows`."""
        whole = join(self.each(lambda index: self.complete(rows[self.own(len(rows), index)])))
        return whole[torch.cat([self.own(len(rows), index) for index in (0, 1)]).argsort()]

    def loss_of_both(self, batch: ChunkBatch) -> Any:
        """Mean loss of the chunks, with the noise of both processes."""
        (one, info), (two, _) = self.each(lambda index: self.loss(half(batch, index)))
        return (one + two) / 2, info


def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Rows of all parts."""
    cat = lambda name: torch.cat([getattr(part, name) for part in parts])  # noqa: E731
    trees = {
        name: {key: torch.cat([getattr(part, name)[key] for part in parts]) for key in getattr(parts[0], name)}
        for name in ("obs", "record")
    }
    return RolloutBatch(**trees, **{name: cat(name) for name in ("logp", "advantage", "value_target", "value")})


def one_of_two(index: int, folder: str, cases: Sequence[Case]) -> None:
    """Train one of two processes on its rows."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=2)
    for number, case in enumerate(cases):
        algorithm = learner(case)
        seed_rank(algorithm, index)
        whole = torch.load(f"{folder}/{number}.pt", weights_only=True)
        kind = BATCHES[algorithm.data_source]
        metrics = [algorithm.update(half(kind(**entry), index)) for entry in whole]
        torch.save([algorithm.state_dict(), metrics], f"{folder}/{number}-{index}.pt")
    rows = torch.arange(3 + index).view(-1, 1) + 10 * index  # of unequal sizes
    gathered = [distributed.all_gather(rows), distributed.all_gather(rows > 10)]
    numbers = [distributed.all_reduce_max(index), distributed.all_reduce_sum(5 + index)]
    torch.save([*gathered, *numbers, distributed.all_gather_bytes(b"ab"[index:])], f"{folder}/g{index}.pt")
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
        torch.save([vars(batch) for batch in batches(case)], folder / f"{number}.pt")
    start_processes(one_of_two, (str(folder), tuple(cases)), nprocs=2, start_method="spawn")


OWN = (".generator", ".scale.running", ".visited.places", ".visited.count")  # state that differs between the processes


def check_learns_as_one(folder: Path, number: int, case: Case) -> None:
    """Two processes learn the same as one process from all rows."""
    alone = learner(case)
    BothRanks(alone)
    trained = {key: value for key, value in alone.policy.named_parameters() if value.requires_grad and "weight" in key}
    start = copy.deepcopy(trained)
    whole = torch.load(folder / f"{number}.pt", weights_only=True)
    metrics = [alone.update(BATCHES[alone.data_source](**entry)) for entry in whole]
    expected = leaves(alone.state_dict())
    states = [torch.load(folder / f"{number}-{index}.pt", weights_only=True) for index in (0, 1)]
    for key, value in expected.items():
        found, other = (leaves(state)[key] for state, _ in states)
        if key in OWN:
            continue
        if isinstance(value, Tensor):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
            assert torch.equal(found, other), key  # both processes are bitwise equal
        else:
            assert found == pytest.approx(value), key
    assert not any(torch.equal(value, trained[key]) for key, value in start.items())
    for one, two in zip(metrics, states[0][1], strict=True):
        assert two["actor/lr"] == pytest.approx(one["actor/lr"])
        assert two.get("actor/epochs") == one.get("actor/epochs")
