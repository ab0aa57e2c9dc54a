"""Person as the chunk policy of a robot, alone or taking over from a policy, with a recording of its episodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.data.collect import EpisodeWriter
from robopolicy.data.episodes import Episode
from robopolicy.deploy.contract import ChunkPolicy, Observed, start_episode
from robopolicy.spec import IMAGE_PREFIX, PolicySpec
from robopolicy.teleop.contract import DISCARD, IMAGE_PERIOD, STOP, SUCCESS, SessionStatus
from robopolicy.teleop.operator import Teleoperator


class HumanChunkPolicy:
    """Chunks of one action of a person; without the dead-man switch, of `base` or of an action that keeps the pose.

    Args:
        operator: The person.
        task: Task of the recorded episodes.
        observation: Shapes of the observations to record, replaced by the shapes of `base` if there is one.
        base: Policy from which the person takes over.
        sink: Receives the recorded episodes.
    """

    takes_prefix = False

    def __init__(
        self,
        operator: Teleoperator,
        task: str,
        observation: Mapping[str, tuple[int, ...]],
        *,
        base: ChunkPolicy | None = None,
        sink: EpisodeWriter | None = None,
    ) -> None:
        self._operator, self._task, self._base, self._sink = operator, task, base, sink
        self.stopped = False  # the person has ended the session
        spec = PolicySpec(observation, operator.action_dim) if base is None else base.spec
        self.spec = PolicySpec(spec.observation, spec.action_dim, obs_horizon=spec.obs_horizon)
        self._rows: deque[NDArray[Any]] = deque()  # remaining actions of the chunk of `base`
        self._anchored = False  # the operator knows the pose from which the person moves
        self._images_due = -np.inf  # [s] time of the next images for the device
        self._frames: list[dict[str, NDArray[Any]]] | None = None  # of the running episode; None before the first
        self._seed, self._kept = -1, 0

    def reset(self, seed: int) -> None:
        """Start episode `seed`; frames before the first reset, of the warm-up, are not recorded."""
        self._operator.reset()
        self._rows.clear()
        self._frames, self._seed, self._anchored = [], seed, False
        if self._base is not None:
            start_episode(self._base, seed)

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Return the next action `(1, A)`; raises a `UserError` of `base`."""
        if not self._anchored:
            self._operator.anchor(obs)
            self._anchored = True
        human = self._operator.move(time.monotonic())
        actions: dict[str, NDArray[Any]] = {"action": human.action.astype(np.float32)}
        if self._base is not None:
            if not self._rows:
                self._rows.extend(self._base.chunk(obs)[: self._base.spec.action_horizon])
            actions["policy_action"] = np.asarray(self._rows.popleft(), np.float32)
            if human.acts:
                self._rows.clear()  # the policy plans anew
            else:
                actions["action"] = actions["policy_action"]
                self._anchored = False
        if self._frames is not None:
            frame = {key: np.asarray(value[-1]) for key, value in obs.items()}
            self._frames.append({**frame, **actions, "intervention": np.asarray(human.acts)})
        for event in human.events:
            self._handle(event)
        waiting = "paused" if self._base is None else "policy"
        status = SessionStatus(self._task, "you" if human.acts else waiting, (("kept", str(self._kept)),))
        self._operator.device.show(status, self._images(obs))
        return actions["action"][None]

    def finish(self, *, success: bool) -> None:
        """End the episode and record it, with success at its last frame if `success`."""
        frames, self._frames = self._frames, None
        if not frames or self._sink is None:
            return
        arrays = {key: np.stack([frame[key] for frame in frames]) for key in frames[0]}
        arrays["success"] = np.zeros(len(frames), np.bool_)
        arrays["success"][-1] = success
        self._sink.add(Episode(arrays, self._task, self._seed))
        self._kept += 1

    def close(self) -> None:
        """Do nothing: the device and `base` belong to the caller."""

    def _images(self, obs: Observed) -> dict[str, NDArray[np.uint8]]:
        """Images `{camera: (h, w, 3)}` that are due on the device."""
        now = time.monotonic()
        if not self._operator.device.shows_images or now < self._images_due:
            return {}
        self._images_due = now + IMAGE_PERIOD
        images = {key: value for key, value in obs.items() if key.startswith(IMAGE_PREFIX)}
        return {key.removeprefix(IMAGE_PREFIX): value[-1].transpose(1, 2, 0) for key, value in images.items()}

    def _handle(self, event: str) -> None:
        """Record the episode so far as a success, or drop it; both start a new one."""
        if event == STOP:
            self.stopped = True
        elif event == DISCARD:
            self._frames = []
        elif event == SUCCESS and self._frames:
            self.finish(success=True)
            self._frames = []
