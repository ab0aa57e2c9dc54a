"""Tests of the chunk executor: one action per slot as in simulation, for any tick timing and inference latency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rig import robot_spec

from robopolicy.deploy.safety.ood import ActionOODResult
from robopolicy.spec import PolicySpec
from robopolicy_robots.chunk_executor import ChunkExecutor
from robopolicy_robots.policy_runner import InferenceResult
from robopolicy_robots.states import SafetyHold

ACTION, TICK = 0.05, 0.02  # [s]


class Counting:
    """An embodiment that observes slot i as i and records every action."""

    sources: Mapping[str, Any] = {}
    joints: tuple[str, ...] = ("a", "b", "c")
    control_dt = ACTION

    playback: ChunkExecutor

    def __init__(self) -> None:
        self.now, self.seen, self.executed = 0.0, [], []

    def start(self, state: Any) -> None:
        pass

    def observe(self, state: Any) -> dict[str, NDArray[Any]]:
        self.seen.append(self.now)
        return {"state": np.array([float(self.playback._observed)])}

    def command(self, action: NDArray[Any], state: Any) -> NDArray[Any]:
        self.executed.append(float(action[0]))
        return np.repeat(action, 3)


class Latent:
    """A policy that answers after `seconds` with the slot numbers from the observed slot onward."""

    takes_prefix = False

    def __init__(self, clock: Counting, seconds: float, horizon: int, action_horizon: int) -> None:
        self.spec = PolicySpec({"state": (1,)}, 1, horizon, action_horizon)
        self.clock, self.seconds, self.latency, self.asked = clock, seconds, seconds, []
        self.prefixes: list[Any] = []
        self._result: InferenceResult | None = None

    @property
    def busy(self) -> bool:
        return self._result is not None

    def request(self, obs: Any, observed: float, prefix: Any = None) -> bool:
        self.asked.append(int(obs["state"][0, 0]))
        self.prefixes.append(prefix)
        chunk = obs["state"][0, 0] + np.arange(self.spec.horizon, dtype=np.float64)[:, None]
        self._since, self._result = self.clock.now, InferenceResult(observed, self.seconds, chunk)
        return True

    def poll(self) -> InferenceResult | None:
        if self._result is None or self.clock.now < self._since + self.seconds - 1e-9:
            return None
        answer, self._result = self._result, None
        return answer

    def close(self) -> None:
        pass


class Bench:
    """A bench that ticks like the control loop and skips the ticks in `missing`."""

    def __init__(
        self,
        seconds: float = 0.0,
        horizon: int = 4,
        action_horizon: int = 4,
        missing: tuple[int, ...] = (),
        join: str = "replace",
    ) -> None:
        self.embodiment = Counting()
        self.runner = Latent(self.embodiment, seconds, horizon, action_horizon)
        self.runner.takes_prefix = join == "rtc"
        self.playback = self.embodiment.playback = ChunkExecutor(robot_spec(), self.embodiment, self.runner, join, None)
        self.playback.start(0.0, {})
        self.playback.observe(0.0, {})
        self.missing, self.tick, self.departed = missing, 0, False
        self.targets: list[float] = []
        self.gaps = 0  # ticks without an action after the first one

    def run(self, ticks: int) -> Bench:
        for tick in range(self.tick, self.tick + ticks):
            if tick in self.missing:
                continue
            now = tick * TICK
            if ahead := self.playback.ahead(now):
                self.embodiment.now = now - ahead
                self._take()
                self.playback.observe(now, {})
                self.playback.request(now, ahead)
            self.embodiment.now = now
            self._take()
            self.playback.observe(now, {})
            self.playback.request(now)
            self._take()
            goal = self.playback.waypoint(now, {})
            if goal is None:
                self.gaps += self.departed
                continue
            if not self.departed:
                self.playback.begin_segment(now, np.full(3, -1.0))
                self.departed = True
            self.targets.append(float(self.playback.target(now)[0]))
        self.tick += ticks
        return self

    def _take(self) -> None:
        if (answer := self.runner.poll()) is not None:
            self.playback.receive(answer)


@pytest.mark.parametrize("action_horizon", [1, 3, 4, 8])
@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.018, 0.04])
def test_every_action_is_executed_once_in_its_slot(seconds: float, action_horizon: int) -> None:
    bench = Bench(seconds, 8, action_horizon).run(200)
    assert bench.embodiment.executed == list(range(len(bench.embodiment.executed))) and bench.gaps == 0
    assert len(bench.embodiment.executed) == pytest.approx(200 * TICK / ACTION, abs=2)
    assert np.diff(bench.runner.asked).tolist() == [action_horizon] * (len(bench.runner.asked) - 1)


@pytest.mark.parametrize("seconds", [0.0, 0.015, 0.035])
def test_the_whole_chunk_is_executed_if_inference_takes_less_than_an_action(seconds: float) -> None:
    bench = Bench(seconds).run(150)
    assert bench.gaps == 0 and np.diff(bench.runner.asked).tolist() == [4] * (len(bench.runner.asked) - 1)
    ahead = np.array(bench.embodiment.seen[4:]) - np.arange(4, len(bench.embodiment.seen)) * ACTION
    assert (ahead < TICK).all() and (ahead >= -np.ceil(seconds / TICK) * TICK - TICK).all()


def test_longer_inference_drops_actions_at_the_end_of_each_chunk() -> None:
    bench = Bench(0.07).run(150)
    assert set(np.diff(bench.runner.asked)) == {3} and bench.gaps == 0
    assert np.diff(bench.embodiment.executed).tolist() == [1] * (len(bench.embodiment.executed) - 1)


def test_targets_move_evenly_and_no_faster_than_the_actions() -> None:
    """The targets then pass the velocity limit of the safety filter, which the task's controller meets per action."""
    for seconds in (0.0, 0.015, 0.03):
        steps = np.diff(Bench(seconds).run(100).targets)
        assert (steps <= TICK / ACTION + 1e-9).all() and steps[5:].min() >= TICK / ACTION - 1e-9


