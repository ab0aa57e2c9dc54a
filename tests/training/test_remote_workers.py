"""Tests of remote rollout workers: rollouts use the weights that were sent, and failures raise errors."""

import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from in_process import InProcessHandle

pytest.importorskip("transformers")

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.rollouts.protocols import Task, require_capability
from robopolicy.text.rollouts.strategies import STRATEGIES, Independent
from robopolicy.text.sim import TextSim
from robopolicy.text.text_env import TextEnv, score
from robopolicy.training.parallel import (
    WORKER_HANDLES,
    ProcessHandle,
    RayHandle,
    arrays_to_tensors,
    tensors_to_arrays,
)
from robopolicy.training.text_rollout_source import AsyncTextRolloutSource
from robopolicy.training.workers import RemoteRolloutEnv, Worker, WorkerSpec, packed_weights
from robopolicy_tasks.text.arithmetic import Arithmetic


def worker(policy, seed=1):
    """A factory of rollout workers for the arithmetic task."""
    return partial(Worker, WorkerSpec.of(policy, "text/arithmetic", seed=seed))


def small(seed=0):
    torch.manual_seed(seed)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (16,)}, 6))


def source(**settings):
    algorithm = TextRecipe(
        TextRecipeConfig(prompts_per_update=4, group_size=2, num_prompts=16, **settings), small(), total_updates=9
    )
    return algorithm, AsyncTextRolloutSource(TextSim(Arithmetic(), SimOptions(num_envs=1)), algorithm, seed=0)


def check_rollouts(line, policy):
    """Checks that tasks return as rollouts sampled with the weights that were sent."""
    home = TextEnv(policy, Arithmetic(), torch.Generator())
    env = RemoteRolloutEnv(line, home)
    try:
        env.load(packed_weights(policy))
        trajectories = env.rollout([Task(key, payload=key, temperature=0.8) for key in (5, 5, 6)])
        batch = env.batch(trajectories)
        torch.testing.assert_close(score(policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)
        assert batch.group.tolist() == [5, 5, 6] and home.generated == int(batch.valid().sum()) > 0
        with pytest.raises(RuntimeError, match="A worker failed"):
            env.load(b"no weights")
    finally:
        env.close()


def test_tensor_trees_round_trip_through_arrays():
    tree = {"a": [torch.arange(3), {"b": torch.tensor([True])}], "c": ("text", 1, None)}
    again = arrays_to_tensors(tensors_to_arrays(tree))
    assert torch.equal(again["a"][0], tree["a"][0]) and torch.equal(again["a"][1]["b"], tree["a"][1]["b"])
    assert again["c"] == tree["c"]


def test_worker_process_acts_with_the_received_weights():
    policy = small(seed=3)
    check_rollouts(ProcessHandle(worker(policy)), policy)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_worker_process_leaves_stop_signals_to_the_main_process(number):
    handle = ProcessHandle(partial(Counter, ["a"]))
    assert handle.call("most_common") == [("a", 1)]
    os.kill(handle._process.pid, number)
    time.sleep(0.2)
    assert handle.call("most_common") == [("a", 1)]
    handle.close()
    assert not handle._process.is_alive()


class FakeRay(SimpleNamespace):
    """The part of Ray's interface that the worker handle uses, in this process."""

    exceptions = SimpleNamespace(RayError=ValueError)

    def __init__(self):
        super().__init__(started=[], killed=[])

    def is_initialized(self):
        return bool(self.started)

    def init(self, **settings):
        self.started.append(settings)

    def available_resources(self):
        return {"CPU": 0.0}

    def remote(self, kind):
        def make(factory):
            return SimpleNamespace(call=SimpleNamespace(remote=partial(self.later, kind(factory).call)))

        return SimpleNamespace(options=lambda num_cpus: SimpleNamespace(remote=make))

    def later(self, method, *arguments):
        return lambda: method(*arguments)

    def get(self, reference):
        try:
            return reference()
        except Exception as error:
            raise ValueError("task failed") from error

    def kill(self, actor):
        self.killed.append(actor)


def test_ray_handle_starts_and_kills_one_actor(monkeypatch):
    ray, policy = FakeRay(), small(seed=3)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.warns(UserWarning, match="The Ray cluster has no free CPU; this waits until it has one"):
        handle = RayHandle(worker(policy))
    check_rollouts(handle, policy)
    assert len(ray.started) == 1 == len(ray.killed)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_rollouts_use_the_weights_that_were_sent():
    policy = small(seed=3)
    check_rollouts(RayHandle(worker(policy)), policy)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_workers_are_on_different_nodes_of_a_cluster(monkeypatch):
    """Three nodes with separate stores run on one machine: the head has no core, the others have one each."""
    ray, policy, store = import_module("ray"), small(seed=3), {"object_store_memory": 80_000_000}
    ray.shutdown()  # an earlier test may have started it
    head = {"num_cpus": 0, "include_dashboard": False, **store}
    cluster = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **store)
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        lines = [RayHandle(worker(policy, seed)) for seed in (1, 2)]
        for line in lines:  # while the other one holds the core of its node
            line.call("load", packed_weights(policy))
        for line in lines:
            check_rollouts(line, policy)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_missing_ray_names_the_extra():
    with pytest.raises(UserError, match=r"pip install 'robopolicy\[ray\]'"):
        RayHandle(worker(small()))


def test_two_workers_share_the_groups_and_respect_the_staleness_bound(monkeypatch):
    monkeypatch.setitem(WORKER_HANDLES, "process", InProcessHandle)
    algorithm, feed = source(staleness=1, num_workers=2)
    try:
        for _ in range(4):
            batch = feed.next(algorithm)
            age = algorithm.updates - batch.version
            assert len(batch) == 8 and int(age.min()) >= 0 and int(age.max()) <= 1
            algorithm.update(batch)
    finally:
        feed.close()
    assert algorithm.updates == 4


class Continued(Independent):
    """Branches from the middle of rollouts."""

    def rollout(self, env, tasks):
        return [require_capability(env, "branch")(trajectory, 1) for trajectory in super().rollout(env, tasks)]


def test_unsupported_worker_requests_raise(monkeypatch):
    monkeypatch.setitem(WORKER_HANDLES, "process", InProcessHandle)
    monkeypatch.setitem(STRATEGIES._rows, "independent", Continued)
    algorithm, feed = source(num_workers=1)
    with pytest.raises(UserError, match="capability 'branch', which RemoteRolloutEnv lacks"):
        for _ in range(4):
            feed.next(algorithm)
    feed.close()
    with pytest.raises(UserError, match="Unknown backend 'rai' of workers"):
        TextRecipeConfig(worker_backend="rai")
