"""Sessions of a person with a simulator: demonstrations, and corrections of a policy.

Without a policy, time passes only while the person holds the dead-man switch, so that episodes of a few seconds leave
time to think. With a policy, the person takes over by holding the switch and hands back by letting go; frames record
who acted (`intervention`) and the action of the policy (`policy_action`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.collect import CollectReport, EpisodeRecorder, EpisodeWriter
from robopolicy.data.episodes import Episode
from robopolicy.evaluation.actors import PolicyExpert
from robopolicy.evaluation.video import rendering_problem
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.sim.wrappers.base import unwrapped
from robopolicy.teleop.contract import DISCARD, IMAGE_PERIOD, STOP, SUCCESS, SessionStatus
from robopolicy.teleop.operator import HumanAction, HumanOperator

Images = Mapping[str, NDArray[np.uint8]]
log = logging.getLogger(__name__)
IMAGE_SIZE = {"width": 320, "height": 240}  # pixels
KEPT, REPEATED, FAILED = "kept", "repeated", "failed, not kept"


class Clock:
    """Real time; tests replace it."""

    def now(self) -> float:
        """Monotonic time [s]."""
        return time.monotonic()

    def wait(self, until: float) -> None:
        """Wait until the monotonic time `until` [s]."""
        time.sleep(max(0.0, until - time.monotonic()))


@dataclass(frozen=True)
class SessionConfig:
    """Length and speed of a session."""

    episodes: int = 10  # episodes to keep
    seed: int = 0  # of the first episode
    only_success: bool = True  # drop episodes without success of the task or of the person
    speed: float = 1.0  # simulated seconds per second
    camera: str | None = None  # shown to the person; None is the default of the task


class TeleopSession:
    """Session of one person with one environment.

    Args:
        sim: Simulator with one environment.
        operator: The person.
        sink: Receives the kept episodes.
        config: Length and speed.
        policy: Acts while the person does not; None for demonstrations.
        clock: Time.
    """

    def __init__(
        self,
        sim: VectorSim,
        operator: HumanOperator,
        sink: EpisodeWriter,
        config: SessionConfig,
        *,
        policy: PolicyExpert | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._sim, self._operator, self._sink, self._config = sim, operator, sink, config
        self._policy, self._clock = policy, clock or Clock()
        self._kept = self._attempts = self._successes = self._frames = 0
        self._stopping = False
        self._renders: bool | None = None if operator.device.shows_images else False  # None until the first image
        self._images_due = -np.inf
        self._last = ""  # what happened to the last episode

    def run(self, on_step: Callable[[Observation], None] | None = None) -> CollectReport:
        """Run episodes until enough are kept or the person ends the session.

        `on_step` is called with the observation before every decision, e.g. by a scripted person.
        """
        seed = self._config.seed
        while self._kept < self._config.episodes:
            episode, event = self._episode(seed, on_step)
            if event == STOP:
                break
            seed += event != DISCARD
            if episode is None or event == DISCARD:
                self._last = REPEATED
                continue
            self._attempts += 1
            self._successes += episode.success
            keep = episode.success or not self._config.only_success
            self._last = KEPT if keep else FAILED
            if keep:
                self._sink.add(episode)
                self._kept += 1
                self._frames += len(episode)
        return CollectReport(self._kept, self._attempts, self._successes, self._frames)

    def stop(self) -> None:
        """End the session at the next step, as the person can; safe in a signal handler."""
        self._stopping = True

    def _episode(self, seed: int, on_step: Callable[[Observation], None] | None) -> tuple[Episode | None, str]:
        """Run one episode; returns it, None without a step, and the event that ended it, if any."""
        sim, dt = self._sim, self._sim.spec.control_dt / self._config.speed
        obs = sim.reset([seed])
        self._operator.reset()
        recorder = EpisodeRecorder(1, sim.spec.task)
        step: Step | None = None
        handed_back = False
        due = self._clock.now()
        while True:
            if on_step is not None:
                on_step(obs)
            move = self._operator.move(self._clock.now())
            events = (STOP, *move.events) if self._stopping else move.events
            end = next((event for event in (STOP, DISCARD, SUCCESS) if event in events), "")
            if not end and (self._policy is not None or move.acts):
                step, handed_back = self._step(obs, move, recorder, handed_back), move.acts
                obs = step.obs
            self._show(seed, move, step)
            if end or (step is not None and bool(step.done[0])):
                break
            due = max(due + dt, self._clock.now() - dt)  # late steps are not caught up
            self._clock.wait(due)
        if step is None:
            return None, end
        episode = recorder.take(0, seed, has_success=True)
        return (_marked(episode) if end == SUCCESS else episode), end

    def _step(self, obs: Observation, move: HumanAction, recorder: EpisodeRecorder, handed_back: bool) -> Step:
        """Apply the action of the person or of the policy and record it."""
        action = torch.from_numpy(move.action).float().unsqueeze(0).to(self._sim.device)
        actions: dict[str, Tensor] = {}
        if self._policy is not None:
            if handed_back and not move.acts:
                self._policy.replan()
            proposed = self._policy(unwrapped(self._sim), obs)
            actions["policy_action"] = proposed.clamp(*_bounds(self._sim))
            action = action if move.acts else actions["policy_action"]
        actions |= {"action": action.clamp(*_bounds(self._sim)), "intervention": torch.tensor([move.acts])}
        step = self._sim.step(actions["action"])
        recorder.record(obs, actions, step)
        return step

    def _show(self, seed: int, move: HumanAction, step: Step | None) -> None:
        """Show the state of the session."""
        now = self._clock.now()
        images: Images = {}
        if self._renders is not False and now >= self._images_due:
            images, self._images_due = self._render(), now + IMAGE_PERIOD
        waiting = "policy" if self._policy is not None else "paused"
        rows = [("kept", f"{self._kept} of {self._config.episodes}"), ("seed", str(seed))]
        rows.append(("step", f"{0 if step is None else int(self._sim.episode_step[0])}"))
        rows += [("last episode", self._last)] if self._last else []
        status = SessionStatus(self._sim.spec.task, "you" if move.acts else waiting, tuple(rows))
        self._operator.device.show(status, images)

    def _render(self) -> Images:
        """Image of the task; none, with a note, if it cannot be rendered."""
        if self._renders is None:
            problem = rendering_problem(self._sim)
            self._renders = problem is None
            if problem is not None:
                log.warning("No images of the task. %s", problem)
                return {}
        camera = self._config.camera
        frame = self._sim.render(camera, **IMAGE_SIZE)[0]
        return {camera or "default camera": frame.permute(1, 2, 0).contiguous().cpu().numpy()}


def _bounds(sim: VectorSim) -> tuple[Tensor, Tensor]:
    return sim.spec.action_low.to(sim.device), sim.spec.action_high.to(sim.device)


def _marked(episode: Episode) -> Episode:
    """Mark the last frame of an episode as successful, by the person."""
    success: NDArray[Any] = episode.arrays["success"].copy()
    success[-1] = True
    return Episode(episode.arrays | {"success": success}, episode.task, episode.seed)