def test_actions_of_missed_ticks_still_reach_the_controller() -> None:
    bench = Bench(0.0, 8, 4, missing=(11, 12, 13, 14, 15, 31)).run(60)
    assert bench.embodiment.executed == list(range(len(bench.embodiment.executed)))
    assert bench.embodiment.executed[-1] == int(59 * TICK / ACTION)


def test_the_executor_waits_for_a_late_chunk_up_to_one_action() -> None:
    bench = Bench(0.015).run(8)
    bench.runner.seconds = 0.045  # this chunk is one or two ticks late
    bench.run(30)
    assert bench.gaps == 0
    assert np.diff(bench.embodiment.executed).tolist() == [1] * (len(bench.embodiment.executed) - 1)
    steps = np.diff(bench.targets)
    assert (steps >= -1e-9).all() and (steps <= TICK / ACTION + 1e-9).all() and (steps < 1e-9).any()
    bench.runner.seconds = 10.0
    bench.run(30)
    assert bench.gaps > 15 and bench.embodiment.executed[-1] == bench.targets[-1]


@pytest.mark.parametrize("seconds, committed", [(0.0, 0), (0.01, 0), (0.04, 0), (0.07, 1), (0.13, 2)])
def test_the_prefix_holds_the_actions_executed_during_inference(seconds: float, committed: int) -> None:
    bench = Bench(seconds, 8, 4, join="rtc").run(150)
    assert bench.runner.prefixes[0] is None  # no chunk yet
    for slot, prefix in list(zip(bench.runner.asked, bench.runner.prefixes, strict=True))[1:]:
        found = [] if prefix is None else prefix[:, 0].tolist()
        assert found == list(range(slot, slot + committed))
    assert np.diff(bench.embodiment.executed).tolist() == [1] * (len(bench.embodiment.executed) - 1)


def test_chunks_from_before_a_start_are_not_executed() -> None:
    bench = Bench(0.03).run(1)
    bench.playback.start(TICK, {})
    bench.run(1)
    assert bench.playback.remaining(2 * TICK) == 0.0
    bench.run(20)
    assert bench.embodiment.executed[0] in (0.0, 1.0)


def test_an_answer_to_an_earlier_request_is_not_executed_after_a_start() -> None:
    bench = Bench(0.03).run(1)
    late, bench.runner._result = bench.runner._result, None
    assert late is not None
    bench.playback.start(TICK, {})
    bench.playback.observe(TICK, {})
    bench.playback.request(TICK)
    bench.playback.receive(late)
    assert bench.playback.remaining(TICK) == 0.0
    assert bench.runner._result is not None
    bench.playback.receive(bench.runner._result)
    assert bench.playback.remaining(TICK) == pytest.approx(4 * ACTION)


def test_missing_history_repeats_the_first_observation() -> None:
    bench, asked = Bench(0.0, 8, 1), []
    bench.runner.spec = PolicySpec({"state": (1,)}, 1, 8, 1, obs_horizon=3)
    bench.runner.request = lambda obs, *_: asked.append(obs["state"][:, 0].tolist())  # type: ignore
    playback = bench.embodiment.playback = ChunkExecutor(robot_spec(), bench.embodiment, bench.runner, "replace", None)
    playback.start(0.0, {})
    for slot in range(4):
        playback.observe(slot * ACTION, {})
        playback.request(slot * ACTION)
    assert asked == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("mode", "expected"), [("absolute", 0.5 + 0.3 * (1.0 - 0.5)), ("velocity", 0.3 * 1.0)])
def test_an_unsupported_action_is_scaled_from_the_standstill_command(mode: str, expected: float) -> None:
    bench = Bench()
    playback = ChunkExecutor(robot_spec(mode=mode), bench.embodiment, bench.runner, "replace")
    playback._goal = np.full(3, 0.5)  # of the previous action
    bent = playback._supported(ActionOODResult(0.3, False, -2.0, -1.0), np.ones(3), True, 7.0)
    np.testing.assert_allclose(bent, expected)
    assert [(each.kind, each.value, each.limit) for each in playback.limited()] == [("support", -2.0, -1.0)]
    assert playback.limited() == ()
    with pytest.raises(SafetyHold, match="out-of-distribution action: score -2, at least -1"):
        playback._supported(ActionOODResult(0.3, False, -2.0, -1.0), np.ones(3), False, 7.0)  # the first action
