"""Tests of asynchronous rollouts: the synchronous limit, bounds on staleness and on rollouts in flight, failures."""

import threading
import time

import pytest
import torch
from secret_env import SecretSequenceEnv

from robopolicy.core.recipe import Recipe
from robopolicy.text.rollouts.async_queue import BoundedStaleness, NoUsableGroupsError, RolloutQueue, RolloutWorkers
from robopolicy.text.rollouts.collector import Collector
from robopolicy.text.rollouts.protocols import PromptPool, Task

GROUPS = 3
RECIPE = {
    "title": "mean",
    "advantage": [{"name": "baseline", "kind": "mean", "scope": {"partition": "group"}}],
    "estimator": {"surrogate": "clip"},
}


def load_into(env: SecretSequenceEnv):
    def load(weights: torch.Tensor) -> None:
        env.logits = weights.clone()

    return load


def collector(env: SecretSequenceEnv) -> Collector:
    return Collector({}, PromptPool(env.tasks()), env, group_size=4, seed=0)


def learn(
    logits: torch.Tensor, side: Collector, groups, learner_env: SecretSequenceEnv
) -> tuple[torch.Tensor, list[int]]:
    """Update the logits of the learner once; return them and the versions of the rows used."""
    recipe, batch = Recipe.from_dict(RECIPE), side.batch(groups)
    learner_env.logits = logits.detach().clone().requires_grad_()
    advantage = recipe.advantage(batch.decisions)
    loss, _ = recipe.loss(batch.decisions, advantage, learner_env.scored(batch.trajectories))
    (gradient,) = torch.autograd.grad(loss, learner_env.logits)
    side.observe(batch, advantage)
    return (learner_env.logits - 5.0 * gradient).detach(), batch.decisions.version.tolist()


def asynchronous(limit: int, updates: int, num_workers: int = 1, chunk: int = GROUPS):
    """Train with worker threads; return the final logits, the row ages of every update, and the queue."""
    learner_env = SecretSequenceEnv(length=4, symbols=2)
    logits = learner_env.logits.detach().clone()
    queue = RolloutQueue(BoundedStaleness(limit), GROUPS, logits)
    envs = [SecretSequenceEnv(length=4, symbols=2, seed=number) for number in range(num_workers)]
    side = collector(learner_env)
    ages = []
    workers = RolloutWorkers(queue, side.collect_groups, [(env, load_into(env)) for env in envs], chunk)
    try:
        for update in range(updates):
            logits, versions = learn(logits, side, queue.get(GROUPS), learner_env)
            ages.append([update - version for version in versions])
            queue.publish(logits)
    finally:
        workers.stop()
    return logits, ages, queue


def test_zero_staleness_equals_the_synchronous_loop_bit_for_bit():
    """Limit of AsyncFlow (Han et al. 2025): s = 0 equals alternating rollouts and updates, bit for bit."""
    found, ages, _ = asynchronous(0, updates=8)
    env, learner_env = SecretSequenceEnv(length=4, symbols=2), SecretSequenceEnv(length=4, symbols=2)
    side, logits = collector(env), env.logits.detach().clone()
    for _ in range(8):
        load_into(env)(logits)
        logits, _ = learn(logits, side, side.collect_groups(GROUPS), learner_env)
    assert torch.equal(found, logits)
    assert {age for update in ages for age in update} == {0}


@pytest.mark.parametrize("limit", [1, 2])
def test_row_age_never_exceeds_the_staleness_bound(limit):
    _, ages, queue = asynchronous(limit, updates=12, num_workers=2, chunk=1)
    assert max(age for update in ages for age in update) <= limit
    assert min(age for update in ages for age in update) >= 0
    assert queue.version == 12


def test_number_of_batches_in_flight_is_bounded():
    """AsyncFlow (Han et al. 2025): at most (s + 1) batches are started and not yet used by the learner."""
    queue = RolloutQueue(BoundedStaleness(1), batch=2)
    tickets = [queue.reserve(2), queue.reserve(2)]
    blocked = threading.Thread(target=lambda: tickets.append(queue.reserve(1)), daemon=True)
    blocked.start()
    group = SecretSequenceEnv().rollout([Task(0)])
    queue.put([group, group], tickets[0], 2)
    assert len(queue.get(2)) == 2
    time.sleep(0.05)
    assert blocked.is_alive(), "taken is not learned"
    queue.publish(None)
    blocked.join(timeout=5)
    assert not blocked.is_alive() and tickets[2].version == 1


def test_rollouts_and_updates_overlap():
    """AsyncFlow (Han et al. 2025): an update takes the maximum of both times, not the sum; here 40 ms of sleep each."""

    def seconds(limit: int, updates: int = 8) -> float:
        def rollout(count, env):
            time.sleep(0.04)
            return [env.rollout([Task(0)])] * count

        queue = RolloutQueue(BoundedStaleness(limit), batch=1)
        workers = RolloutWorkers(queue, rollout, [(SecretSequenceEnv(), lambda weights: None)])
        start = time.perf_counter()
        for _ in range(updates):
            queue.get(1)
            time.sleep(0.04)
            queue.publish(None)
        workers.stop()
        return time.perf_counter() - start

    synchronous, overlapped = seconds(0), seconds(1)
    assert synchronous > 8 * 0.08 and overlapped < 0.8 * synchronous


def test_dropped_groups_free_their_reservation():
    queue = RolloutQueue(BoundedStaleness(0), batch=2)
    reserved = queue.reserve(2)
    queue.put([], reserved, 2)
    assert queue.reserve(2) is not None


def test_the_queue_closes_when_too_many_groups_in_succession_are_dropped():
    queue = RolloutQueue(BoundedStaleness(1), batch=2, max_dropped=4)
    group = SecretSequenceEnv().rollout([Task(0)])
    for groups in ([], [group], []):
        queue.put(groups, queue.reserve(2), 2)
    assert len(queue.get(1)) == 1
    queue.put([], queue.reserve(2), 2)
    with pytest.raises(RuntimeError) as caught:
        queue.get(1)
    assert isinstance(caught.value.__cause__, NoUsableGroupsError) and queue.reserve(1) is None


def test_stale_groups_are_dropped():
    queue = RolloutQueue(BoundedStaleness(0), batch=1)
    group = SecretSequenceEnv().rollout([Task(0)])
    late = queue.reserve(1)
    queue.publish(None)  # an update without this group: its weights are now old
    queue.put([group], late, 1)
    fresh = queue.reserve(0)
    queue.put([group], fresh, 1)
    assert [trajectory.version for trajectory in queue.get(1)[0]] == [1] and queue.stale == 1


def test_a_worker_failure_is_raised_by_get():
    def rollout(count, env):
        raise ValueError("no such task")

    queue = RolloutQueue(BoundedStaleness(0), batch=1)
    workers = RolloutWorkers(queue, rollout, [(SecretSequenceEnv(), lambda weights: None)])
    with pytest.raises(RuntimeError, match="A rollout worker has failed") as caught:
        queue.get(1)
    assert isinstance(caught.value.__cause__, ValueError)
    workers.stop()


def test_queued_groups_round_trip_through_a_checkpoint():
    queue = RolloutQueue(BoundedStaleness(1), batch=2)
    group = SecretSequenceEnv().rollout([Task(0)] * 3)
    queue.put([group], queue.reserve(1), 1)
    again = RolloutQueue(BoundedStaleness(1), batch=2)
    again.load_state_dict(queue.state_dict())
    (taken,) = again.get(1)
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(taken, group, strict=True))
