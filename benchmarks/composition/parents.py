"""Demonstrations of a task, and parents that are cloned or fine-tuned; both are made once and stored."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from benchmarks.composition.tasks import PairTask, Parent
from benchmarks.study import train_once
from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats.lerobot import LeRobotWriter, read_lerobot
from robopolicy.data.statistics import dataset_statistics
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.sim.contract import SimSpec
from robopolicy.sim.registry import get_task, make_sim
from robopolicy.training.checkpoint import load_policy, save_checkpoint

DEMONSTRATIONS = 100_000  # first episode seed; a cell adds 1000 * seed


def demonstrations(task: PairTask, seed: int, folder: Path) -> Episodes:
    """Successful episodes of the scripted expert for both parents; episodes of the first parent come first."""
    if not folder.exists():
        with closing(make_sim(task.task, task.options(16))) as sim:
            expert = get_task(task.task).require_expert()()
            with LeRobotWriter(folder, control_dt=sim.spec.control_dt, video=False) as writer:
                episodes = sum(parent.demonstrations for parent in task.parents)
                collect(sim, expert, writer, episodes=episodes, seed=DEMONSTRATIONS + 1000 * seed)
    found = read_lerobot(folder)
    if task.mode is None:
        return found
    key, element = task.mode
    return found.subset(found.arrays[key][found.starts, element].argsort(kind="stable"))


def train_parent(task: PairTask, side: int, data: Episodes, sim: SimSpec, seed: int, folder: Path) -> Policy:
    """Train parent `side` (0 or 1): clone its part of the demonstrations, or fine-tune the first one."""
    parent = task.parents[side]
    if parent.experiment:
        start = (f"task={task.task}", f"init_from={folder.parent / 'parent-0'}", f"seed={seed}")
        return load_policy(train_once(folder, *parent.experiment, *start))[0].eval()
    if folder.exists():
        return load_policy(folder)[0].eval()
    begin = side * task.parents[0].demonstrations
    half = seen_by(parent, data.subset(range(begin, begin + parent.demonstrations)))
    torch.manual_seed(1000 * seed + side)
    shapes = {key: tuple(half.arrays[key].shape[1:]) for key in parent.keys}
    spec = PolicySpec(shapes, sim.action_dim, task.horizon, task.horizon)
    policy = make_policy(parent.head, POLICIES[parent.head].config_class(**parent.settings), spec)
    bounds = {"action": {"min": sim.action_low.numpy(), "max": sim.action_high.numpy()}}  # the same for both parents
    policy.fit_normalizer({**dataset_statistics(half), **bounds})
    algorithm = BC(BCConfig(batch_size=parent.batch_size), policy, total_updates=parent.updates)
    batches = ChunkSampler(half, horizon=task.horizon, batch_size=parent.batch_size, seed=seed)
    for _ in range(parent.updates):
        algorithm.update(next(batches))
    trained = algorithm.inference_policy().eval()
    save_checkpoint(folder, trained, task=task.task, obs_sample=next(batches).obs)
    return trained


def seen_by(parent: Parent, data: Episodes) -> Episodes:
    """The episodes with only the observations of the parent."""
    arrays = {key: data.arrays[key] for key in (*parent.keys, "action")}
    return Episodes(arrays, data.ends, data.tasks, data.seeds, data.control_dt)
