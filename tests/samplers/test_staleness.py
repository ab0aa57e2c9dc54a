"""Asynchronous play: the synchronous limit, the bound on age and on what is in flight, and failures that are heard."""

import threading
import time

import pytest
import torch
from playground import Playground

from robopolicy.core.recipe import Recipe
from robopolicy.text.rollouts.async_queue import Bounded, Players, Stream
from robopolicy.text.rollouts.collector import Collector
from robopolicy.text.rollouts.protocols import Pool, Task

GROUPS = 3
RECIPE = {
    "title": "mean",
    "advantage": [{"name": "baseline", "kind": "mean", "scope": {"partition": "group"}}],
    "estimator": {"surrogate": "clip"},
}


def load_into(world: Playground):
    def load(weights: torch.Tensor) -> None:
        world.logits = weights.clone()

    return load


def collector(world: Playground) -> Collector:
    return Collector({}, Pool(world.tasks()), world, group_size=4, seed=0)


def learn(logits: torch.Tensor, side: Collector, groups, judge: Playground) -> tuple[torch.Tensor, list[int]]:
    """An update of the learner's own table; versions of what it learned from."""
    recipe, batch = Recipe.from_dict(RECIPE), side.batch(groups)
    judge.logits = logits.detach().clone().requires_grad_()
    advantage = recipe.advantage(batch.decisions)
    loss, _ = recipe.loss(batch.decisions, advantage, judge.scored(batch.attempts))
    (gradient,) = torch.autograd.grad(loss, judge.logits)
    side.observe(batch, advantage)
    return (judge.logits - 5.0 * gradient).detach(), batch.decisions.version.tolist()


def asynchronous(limit: int, updates: int, players: int = 1, chunk: int = GROUPS):
    """Train in threads: the final table, and for every update how old its rows were."""
    judge = Playground(length=4, symbols=2)
    logits = judge.logits.detach().clone()
    stream = Stream(Bounded(limit), GROUPS, logits)
    worlds = [Playground(length=4, symbols=2, seed=number) for number in range(players)]
    side = collector(judge)
    ages = []
    team = Players(stream, side.play, [(world, load_into(world)) for world in worlds], chunk)
    try:
        for update in range(updates):
            logits, versions = learn(logits, side, stream.take(GROUPS), judge)
            ages.append([update - version for version in versions])
            stream.learned(logits)
    finally:
        team.stop()
    return logits, ages, stream


def test_no_staleness_is_the_synchronous_loop():
    """Limit of AsyncFlow (Han et al. 2025): s = 0 equals playing and learning in turns, bit for bit."""
    found, ages, _ = asynchronous(0, updates=8)
    world, judge = Playground(length=4, symbols=2), Playground(length=4, symbols=2)
    side, logits = collector(world), world.logits.detach().clone()
    for _ in range(8):
        load_into(world)(logits)
        logits, _ = learn(logits, side, side.play(GROUPS), judge)
    assert torch.equal(found, logits)
    assert {age for update in ages for age in update} == {0}


@pytest.mark.parametrize("limit", [1, 2])
def test_rows_are_never_older_than_the_bound(limit):
    _, ages, stream = asynchronous(limit, updates=12, players=2, chunk=1)
    assert max(age for update in ages for age in update) <= limit
    assert min(age for update in ages for age in update) >= 0
    assert stream.version == 12


def test_what_is_in_flight_is_bounded():
    """AsyncFlow (Han et al. 2025): at most (s + 1) batches are begun and not yet learned from."""
    stream = Stream(Bounded(1), batch=2)
    tickets = [stream.begin(2), stream.begin(2)]
    blocked = threading.Thread(target=lambda: tickets.append(stream.begin(1)), daemon=True)
    blocked.start()
    group = Playground().play([Task(0)])
    stream.deliver([group, group], tickets[0], 2)
    assert len(stream.take(2)) == 2
    time.sleep(0.05)
    assert blocked.is_alive(), "taken is not learned"
    stream.learned(None)
    blocked.join(timeout=5)
    assert not blocked.is_alive() and tickets[2].version == 1


def test_play_and_learning_overlap():
    """AsyncFlow (Han et al. 2025): an update costs the longer of the two, not their sum; here 40 ms each, in sleep."""

    def seconds(limit: int, updates: int = 8) -> float:
        def play(count, world):
            time.sleep(0.04)
            return [world.play([Task(0)])] * count

        stream = Stream(Bounded(limit), batch=1)
        team = Players(stream, play, [(Playground(), lambda weights: None)])
        start = time.perf_counter()
        for _ in range(updates):
            stream.take(1)
            time.sleep(0.04)
            stream.learned(None)
        team.stop()
        return time.perf_counter() - start

    synchronous, overlapped = seconds(0), seconds(1)
    assert synchronous > 8 * 0.08 and overlapped < 0.8 * synchronous


def test_dropped_groups_make_room():
    stream = Stream(Bounded(0), batch=2)
    ticket = stream.begin(2)
    stream.deliver([], ticket, 2)
    assert stream.begin(2) is not None


def test_late_groups_are_left_out():
    stream = Stream(Bounded(0), batch=1)
    group = Playground().play([Task(0)])
    late = stream.begin(1)
    stream.learned(None)  # an update without this group: its weights are now old
    stream.deliver([group], late, 1)
    fresh = stream.begin(0)
    stream.deliver([group], fresh, 1)
    assert [attempt.version for attempt in stream.take(1)[0]] == [1] and stream.stale == 1


def test_a_failing_player_is_heard():
    def play(count, world):
        raise ValueError("no such task")

    stream = Stream(Bounded(0), batch=1)
    team = Players(stream, play, [(Playground(), lambda weights: None)])
    with pytest.raises(RuntimeError, match="A player has failed") as caught:
        stream.take(1)
    assert isinstance(caught.value.__cause__, ValueError)
    team.stop()


def test_waiting_groups_survive_a_checkpoint():
    stream = Stream(Bounded(1), batch=2)
    group = Playground().play([Task(0)] * 3)
    stream.deliver([group], stream.begin(1), 1)
    again = Stream(Bounded(1), batch=2)
    again.load_state_dict(stream.state_dict())
    (taken,) = again.take(1)
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(taken, group, strict=True))
